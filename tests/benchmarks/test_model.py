"""The model's launches, FLOPs and estimates against torch's own counts and formulas by hand; none of it is a time of a GPU."""

import csv
import dataclasses
import json
import math
import subprocess
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import outside
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import rehearsal
from benchmarks.model import calibrate, estimate, published, rates, sass, sheet, trace
from benchmarks.model.__main__ import main
from ckptkern.benchmarks import cases, measure
from ckptkern.ops.dispatch import choices as _choices

H200, A100 = rates.GPUS["h200"], rates.GPUS["a100"]
BY_NAME = {case.name: case for case in cases.CASES}
CPU_RESULTS = Path(outside.ROOT, "benchmarks", "results", "cpu", "results.csv")


def no_codes(caught):
    raise AssertionError(f"{caught} was to be no launch of ours")


def steps(name: str, width: int, rows: int, length: int | None = None, gpu=H200) -> dict[str, trace.Trace]:
    """Eager and the checkpoints of a case at a size of its own."""
    item = cases.Item(BY_NAME[name], cases.Size(width, rows, length), 0)
    model, x = trace.build(item)
    made = sheet.modelled(item)
    return {
        variant: trace.step(gpu, made[variant], model, x)
        for variant in (cases.EAGER, cases.CHECKPOINT, sheet.SAVED)
        if variant in made
    }


def seconds(launches, gpu=H200) -> float:
    return estimate.total(launches, gpu, no_codes).seconds


# -- launches ----------------------------------------------------------------------------------------------------------


class Names(TorchDispatchMode):
    """The ops that CPU tensors meet, without what makes or views one."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in (
            "t",
            "transpose",
            "view",
            "_unsafe_view",
            "detach",
            "empty_like",
            "empty",
            "unsafe_split",
            "expand",
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "counts"), [("mlp-gelu", (3, 7)), ("gated_mlp-silu", (5, 10)), ("linear_stack-relu", (20, 40))]
)
def test_launches_are_those_of_real_tensors(name, counts):
    found = steps(name, 16, 8)[cases.EAGER]
    model = BY_NAME[name].model(16)
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    with Names() as real:
        model(x).backward(dy)
    assert Counter(launch.name.split()[0] for launch in found.launches) == Counter(real.names)
    assert (len(found.forward), len(found.backward)) == counts


def test_a_gpt_layer_by_hand():
    found = steps("gpt_layer", 1024, 4096, 2048)
    kinds = [launch.kind for launch in found[cases.EAGER].forward]
    assert kinds == ["norm", "matmul", "core", "matmul", "elementwise", "norm", *(["matmul", "elementwise"] * 2)]
    again = len(found[cases.CHECKPOINT].backward) - len(found[cases.EAGER].backward)
    assert again == len(kinds) - 2  # stops before the last matmul and the sum after it
    assert len(found[cases.CHECKPOINT].backward) - len(found[sheet.SAVED].backward) == 1  # the core
    assert found[cases.CHECKPOINT].saved == 4096 * 1024 * 2
    assert found[sheet.SAVED].saved > found[cases.CHECKPOINT].saved + 4096 * 1024 * 2


def test_a_llama_layer_by_hand():
    """Two norms, seven matmuls, a core; two rotations of five passes, two sums, SiLU and its matmul. A norm is one kernel."""
    found = steps("llama_layer", 1024, 4096, 2048)[cases.EAGER]
    assert Counter(launch.kind for launch in found.forward) == {"norm": 2, "matmul": 7, "core": 1, "elementwise": 14}
    assert Counter(launch.kind for launch in found.backward if launch.kind != "elementwise") == {
        "norm": 2,
        "matmul": 14,
        "core": 1,
    }
    (core,) = [launch for launch in found.forward if launch.kind == "core"]
    assert core.flops == 4 * 2 * 8 * 2048 * 2048 * 128  # of all eight heads, which share two of keys and values


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mlp-relu", (64, 32)),
        ("linear_stack-relu", (64, 32)),
        ("gpt_layer", (512, 256, 128)),
        ("gated_mlp-silu", (64, 32)),
    ],
)
def test_flops_of_eager_are_those_of_torchs_counter(name, size):
    found = steps(name, *size)[cases.EAGER]
    model, x = trace.build(cases.Item(BY_NAME[name], cases.Size(*size), 0))
    with trace.as_on(H200), FlopCounterMode(display=False) as counter:
        y = model(x)
        y.backward(torch.empty_like(y))
    assert sum(launch.flops for launch in found.launches) == counter.get_total_flops() > 0


TOKENS, TOP_K, D, H, EXPERTS = 256, 2, 64, 24, 8  # of the narrow MoE layer


def test_an_moe_by_hand():
    """transformers' way: a gather, two grouped matmuls around silu and its matmul, weights, a second gather, a sum; the
    gradients of gathers add rows up. What it saves is what tests/nn counts on a CPU, and x for the router."""
    found = steps("moe_mlp-silu", D, TOKENS)
    rows, eager = TOKENS * TOP_K, found[cases.EAGER]
    grouped = [launch for launch in eager.launches if launch.name.startswith("_grouped_mm")]
    padded = rows + EXPERTS * 64  # half of a tile of 128 for each
    assert [launch.shape for launch in grouped] == [
        (padded, 2 * H, D), (padded, D, H),
        (EXPERTS * D, H, rows // EXPERTS), (padded, H, D), (EXPERTS * 2 * H, D, rows // EXPERTS), (padded, D, 2 * H),
    ]  # fmt: skip
    assert sum(launch.flops for launch in grouped) == 9 * 2 * rows * D * H
    assert Counter(launch.kind for launch in eager.launches if launch not in grouped)["matmul"] == 3  # the router's
    assert Counter(launch.name.split()[0] for launch in eager.backward)["index_put"] == 3
    router = 2 * TOKENS * D + 2 * TOKENS * TOP_K
    assert eager.saved == router + rows * (2 * (2 * D + 4 * H + 1) + 3 * 8) + 4 * EXPERTS
    again = [launch.name for launch in found[cases.CHECKPOINT].backward if launch.name.startswith("_grouped_mm")]
    assert len(again) == 4 + 2  # its output is multiplied, so that the last matmul runs again, too


@pytest.mark.parametrize("tile", [64, 128])
def test_experts_of_ours_by_hand(tile):
    """65536 rows of 128 experts; whole tiles, the last of each expert half empty. The matmuls of a forward share a loop."""
    named = dict(BLOCK_M=tile, BLOCK_N=128, BLOCK_K=64, R=65536, N=768, K=2048, offs_ptr=torch.empty(129))
    caught = types.SimpleNamespace(name="_experts_fwd_kernel", named=named)
    flops, shape = trace._expert_kernel(caught.name, named)
    assert (flops, shape) == (2 * 2 * 65536 * 768 * 2048, (65536 + 128 * tile // 2, 768, 2 * 2048))
    launch = trace.Launch("experts_fwd", "kernel", flops, 0, shape, caught=caught)
    tensor = 2 * tile * 128 * 2 * 2048 / 4096 / 0.86 * 1.13
    turns = math.ceil((65536 / tile + 64) * 6 / 132)
    assert estimated(launch, registers=200).parts["kernels"] == pytest.approx(turns * (tensor + 3300) / 1.55e9)
    busy = max(1.04 * tensor, (1000 * 2 + 1000 * 32 * 2) / 0.85) + 0.15 * 3300
    turns = 2 * math.ceil((65536 / tile + 64) * 6 / 264)
    assert estimated(launch, loops=(1000,)).parts["kernels"] == pytest.approx(turns * busy / 1.55e9)


def test_gradients_of_experts_by_hand():
    named = dict(
        BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, M=1536, N=2048, offs_ptr=torch.empty(129), order_ptr=torch.empty(65536)
    )
    flops, shape = trace._expert_kernel("_experts_dw_kernel", named)
    assert (flops, shape) == (2 * 65536 * 1536 * 2048, (128 * 1536, 2048, 512 + 32))


def test_the_peak_of_a_step_by_hand():
    """tanh(x w^T) of 64 rows: its gradient needs y alone, so that z is gone when dy comes."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Tanh()).to("meta", torch.bfloat16)
    x, wide, narrow, weight = (
        torch.empty(64, 16, device="meta", dtype=torch.bfloat16),
        64 * 32 * 2,
        64 * 16 * 2,
        32 * 16 * 2,
    )
    frozen = trace.peak(H200, lambda model, x: model, model, x)
    assert frozen == 3 * wide + weight  # y, dy, dz and dw
    assert trace.peak(H200, lambda model, x: model, model, x.requires_grad_()) == 3 * wide + weight + narrow


def test_bytes_are_read_and_written_once():
    a, b = (torch.empty(64, 32, device="meta", dtype=torch.bfloat16) for _ in range(2))
    with trace.as_on(H200) as log:
        a + b
        a.copy_(b)
        a.expand(8, 64, 32) * 2
        torch.sum(a, 0)
        a.t()
    size = 64 * 32 * 2
    assert [launch.bytes for launch in log] == [3 * size, 2 * size, 9 * size, size + 32 * 2]


def test_a_kernel_with_matmuls_that_no_table_names():
    kernel = types.SimpleNamespace(fn=types.SimpleNamespace(__name__="_new_kernel"), params=[])
    with pytest.raises(NotImplementedError, match="_new_kernel has a BLOCK_K but no entry in MATMULS"):
        trace.triton_launch(trace.Caught(kernel, (1,), (), {"BLOCK_K": 64}))


def test_everything_is_as_before_afterwards():
    x = torch.empty(2, device="meta")
    before = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.rms_norm, torch.nn.functional.dropout
    with trace.as_on(A100):
        assert x.is_cuda
        assert torch.cuda.get_device_capability() == (8, 0)
    assert not x.is_cuda
    assert "is_cuda" not in vars(torch.Tensor)
    after = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.rms_norm, torch.nn.functional.dropout
    assert before == after


# -- estimates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", rates.GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("name", "length"), [("mlp-gelu", None), ("gpt_layer", 1024)])
def test_more_tokens_and_slower_parts_cost_more(gpu, name, length):
    found = [steps(name, 512, rows, length, gpu) for rows in (1024, 2048, 4096)]
    for variant in found[0]:
        costs = [seconds(one[variant].launches, gpu) for one in found]
        assert costs == sorted(set(costs)), variant
        slower = dataclasses.replace(gpu, scales=rates.Scales(bandwidth=2.0))
        assert costs[0] < seconds(found[0][variant].launches, slower) < 2 * costs[0]
    dearer = [name for name in rates.Scales._fields if name != "kernels" and (length or name != "attention")]
    for name in dearer:
        slower = dataclasses.replace(gpu, scales=rates.Scales(**{name: 1.5}))
        assert seconds(found[-1][cases.EAGER].launches, slower) > seconds(found[-1][cases.EAGER].launches, gpu), name


def test_checkpoint_by_hand():
    """eager, and the first matmul and GELU again: torch stops early, before the last matmul."""
    d, rows = 128, 4096
    found = steps("mlp-gelu", d, rows)
    h, gap = 4 * d, H200.launch

    def moving(elements):
        return 2 * elements / (4.3e12 * 0.85)

    def product(m, n, k):
        rate = 750e12 * {128: 0.80, 512: 0.885, 4096: 0.971}[k]
        return max(2 * m * n * k / rate, moving(m * k + k * n + m * n)) + gap

    first = max(2 * rows * h * d / (750e12 * 0.80), moving(rows * d + d * h + h + rows * h)) + gap
    gelu = moving(2 * rows * h) + gap
    last = max(2 * rows * d * h / (750e12 * 0.885), moving(rows * h + d * h + d + rows * d)) + gap
    sums = sum(2 * (rows * n + n) / (4.3e12 * 0.60) + gap for n in (d, h))
    backward = product(rows, h, d) + product(d, h, rows) + product(rows, d, h) + product(h, d, rows) + sums
    backward += moving(3 * rows * h) + gap
    assert seconds(found[cases.EAGER].forward) == pytest.approx(first + gelu + last)
    assert seconds(found[cases.EAGER].backward) == pytest.approx(backward)
    assert seconds(found[cases.CHECKPOINT].forward) == pytest.approx(first + gelu + last)
    assert seconds(found[cases.CHECKPOINT].backward) == pytest.approx(first + gelu + backward)


def test_selective_checkpoint_is_cheaper_by_the_core():
    found = steps("attention", 1024, 8192, 2048)
    (core,) = [launch for launch in found[cases.EAGER].forward if launch.kind == "core"]
    assert core.flops == 2 * 2 * 4 * 8 * 2048 * 2048 * 128
    assert seconds([core]) == pytest.approx(core.flops / 2 / 484e12 + H200.launch)
    saved = seconds(found[cases.CHECKPOINT].launches) - seconds(found[sheet.SAVED].launches)
    assert saved == pytest.approx(seconds([core]))


CODE = sass.Code(registers=128, stack=0, shared=100_000, warps=8, loops=(100,), outside=1000)


def of_ours(M=16384, N=4096, K=1024, tile=(128, 128, 64), moved=0) -> trace.Launch:
    named = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    caught = types.SimpleNamespace(name="_linear_fwd_kernel", named=named)
    return trace.Launch("linear_fwd", "kernel", 2 * M * N * K, moved, (M, N, K), caught=caught)


def estimated(launch, **changes) -> estimate.Estimate:
    return estimate.estimate(launch, H200, lambda caught: dataclasses.replace(CODE, **changes))


def test_a_matmul_of_ours_by_hand():
    """4096 tiles of 128 x 128 on 132 SMs; 128 wide, so shared memory slows the tensor cores by 1.13."""
    tensor = 2 * 128 * 128 * 1024 / 4096 / 0.86 * 1.13
    alone = math.ceil(4096 / 132) * (tensor + 800 + 1000 * 2 / 0.80) / 1.55e9
    found = estimated(of_ours(), registers=200)
    assert found.parts == pytest.approx({"kernels": alone, "launch": 1.5e-6})
    assert (found.bound, found.epilogue) == ("tensor cores", pytest.approx(2500 / (tensor + 3300)))
    issue = (2000 + 100 * 16 * 2) / 0.85
    assert issue < tensor
    shared = math.ceil(4096 / 264) * 2 * (1.04 * tensor + 0.15 * 3300) / 1.55e9
    assert estimated(of_ours()).parts["kernels"] == pytest.approx(shared)


def test_few_tiles_of_ours_by_hand():
    """Programs that share an SM where there are many are alone on it here; 133 on 132 share one, whatever fits."""

    def turns(tiles: int) -> tuple[float, float]:
        launch = of_ours(M=128 * tiles, N=128)
        return estimated(launch, registers=200).parts["kernels"], estimated(launch).parts["kernels"]

    (alone, also_alone), (twice, shared) = turns(132), turns(133)
    assert also_alone == alone
    assert twice == pytest.approx(2 * alone)
    assert alone < shared < twice


def test_what_bounds_a_launch():
    assert estimated(of_ours(), registers=200, outside=20_000).bound == "epilogue"
    assert estimated(of_ours(moved=2**33)).parts.keys() == {"bandwidth", "launch"}
    assert estimated(of_ours(moved=2**33)).bound == "bytes"
    assert estimated(of_ours(M=128, N=128, K=64), outside=100).bound == "launch"
    assert estimated(of_ours(), outside=2000).seconds > estimated(of_ours()).seconds
    assert estimated(of_ours(M=128)).seconds < estimated(of_ours(M=1024)).seconds


def attention_of_ours(causal: bool) -> estimate.Estimate:
    flops = 4 * 8 * 8 * 2048 * 2048 * 128
    named = dict(BLOCK_M=128, BLOCK_N=64, HEAD_D=128)
    caught = types.SimpleNamespace(named=named, grid=(1024,))
    launch = trace.Launch("attn_fwd", "kernel", flops, 0, (8, 8, 2048, 2048, 128), causal, caught)
    return estimated(launch, registers=200, loops=(434, 562))


def test_attention_of_ours_visits_what_is_visible():
    assert estimate.visible_tiles(2048, 2048, 128, 64, False) == 16 * 32
    assert estimate.visible_tiles(2048, 2048, 128, 64, True) == sum(2 * (i + 1) for i in range(16))
    causal, whole = attention_of_ours(True), attention_of_ours(False)
    assert 0.5 < causal.seconds / whole.seconds < 0.6
    tensor, issue = 4 * 128 * 64 * 128 / 4096, 434 * 2
    cycles = (tensor + issue) / 0.85 * 64 * 512 + 1024 * (800 + 1000 * 2 / 0.80)
    assert whole.parts["kernels"] == pytest.approx(cycles / 132 / 1.55e9)


# -- SASS --------------------------------------------------------------------------------------------------------------

SASS = """
.L_x_0:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   MUFU.EX2 R3, R3 ;
        /*0018*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0020*/              @!P0 HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8] ;
        /*0030*/              @P1 BRA `(.L_x_1) ;
        /*0040*/                   LOP3.LUT R3, R4, R5 ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   FADD R3, R4, R5 ;
        /*0070*/               @P3 BRA `(.L_x_2) ;
        /*0080*/               @P3 BRA `(.L_x_9) ;
.L_x_9:
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   SYNCS.PHASECHK P0, [UR14], R4 ;
        /*00b0*/              @!P0 BRA `(.L_x_3) ;
        /*00c0*/                   BRA `(.L_x_4) ;
"""


def test_the_innermost_loop_with_matmuls_is_found():
    """The wait in it is a loop of its own, behind all."""
    loops, others = sass.innermost_loops(SASS)
    assert loops == [["MUFU.EX2", "BRA", "HGMMA.64", "BRA"]]
    assert others == ["MOV", "LOP3.LUT", "BRA", "FADD", "BRA", "BRA", "EXIT", "SYNCS.PHASECHK", "BRA", "BRA"]


@pytest.mark.parametrize(
    ("mnemonics", "cycles"),
    [
        (["FADD"] * 20, 20),
        (["FADD"] * 4 + ["MUFU.EX2"] * 2, 16),
        (["IADD3.X", "LOP3.LUT"] * 5 + ["MOV"], 20),
        (["F2FP.BF16.F32.PACK_AB"] * 3, 6),
    ],
)
def test_issue_cycles(mnemonics, cycles):
    assert sass.issue_cycles(mnemonics) == cycles


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({}, 2),
        ({"registers": 129}, 1),
        ({"registers": 121}, 2),
        ({"registers": 81, "shared": 10_000}, 2),  # registers come in eights
        ({"shared": 120_000}, 1),
        ({"warps": 4, "shared": 50_000}, 4),
    ],
)
def test_programs_of_a_multiprocessor(changes, programs):
    assert dataclasses.replace(CODE, **changes).programs(H200.shared) == programs


def test_the_model_refuses_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="run it in a process without TRITON_INTERPRET=1"):
        sass.read_all({"a": None}, 90)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a process without the interpreter traced, said and wrote."""
    folder = tmp_path_factory.mktemp("model")
    process = outside.start(
        str(outside.ROOT / "tests" / "support" / "modelled.py"), str(folder / "launched.json"),
        "--cases", "linear_act-relu/d4096x128",
        "--modes", "selective,full", "--explain", "ckptkern full", "--workers", "1", "--impl", "triton", "--out", str(folder),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, error = process.communicate()
    assert process.returncode == 0, error
    with open(folder / "h200.csv", newline="") as file:
        return json.loads((folder / "launched.json").read_text()), out, error, list(csv.DictReader(file))


def test_launches_of_ours(outcome):
    """By hand: kernels of ours run between the matmuls, which are cuBLAS's: h from z, then dz and h from z and dh."""
    launched, *_ = outcome
    full = launched["h200 mlp-gelu/d2048x16384 ckptkern full"]
    assert [name.split()[0] for name in full["forward"]] == ["addmm", "act_fwd", "addmm"]
    assert [name.split()[0] for name in full["backward"]] == [
        "addmm", "mm", "hidden_grad", "sum_rows", "mm", "sum", "mm", "mm"
    ]  # fmt: skip
    assert full["flops"] == 7 * 2 * 16384 * 2048 * 8192
    assert full["saved"] == 16384 * 2048 * 2
    selective = launched["h200 mlp-gelu/d2048x16384 ckptkern selective"]
    assert selective["flops"] == 6 * 2 * 16384 * 2048 * 8192
    assert selective["saved"] == 16384 * (2048 + 8192) * 2


def test_launches_of_experts(outcome):
    """Tiles, gate and up, tiles, down, and the sum over each row's experts. Backward has no gathered row to add up."""
    launched, *_ = outcome
    rows, router = 8192 * 8, 3 * 2 * 8192 * 8 * 2048
    for mode, matmuls, first in (("selective", 9, "experts_act_grad"), ("full", 11, "experts_bwd")):
        found = launched[f"h200 moe_mlp-silu/d2048x8192 ckptkern {mode}"]
        ours = [name for name in found["forward"] if name == "tiles" or name.startswith("experts")]
        assert ours == ["tiles", "experts_fwd", "tiles", "experts_gemm", "experts_combine"]
        ours = [name for name in found["backward"] if name.startswith("experts")]
        assert ours == [first, "experts_dw", "experts_dw", "experts_gemm", "experts_combine"]
        assert found["flops"] == matmuls * 2 * rows * 2048 * 768 + router
    eager = launched["h200 moe_mlp-silu/d2048x8192 eager"]
    assert eager["flops"] == 9 * 2 * rows * 2048 * 768 + router
    # of ours at the last matmul: the weights' gradients, dg and du, the rows of dx, y and dy; and at "selective" g and u
    weights, wide, narrow, small = 2 * 128 * 3 * 2048 * 768, 2 * rows * 2048, 2 * rows * 768, 2**21
    full, selective, eager = (launched[f"h200 moe_mlp-silu/d2048x8192 {variant}"]["peak"] for variant in
                              ("ckptkern full", "ckptkern selective", "eager"))  # fmt: skip
    assert 0 <= full - (weights + 2 * narrow + wide + 2 * wide // 8) < small
    assert 0 <= selective - full - 2 * narrow < small
    assert selective < eager


def test_gradients_of_norms_and_biases_take_one_launch_each(outcome):
    """Of a GPT layer: two norms with a weight and a bias each; four biases, one of which a kernel sums by tiles."""
    launched, *_ = outcome
    backward = launched["h200 gpt_layer/d1024x16384-s2048 ckptkern selective"]["backward"]
    names = Counter(name.split()[0] for name in backward)
    assert (names["norm_bwd"], names["sum_rows"], names["sum"], names["_to_copy"]) == (2, 3, 3, 0)
    assert len(backward) == 27


def test_the_gpu_decides_cores_and_chunks(outcome):
    launched, *_ = outcome
    for gpu, core in (("h200", "cudnn"), ("a100", "flash")):
        layer = launched[f"{gpu} gpt_layer/d1024x16384-s2048 ckptkern selective"]
        assert f"torch core {core} forward" in layer["forward"]
        assert f"torch core {core} backward" in layer["backward"]
        own = launched[f"{gpu} gpt_layer/d1024x16384-s2048 own core, selective"]
        assert {"attn_fwd", "attn_dkdv", "attn_dq"} <= {*own["forward"], *own["backward"]}
    dropout = launched["h200 attention-dropout/d1024x16384-s2048 ckptkern full"]
    assert [name for name in dropout["backward"] if name.startswith("attn_")] == ["attn_fwd", "attn_dkdv", "attn_dq"]
    full = "mlp-gelu/d2048x16384 ckptkern full"
    chunks = [launched[f"{gpu} {full}"]["backward"].count("hidden_grad") for gpu in ("h200", "small")]
    assert chunks == [
        1,
        2,
    ]  # z and dh of all rows, with h and dz over them, are 512 MiB; a 32nd of the small GPU's memory is 256
    assert len({launched[f"{gpu} {full}"]["flops"] for gpu in ("h200", "a100", "small")}) == 1


def test_the_command(outcome):
    _, out, error, rows = outcome
    assert "3/3 kernels read" in error
    assert out.count("cost model, not measured: h200") == 2
    explained = [line for line in out.splitlines() if " x linear_" in line]
    assert len(explained) == 2
    assert all("64x64x64" in line and "registers" in line for line in explained)
    assert {(row["source"], row["gpu"], row["case"]) for row in rows} == {
        ("cost model", "h200", "linear_act-relu/d4096x128")
    }
    by_variant = {row["variant"]: row for row in rows}
    assert list(by_variant) == ["eager", "torch checkpoint", "ckptkern selective", "ckptkern full"]
    matmul = 2 * 128 * 4096 * 4096 / 1e9
    assert [round(float(row["gflop"]) / matmul, 3) for row in rows] == [3, 4, 3, 4]
    assert [(row["launches_fwd"], row["launches_bwd"]) for row in rows] == [
        ("2", "4"),
        ("2", "6"),
        ("1", "4"),
        ("1", "4"),
    ]
    for row in rows:
        assert float(row["ms"]) == pytest.approx(float(row["fwd_ms"]) + float(row["bwd_ms"]), rel=1e-3)
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(by_variant["eager"]["ms"]), rel=1e-3)


# -- calibration -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample():
    """Steps of several sizes, and one of ours, so that each factor shows somewhere."""
    sizes = [
        ("mlp-gelu", 256, 16384),
        ("mlp-gelu", 2048, 16384),
        ("linear_stack-relu", 32, 2048),
        ("attention", 1024, 8192, 2048),
    ]
    found = [step for size in sizes for step in steps(*size).values()]
    return [*found, trace.Trace([of_ours(), of_ours(K=4096)], [], 0)]


@pytest.mark.parametrize("scales", [rates.Scales(1.3, 1.5, 0.8, 2.0, 3.0), rates.Scales(0.7, 0.9, 1.6, 0.6, 0.5)])
def test_calibration_recovers_other_rates(sample, scales):
    other = dataclasses.replace(H200, scales=scales)
    ms = [1e3 * estimate.total(step.launches, other, lambda caught: CODE).seconds for step in sample]
    fitted = calibrate.fit(H200, sample, ms, lambda caught: CODE)
    assert fitted.gpu.scales == pytest.approx(scales, rel=1e-3)
    assert max(fitted.errors) < 1e-3


def test_calibration_leaves_what_no_row_depends_on(sample):
    faster = dataclasses.replace(H200, scales=rates.Scales(matmuls=0.8))
    some = sample[:6]  # torch's matmuls, of MLPs and chains
    fitted = calibrate.fit(H200, some, [1e3 * seconds(step.launches, faster) for step in some], no_codes)
    assert fitted.gpu.scales.matmuls == pytest.approx(0.8, rel=1e-3)
    assert fitted.gpu.scales.attention == fitted.gpu.scales.kernels == 1.0
    assert fitted.errors.attention == fitted.errors.kernels == math.inf


@pytest.fixture
def results(tmp_path):
    """Writes a results.csv of a run of the benchmark, given (case, variant, device, ms)."""

    def write(*rows, name="nvidia-h200", dtype="bfloat16"):
        with open(tmp_path / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, measure.FIELDS)
            writer.writeheader()
            for case, variant, device, ms in rows:
                writer.writerow(
                    {"case": case, "variant": variant, "device": device, "dtype": dtype, "status": "ok", "ms": ms}
                )
        (tmp_path / "env.json").write_text(json.dumps({"device": name}))
        return tmp_path / "results.csv"

    return write


def test_calibrate_and_rates_as_commands(results, capsys, tmp_path):
    scales = rates.Scales(matmuls=1.25, bandwidth=0.9, launch=2.0)
    slower, found = dataclasses.replace(H200, scales=scales), []
    for item in cases.items("cuda"):
        if item.name in ("mlp-gelu/d256x16384", "mlp-gelu/d2048x16384", "linear_stack-relu/d32x262144"):
            size = item.size
            for variant, step in steps(item.case.name, size.width, size.rows).items():
                found.append((item.name, variant, "cuda", 1e3 * seconds(step.launches, slower)))
    path = results(("ceiling", "copy 1 GiB", "cuda", 0.5), *found, ("mlp-gelu/d256x16384", "compile", "cuda", 0.1))
    assert main(["--calibrate", str(path)]) == 0
    out = capsys.readouterr().out
    assert "mean distance" in out
    assert "fitted to 6 rows" in out
    assert rates.read(H200, tmp_path / "rates-h200.json").scales == pytest.approx(scales, rel=1e-3)
    with pytest.raises(ValueError, match="has the rates of h200, not of a100"):
        rates.read(A100, tmp_path / "rates-h200.json")
    assert main(["--gpu", "a100", "--rates", str(tmp_path / "rates-h200.json")]) == 2


def test_an_h100_is_known_by_its_results(tmp_path, capsys):
    """The case is an LM head, whose loss is float32. What the cost model has not is named. Ours are for the rehearsal, which
    compiles them."""
    path = rehearsal.results_of_an_h100(tmp_path, ["linear_cross_entropy/d1024x16384"], slower=1.25)
    rows = [row for row in path.read_text().splitlines() if ",ckptkern" not in row]
    path.write_text("\n".join([*rows, "linear_cross_entropy/d1024x16384,compile,cuda,bfloat16,ok,1", ""]))
    assert main(["--calibrate", str(path)]) == 0
    out = capsys.readouterr().out
    assert "cost model of h100, fitted to 2 rows" in out
    assert "mean distance: 20.0% before, 0.0% after" in out
    assert "left out, of which the model has no case: model/llama eager" in out
    assert "left out, of which the model has no variant: compile" in out
    assert rates.read(rates.GPUS["h100"], tmp_path / "rates-h100.json").scales.matmuls > 1


def test_calibrate_refuses_what_is_no_match(results, capsys, tmp_path):
    def refused(path, *arguments):
        assert main(["--calibrate", str(path), *arguments]) == 2
        return capsys.readouterr().err

    assert "has no rates of cpu, only of h200, h100, a100" in refused(CPU_RESULTS)
    assert "No such file" in refused(tmp_path / "none.csv")
    row = ("mlp-gelu/d1024x16384", "eager", "cuda", 1.0)
    path = results(row, name="nvidia-a100-sxm4-80gb")
    assert "was measured on nvidia-a100-sxm4-80gb, not on h200" in refused(path, "--gpu", "h200")
    assert "no rates of nvidia-gh200-480gb" in refused(results(row, name="nvidia-gh200-480gb"))
    assert "left out, in float16, and the model's times" in refused(results(row, dtype="float16"))
    assert "left out, measured on cpu: mlp-gelu" in refused(results((*row[:2], "cpu", 1.0)))
    assert "has no timed case" in refused(results(("ceiling", "copy", "cuda", 1.0)))
    assert "of which the model has no variant: compile" in refused(results((row[0], "compile", "cuda", 1.0)))
    (tmp_path / "results.csv").write_text("case,ms\n")
    assert "lacks the columns variant, device, dtype, status" in refused(tmp_path / "results.csv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "nothing"], "matches none of"),
        (["--cases", "host"], "the cost model does not estimate host time"),
        (["--modes", "some"], "--modes: some is none of none, selective, full"),
        (["--workers", "0"], "--workers: wanted at least 1 but got 0"),
        (["--explain", "("], "--explain '(': "),
        (["--published", "--cases", "moe"], "--published uses its own cases, modes, GPUs and rates"),
        (["--rates", "none.json"], "No such file"),
        (["--rates", str(CPU_RESULTS)], "is not a file of --calibrate"),
    ],
)
def test_arguments_that_make_no_sense(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_an_implementation_and_a_workspace_instead_of_the_tables(monkeypatch, capsys):
    seen = []

    def traces(gpu, items, modes):
        with trace.as_on(gpu):
            x = torch.empty(16384, 64, dtype=torch.bfloat16, device="meta")
            seen.append(_choices.choose_impl("mlp", x, 64, 64, 64))
            seen.append(_choices.choose_workspace("mlp", None, x))
        return {}

    monkeypatch.setattr(sheet, "traces", traces)
    for given in ([], ["--impl", "triton", "--workspace", "64MiB"]):
        assert main(["--cases", "mlp", *given]) == 0
    assert seen == ["library", rates.GPUS["h200"].memory // 32, "triton", 2**26]
    assert main(["--workspace", "much"]) == 2
    with pytest.raises(SystemExit):
        main(["--impl", "triton:128x128"])
    assert "triton:128x128" in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "experts"), [("h200", "triton"), ("a100", "library")])
def test_implementations_are_those_of_the_gpu(gpu, experts):
    x = torch.empty(16384, 1024, dtype=torch.bfloat16, device="meta")
    with trace.as_on(rates.GPUS[gpu]):
        assert [_choices.choose_impl(op, x, 1024, 1024, 1024) for op in ("moe_mlp", "mlp")] == [experts, "library"]


# -- published figures -------------------------------------------------------------------------------------------------


def test_published_figures_are_what_their_group_counts():
    """TFLOP/s count three matmuls a weight of a step, one of forward; an item's sizes are those that were published."""
    groups = {(group.gpu, group.item().name, group.part): group for group in published.GROUPS}
    assert len(groups) == len(published.GROUPS)
    head = groups["a100", "linear_cross_entropy-V256000-mean-nobias/d2304x8192", published.STEP]
    assert head.flops == 2 * 3 * 8192 * 2304 * 256000
    experts = [
        groups["h100", "moe_mlp-h768-E128-k8-silu/d2048x32768", part] for part in (published.FORWARD, published.STEP)
    ]
    assert [group.flops for group in experts] == [n * 2 * 3 * 32768 * 8 * 2048 * 768 for n in (1, 3)]
    assert (
        groups["h100", "mlp-h16384-gelu_tanh-nobias-L4/d4096x8192", published.STEP].flops
        == 2 * 3 * 8192 * 8 * 4096 * 16384
    )
    for group in published.GROUPS:
        for one in group.figures:
            whole = group.complete(one)
            assert whole.ms is None or whole.ms * whole.tflops * 1e9 == pytest.approx(group.flops)
            assert one.ms is None or one.tflops is None
            assert one.ms or one.tflops or one.mib


def test_the_table_of_published_figures(tmp_path, monkeypatch):
    """Eager's estimates need no compiler: they are those of the same steps, in whole or in part, beside what was published."""
    monkeypatch.setattr(published, "_makers", lambda item: {"eager": sheet.modelled(item)["eager"]})
    groups = [group for group in published.GROUPS if group.gpu == "h100"]
    found = published.estimated(groups)
    published.write(found, tmp_path / "published.csv")
    for group, figures in found:
        assert [one.variant for one in figures] == [*(one.variant for one in group.figures), "eager"]
        assert figures[-1].source == "cost model"
        assert (figures[-1].mib is not None) == (group.part == published.STEP)
    whole, forward = (figures[-1].ms for group, figures in found if "moe" in group.item().name)
    assert 0.2 < forward / whole < 0.5
    text = published.table(tmp_path / "published.csv")
    assert text.count("| **H100, ") == len(groups)
    assert "| eager, 16-bit logits | 137.0 | 365 | 48691 | huggingface/trl#6858 |" in text
    page = tmp_path / "page.md"
    page.write_text(f"a\n{published.BEGIN}\nold\n{published.END}\nb\n")
    published.put_into(page, text)
    assert page.read_text() == f"a\n{published.BEGIN}\n{text}\n{published.END}\nb\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- published:begin -->"):
        published.put_into(page, text)


def test_notes_show_the_committed_table():
    results = Path(outside.ROOT, "benchmarks")
    text = published.table(results / "results" / "model" / "published.csv")
    assert f"{published.BEGIN}\n{text}\n{published.END}" in (results / "NOTES.md").read_text()
