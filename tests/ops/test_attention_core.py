"""Whose kernel attention's core is: torch's flash and cuDNN kernels where they may run, what they are given and give."""

import contextlib
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, MODES, uninitialised_is_nan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import eager
from ckptkern.ops import catalog
from ckptkern.ops.attention import arguments, sdpa
from ckptkern.ops.attention import core as attention_core
from ckptkern.ops.attention.arguments import gather
from ckptkern.ops.attention.backward import AttentionSublayer, attention_sublayer_backward
from ckptkern.ops.attention.sublayer import attention_sublayer, saves
from ckptkern.ops.dispatch.choices import primitives

HEADS = (2, 4, 128, 64)


def both(S: int, D: int) -> dict:
    return dict.fromkeys(("q_shape", "k_shape"), (2, 4, S, D))


PLAIN = dict(
    backend="triton", device="cuda", dtype=torch.bfloat16, q_shape=HEADS, k_shape=HEADS, left=None, right=None, scale=0.125,
    precision="ieee", masks=(None,), slopes=None,
)  # fmt: skip
OTHERWISE = dict(capability=(9, 0), accepts=("cudnn", "flash", "efficient"), inside=contextlib.nullcontext)
AMPERE, CAUSAL, WIDE = dict(capability=(8, 0)), {"right": 0}, {"dtype": torch.float32}
MASK = torch.ones(2, 1, 1, 128, dtype=torch.bool)
WINDOW = {"left": 3, "right": 0}
WITHOUT_CUDNN = {"accepts": ("flash", "efficient")}


def alone(backend: str):
    return dict(inside=lambda: torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)))


CORES = {  # what is asked for, by whose kernel it is: "" is ours
    "cudnn": {
        "plain": {}, "causal": CAUSAL, "grouped heads": {"k_shape": (2, 1, 128, 64)}, "a padding mask": {"masks": (MASK, None)},
        "causal, 577 rows": both(577, 64) | CAUSAL, "B200": dict(capability=(10, 0)),
    },
    "flash": {
        "heads of 32": both(128, 32),
        "heads of 256": both(128, 256),
        "ViT of 197 rows": both(197, 64),
        "ViT of 577 rows": both(577, 64),
        "192 keys, heads of 128": both(192, 128),
        "no cuDNN": WITHOUT_CUDNN,
        "no cuDNN, heads of 128 that see all": WITHOUT_CUDNN | both(128, 128),
        "no cuDNN, causal heads of 64": WITHOUT_CUDNN | CAUSAL,
        "a window": WINDOW,
        "a window that sees later rows": {"left": 3, "right": 5},
        "Ampere": AMPERE,
        "Ampere, 577 rows": AMPERE | both(577, 64),
        "Ampere, causal heads of 128": AMPERE | both(256, 128) | CAUSAL,
        "Ada": dict(capability=(8, 9)),
        "B300": dict(capability=(10, 3)),
        "unknown": dict(capability=(12, 0)) | both(130, 64),
        "the kernel that the user leaves": AMPERE | alone("FLASH_ATTENTION"),
        "cuDNN's that the user disables": alone("FLASH_ATTENTION"),
    },
    "efficient": {
        "plain": WIDE, "causal": WIDE | CAUSAL, "577 rows": WIDE | both(577, 64), "Ampere": WIDE | AMPERE,
        "unknown": WIDE | dict(capability=(12, 0)), "a padding mask": WIDE | {"masks": (MASK, None)},
    },
    "": {
        "other lengths, causal": {"k_shape": (2, 4, 256, 64), "right": 0},
        "other lengths, a window": {"k_shape": (2, 4, 256, 64), **WINDOW},
        "no cuDNN, causal heads of 128": WITHOUT_CUDNN | both(128, 128) | CAUSAL,
        "a window, heads of 128": both(128, 128) | WINDOW,
        "scale of 0": {"right": 0, "scale": 0.0},
        "float32 in TF32": WIDE | {"precision": "tf32"},
        "float32, as the setting is when it runs": WIDE | {"precision": "auto"},
        "float32, a window": WIDE | WINDOW,
        "float64": {"dtype": torch.float64},
        "heads of 68": both(128, 68),
        "one row": {"q_shape": (2, 4, 1, 64)},
        "lower-right, fewer keys": {"q_shape": (2, 4, 256, 64), "right": -128},
        "a mask on Ampere": AMPERE | {"masks": (MASK,)},
        "a mask of 192 keys": both(192, 64) | {"masks": (MASK[..., :1],)},
        "a mask and causal's": {"masks": (MASK,), "right": 0},
        "a mask that trains": {"masks": (torch.zeros(1, 1, 128, 128, requires_grad=True),)},
        "slopes or dropout": {"slopes": True},
        "backend eager": {"backend": "eager"},
        "a CPU": {"device": "cpu"},
        "refused by torch": {"accepts": ()},
        "kernels that the user disables": alone("MATH"),
        "inside backend('triton')": {"inside": lambda: ckptkern.backend("triton")},
        "deterministic algorithms": {"inside": uninitialised_is_nan},
    },
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "call"), [(wanted, call) for wanted, calls in CORES.items() for call in calls])
def test_whose_kernel_the_core_is(wanted, call, monkeypatch):
    options = CORES[wanted][call]
    capability, accepts, inside = (options.get(name, default) for name, default in OTHERWISE.items())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(attention_core, "_accepts", lambda kernel, *args: kernel in accepts)
    backend, device, *rest = (options.get(name, default) for name, default in PLAIN.items())
    with FakeTensorMode():
        x = torch.empty(1, device=device)
    with inside():
        assert attention_core.fused_core(backend, x, *rest) == wanted


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attention_block"])
def test_sinks_and_a_window_that_hides_nothing_are_no_reason_for_another_kernel(name, monkeypatch):
    asked, given = [], catalog.OPS[name].inputs(catalog.Sizes())
    for module in (sdpa, arguments):
        monkeypatch.setattr(module, "fused_core", lambda *args: asked.append(args[2:]) or "")
    causal, sinks = {"is_causal": True}, {"sinks": torch.zeros(2)}
    for more in (causal, causal | sinks, {"window_size": (2, 0)}, {"window_size": (1, 0)}):
        catalog.call(catalog.OPS[name], given, catalog.random_leaves(given), **more)
    assert asked[0] == asked[1] == asked[2] != asked[3]


class Calls(TorchDispatchMode):
    """The last arguments of each op below autograd, and how often it runs."""

    def __init__(self):
        super().__init__()
        self.counts, self.args = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] += 1
        self.args[name] = args
        return func(*args, **(kwargs or {}))


NAMES = {  # of torch's ops, forward and backward
    "cudnn": ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
    "flash": ("_flash_attention_forward", "_flash_attention_backward"),
    "efficient": ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
}
each_kernel = pytest.mark.parametrize("fused", NAMES)


@pytest.mark.parametrize(("rotary", "sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mode", MODES)
@each_kernel
def test_a_block_round_torchs_kernel(fused, mode, kv_heads, rotary, sinks):
    """On tensors without data: torch's kernels take q, k, v as they lie in the packed projection and return what the op
    promises; o and lse are saved as always, and only "full" runs forward's kernel again. Sinks change neither."""
    B, S, H, D = 2, 48, 4, 64
    d = H * D
    with torch.no_grad():
        x = torch.empty(B, S, d, device="meta", dtype=torch.bfloat16)
        weights = [x.new_empty((H + 2 * kv_heads) * D, d), None, x.new_empty(d, d), x.new_empty(d)]
        with ckptkern.backend("eager"):
            t, o = gather(
                "test", x, *weights, H, kv_heads, is_causal=True, residual=True, recompute=mode,
                rotary=tuple(x.new_empty(2, S, D, dtype=torch.float32)) if rotary else None,
                sinks=x.new_empty(H) if sinks else None,
            )  # fmt: skip
        o = o._replace(fused=fused)
        with Calls() as forward:
            y, made = attention_sublayer(x, t, o)
        _, promised = attention_sublayer(x, t, o._replace(fused=""))  # as fakes do
        saved = {name: made[name] for name in saves(o)}
        for name, tensor in saved.items():
            kinds = [(one.shape, one.dtype, one.stride()) for one in (tensor, promised[name])]
            assert kinds[0] == kinds[1], name
        needs = sum(1 << i for i, tensor in enumerate((x, *t)) if tensor is not None)
        with Calls() as backward:
            attention_sublayer_backward(torch.empty_like(y), AttentionSublayer(x, t, o), saved, needs)
    of_forward, of_backward = NAMES[fused]
    assert [one.counts[of_forward] for one in (forward, backward)] == [1, mode == "full"]
    assert [one.counts[of_backward] for one in (forward, backward)] == [0, 1]
    unwanted = {"repeat_interleave", "_softmax"} if fused != "efficient" else {"_softmax"}
    unwanted |= (set() if rotary or fused == "efficient" else {"clone"}) | (set() if sinks else {"exp"})
    assert not unwanted & (forward.counts + backward.counts).keys()


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [B, H, S, D] with other strides."""
    if layout == "packed":
        return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)
    if layout == "expanded":
        return x[:1, :1, :1, :1].expand(x.shape)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens" else x.clone()


def core_run(p, core, q, k, v, do):
    o, lse, _ = attention_core.attend(p, q, k, v, core)
    return o, lse, *attention_core.attention_grads(p, q, k, v, do, o, lse, core)[:3]


@pytest.mark.parametrize("do_layout", ["heads", "tokens", "expanded"])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@each_kernel
def test_what_torchs_kernels_are_given(fused, layout, do_layout):
    """torch caches cuDNN's graphs by the layout of q, k and v alone, so do and o must always have one layout, and lse
    [B, H, S, 1]. The backend's own kernels are not called: here there are none."""
    B, H, S, D = shape = 2, 4, 48, 64
    q, do = (laid_out(torch.empty(shape, device="meta", dtype=torch.bfloat16), one) for one in (layout, do_layout))
    with Calls() as calls, torch.no_grad():
        _, lse, *_ = core_run(None, eager.AttentionCore(0.125, "ieee", (None, 0), fused=fused), q, q, q, do)
    assert lse.shape == (B, H, S)
    do, q, k, v, *others = calls.args[NAMES[fused][1]]
    if fused == "efficient":
        assert others[2].shape == (B, H, 64)
        return
    o, lse, *_ = others
    if fused == "cudnn":
        assert lse.shape == (B, H, S, 1)
        assert {one.stride() for one in (do, o, q, k, v)} == {(S * H * D, D, H * D, 1)}
    else:
        assert lse.shape == (B, H, S)
        assert do.stride(-1) == o.stride(-1) == 1


PACKED = (16 * 768, 64, 768, 1)  # strides of heads [2, 4, 16, 64] within q, k, v side by side


@pytest.mark.parametrize(("strides", "offset", "wanted"), [
    (PACKED, 256, True), (PACKED, 257, False), ((4352, 68, 272, 1), 0, False),
    ((4096, 1024, 1, 16), 0, False), ((0, 1024, 64, 1), 0, False),
], ids=str)  # fmt: skip
def test_rows_that_torchs_kernels_can_read(strides, offset, wanted):
    """On a GPU rows must begin at multiples of 16 bytes; on a CPU it is enough that a row is contiguous."""
    memory = torch.empty(2 * 16 * 768 + 512, dtype=torch.bfloat16)
    assert eager.readable(memory.as_strided((2, 4, 16, 64), strides, offset)) == (strides[3] == 1)
    with FakeTensorMode():
        on_gpu = torch.empty(memory.shape, dtype=memory.dtype, device="cuda")
        assert eager.readable(on_gpu.as_strided((2, 4, 16, 64), strides, offset)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_torchs_kernels_on_a_gpu(D, causal, kv_heads, dtype):
    """Every kernel that torch accepts there gives o, lse and gradients as exact as ours, and the same bits in every forward.

    Layouts run one after another in one process, with torch's own call among them: no plan reads with another's layout.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    S = 200 if causal else 256
    q, do = (torch.randn(2, 4, S, D, generator=generator, device="cuda").to(dtype) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, S, D, generator=generator, device="cuda").to(dtype) for _ in range(2))
    core = eager.AttentionCore(D**-0.5, "ieee", (None, 0) if causal else (None, None))
    exact = core_run(eager, core, *(t.double() for t in (q, k, v, do)))
    own = core_run(primitives("triton"), core, q, k, v, do)
    names = [one for one in ("cudnn", "flash") if attention_core._accepts(one, 0, dtype, D, causal, kv_heads != 4)]
    assert names, "torch accepts none of its kernels here"
    for name, layout, do_layout in itertools.product(names, *2 * [("heads", "tokens", "packed")]):
        core, leaves = core._replace(fused=name), [laid_out(t, layout).requires_grad_() for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=kv_heads != 4)
        o.backward(torch.empty_like(o).copy_(do))  # with another layout torch's own has been wrong
        given = [t.detach() for t in leaves]
        got = core_run(eager, core, *given, laid_out(do, do_layout))
        for reference, *both in zip(exact, got, own, strict=True):
            error, allowed = ((x.double() - reference).norm() / reference.norm() for x in both)
            assert error <= max(2 * allowed, 1e-5), (name, layout, do_layout)
            assert allowed < 0.02
        for _ in range(3):
            assert all(map(torch.equal, attention_core.attend(eager, *given, core)[:2], got[:2])), name


@pytest.mark.gpu
@pytest.mark.parametrize("S", [64, 192, 256, 704, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_very_low_scores_on_a_gpu(causal, S):
    """pytorch#196678: cuDNN's backward gave NaN where a row's logsumexp is below -88.7 and keys do not fill a tile."""
    q, k, v = (torch.randn(2, S, 4, 128, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    with torch.no_grad():
        q[..., 0], k[..., 0] = 1, -120 * 128**0.5
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ckptkern.scaled_dot_product_attention(*leaves, is_causal=causal).sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)
