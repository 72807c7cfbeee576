"""Persistent kernels, which load by TMA: bit for bit what the kernels with a program for each tile give.

On sm_80 a launcher has no such tile and takes the others, so these tests compare those with themselves there.
"""

import re

import pytest
import torch
import triton
from support.cases import whole_numbers
from support.kernel_cases import (
    LAUNCHERS,
    SUMS_OF_ROWS,
    TILE_NAMES,
    assert_equal,
    dropout_of,
    far_apart,
    inputs_of,
    kernel,
)

from ckptkern.triton_kernels import linear, mlp, persistent
from ckptkern.triton_kernels.tile import INTERPRETED_TILE, TILES

BF16 = torch.bfloat16
NAMES = ("linear_fwd", "act_grad", "gated_act_grad")
KERNELS = dict(zip(NAMES, (
    linear._linear_fwd_persistent_kernel, linear._act_grad_persistent_kernel, mlp._gated_act_grad_persistent_kernel,
), strict=True))  # fmt: skip
# The last tile of rows and of columns and the last step of a matmul are not full, in the interpreter's tiles and on sm_90.
INTERPRETED = triton.knobs.runtime.interpret
UNEVEN = dict.fromkeys("MKND", 80) if INTERPRETED else {"M": 200, "N": 208, "K": 80, "D": 80}


@pytest.fixture
def launched(monkeypatch) -> list[tuple]:
    """(kernel, grid) of every launch of a matmul."""
    found, launch = [], persistent.launch

    def spy(kernel, grid, *args, **kwargs):
        found.append((kernel, grid))
        launch(kernel, grid, *args, **kwargs)

    monkeypatch.setattr(persistent, "launch", spy)
    return found


def tiles_of(name: str, architecture: int | None, device: str):
    """(a tile with a program for each, a persistent one) that the launcher may take here; skips where there is none."""
    if device == "cuda":
        architecture = 90 if torch.cuda.get_device_capability() == (9, 0) else 80
    if architecture == 80:
        pytest.skip("no TMA")
    if architecture is None:
        return INTERPRETED_TILE, INTERPRETED_TILE._replace(programs=1)
    table = TILES[TILE_NAMES[name], architecture]
    return table["16"], table["tma"]


def given(name: str, device: str, dtype: torch.dtype = BF16, **sizes) -> dict:
    """Inputs; in the interpreter whole numbers, because numpy's matmul of a transposed tile adds in another order."""
    tensors = inputs_of(LAUNCHERS[name], dtype, device, **UNEVEN | sizes)
    return whole_numbers(tensors) if INTERPRETED else tensors


def both(name: str, architecture, device, tensors: dict, activation: str = "gelu", **options) -> tuple[dict, dict]:
    """Results of both kinds, in whose sums of columns tiles have the same height."""
    unfused, held = tiles_of(name, architecture, device)
    one, other = (kernel(LAUNCHERS[name], tensors, activation, tile=tile, **options) for tile in (unfused, held))
    assert_equal(other, one)
    return one, other


@pytest.mark.parametrize("programs", [1, 3, 1000], ids="{} programs".format)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name, programs, architecture, device, launched, monkeypatch):
    """Several tiles a program, and fewer tiles than programs."""
    monkeypatch.setattr(persistent, "sms_of", lambda x: programs)
    options = {"dropout": dropout_of(0.3, device), "row_base": 48} if programs > 1 else {}
    both(name, architecture, device, given(name, device), **options)
    _, (taken, (grid,)) = launched
    assert taken is KERNELS[name]
    held = tiles_of(name, architecture, device)[1]
    tiles = -(-UNEVEN["M"] // held.BLOCK_M) * -(-UNEVEN["N"] // held.BLOCK_N)
    assert grid == min(tiles, held.programs * programs)
    assert (grid < tiles) == (programs < 1000) or architecture == 90


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_few_results_and_views(name, architecture, device):
    """One row, no bias, nothing saved; in float16 operands with rows far apart and another start."""
    tensors = given(name, device, M=1) | dict.fromkeys(LAUNCHERS[name].biases)
    both(name, architecture, device, tensors, "relu", **dict.fromkeys(LAUNCHERS[name].wants, False))
    tensors = given(name, device, torch.float16)
    matrices = {key: t for key, t in tensors.items() if t.dim() == 2}
    wide = {key: t.new_full((t.shape[0] + 4, t.shape[1] + 64), float("nan")) for key, t in matrices.items()}
    views = {key: around[2:-2, 16:-48].copy_(matrices[key]) for key, around in wide.items()}
    _, result = both(name, architecture, device, tensors | views, "relu")
    assert_equal(result, kernel(LAUNCHERS[name], tensors, "relu"), SUMS_OF_ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_beyond_int32(name, architecture):
    """Operands and results (h over z) whose rows start more than 2**31 elements after the first."""
    tensors = given(name, "cpu", M=9, N=16, K=48, D=48)
    far = {key: far_apart(t) for key, t in tensors.items() if t.dim() == 2}
    expected, held = tiles_of(name, architecture, "cpu")
    over = {"h_over_z": True} if name == "act_grad" else {}
    there = kernel(LAUNCHERS[name], tensors | far, "relu", tile=held, **over)
    assert_equal(there, kernel(LAUNCHERS[name], tensors, "relu", tile=expected))


@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        (r"fence\.proxy\.async[^;]*;", "proxy: TMA's write"),  # the epilogue's scratch lies where the next tile lands
        (r"mbarrier\.inval[^;]*;", "mbarrier"),
        (r"@!complete bra[^;]*;", "in flight"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_injected(name, bug, fault, architecture, monkeypatch):
    """What only a second tile of one program can show, too."""
    if architecture is None:
        pytest.skip("asks the emulator: --device emulated")
    from emulator import Fault
    from emulator.emulated import emulated

    monkeypatch.setattr(persistent, "sms_of", lambda x: 1)
    held = tiles_of(name, architecture, "cpu")[1]
    lost = emulated(architecture, change=lambda ptx: re.sub(r"(@%p\d+ )?" + bug, "", ptx))
    with lost, pytest.raises(Fault, match=fault):
        kernel(LAUNCHERS[name], given(name, "cpu"), "silu", tile=held)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_keeps_the_descriptors(name):
    """They are parameters by value, so that a replay reads what the operands' memory has then."""
    held = tiles_of(name, None, "cuda")[1]
    tensors = {key: torch.zeros_like(t) for key, t in given(name, "cuda").items()}
    kernel(LAUNCHERS[name], tensors, "gelu", tile=held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernel(LAUNCHERS[name], tensors, "gelu", tile=held)
    for key, values in given(name, "cuda").items():
        tensors[key].copy_(values)
    graph.replay()
    assert_equal(results, kernel(LAUNCHERS[name], tensors, "gelu", tile=held))
