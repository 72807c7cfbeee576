"""Whose kernel attention's core is: torch's flash and cuDNN kernels where they may run, what they are given and give."""

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import catalog
from support.cases import DTYPES, MODES, uninitialised_is_nan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import eager
from ckptkern.ops.attention import arguments, latent_sublayer, sdpa
from ckptkern.ops.attention import core as attention_core
from ckptkern.ops.attention.arguments import gather
from ckptkern.ops.attention.block import AttentionBlock
from ckptkern.ops.attention.tensors import bytes_of_heads
from ckptkern.ops.dispatch.choices import primitives
from ckptkern.ops.transformer_layer import ATTENTION_ARGUMENTS

GPUS = [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)]


def cores(S: int, D: int = 64, **options) -> dict:
    return dict.fromkeys(("q_shape", "k_shape"), (2, 4, S, D)) | options


CAUSAL = {"right": 0}
PADDING = torch.ones(2, 1, 1, 1, dtype=torch.bool)
PACKED = {
    "cu": torch.tensor([0, 500, 1000], dtype=torch.int32),
    "q_shape": (1, 4, 1000, 64),
    "k_shape": (1, 4, 1100, 64),
}
FP32 = {"dtype": torch.float32}
CHOICES = {  # core: whose kernel it is on GPUS; one name: on all of them; "" is ours
    "causal": (cores(1000, **CAUSAL), "flash flash cudnn cudnn flash flash"),
    "causal, float16": (cores(1000, **CAUSAL, dtype=torch.float16), "flash flash cudnn cudnn flash flash"),
    "causal, heads of 128": (cores(1000, 128, **CAUSAL), "flash flash cudnn cudnn flash flash"),
    "causal, heads of 32": (cores(1000, 32, **CAUSAL), "flash"),
    "causal, heads of 256": (cores(1000, 256, **CAUSAL), "flash"),
    "grouped heads": (cores(1000, **CAUSAL, k_shape=(2, 1, 1000, 64)), "flash flash cudnn cudnn flash flash"),
    "ViT, 197": (cores(197), "flash"),
    "ViT, 577, heads of 128": (cores(577, 128), "flash"),
    "cross attention": (cores(197, k_shape=(2, 4, 77, 64)), "flash"),
    "BERT, 512": (cores(512), "flash flash cudnn cudnn flash flash"),
    "BERT, 512, padding": (cores(512, masks=(None, PADDING)), "- - cudnn cudnn - -"),
    "BERT, 500, padding": (cores(500, masks=(PADDING,)), ""),
    "a float mask": (cores(512, masks=(PADDING.bfloat16(),)), "- - cudnn cudnn - -"),
    "a float32 mask": (cores(512, masks=(PADDING, PADDING.float())), ""),
    "a trained mask": (cores(512, masks=(PADDING.bfloat16().requires_grad_(),)), ""),
    "a mask of each head": (cores(512, masks=(PADDING.expand(2, 4, 1, 1),)), ""),
    "a mask of each row of queries": (cores(512, masks=(PADDING.expand(2, 1, 512, 1), PADDING)), ""),
    "float32, a mask of each row of queries": (cores(512, **FP32, masks=(PADDING[:1].expand(1, 1, 512, 1),)), ""),
    "causal, padding": (cores(512, **CAUSAL, masks=(PADDING,)), ""),
    "a window": (cores(1000, left=3, right=0), "flash"),
    "a window of both sides, heads of 128": (cores(1000, 128, left=3, right=3), "flash flash - flash flash flash"),
    "packed": (PACKED, "flash"),
    "packed, causal": (PACKED | CAUSAL, "flash"),
    "packed, causal, heads of 128": (PACKED | cores(1000, 128, **CAUSAL), "flash flash - flash flash flash"),
    "no sequence": (PACKED | {"cu": PACKED["cu"][:1]}, ""),
    "float32": (cores(197, **FP32), "efficient"),
    "float32, causal": (cores(1000, **CAUSAL, **FP32), "efficient"),
    "float32, padding": (cores(197, **FP32, masks=(PADDING,)), "efficient"),
    "float32, a window": (cores(1000, left=3, right=0, **FP32), ""),
    "float32, packed": (PACKED | FP32, ""),
    "float32, TF32 allowed": (cores(197, **FP32, precision="tf32"), ""),
    "float32, decided by a compiled graph": (cores(197, **FP32, precision="auto"), ""),
    "float64": (cores(197, dtype=torch.float64), ""),
    "other lengths, causal": (cores(128, k_shape=(2, 4, 256, 64), **CAUSAL), ""),
    "lower-right, fewer keys": (cores(256, k_shape=(2, 4, 128, 64), right=-128), ""),
    "scale of 0": (cores(1000, **CAUSAL, scale=0.0), ""),
    "heads of 68": (cores(1000, 68, **CAUSAL), ""),
    "one row": (cores(128, q_shape=(2, 4, 1, 64)), ""),
    "slopes or dropout": (cores(1000, **CAUSAL, other=True), ""),
    "backend eager": (cores(1000, **CAUSAL, backend="eager"), ""),
    "a CPU": (cores(1000, **CAUSAL, device="cpu"), ""),
}


def left_to(backend: str):
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend))


SECOND = {  # on sm_90: what torch refuses, inside what, and whose kernel is next for a core of CHOICES
    "causal": ("cudnn", None, "flash"),
    "causal, heads of 128": ("cudnn", None, ""),
    "BERT, 512": ("cudnn flash", None, ""),
    "BERT, 512, padding": ("cudnn", None, ""),
    "ViT, 197": ("flash", None, ""),
    "float32": ("efficient", None, ""),
    "causal, float16": ("", lambda: left_to("FLASH_ATTENTION"), "flash"),
    "grouped heads": ("flash", lambda: left_to("FLASH_ATTENTION"), ""),
    "packed": ("", lambda: left_to("CUDNN_ATTENTION"), ""),
    "float32, causal": ("", lambda: left_to("FLASH_ATTENTION"), ""),
    "a float mask": ("", lambda: ckptkern.backend("triton"), ""),
    "a window": ("", uninitialised_is_nan, ""),
    "float32, padding": ("", uninitialised_is_nan, ""),
}


def chosen(options: dict, capability: tuple[int, int], refused: str, monkeypatch) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(attention_core, "_accepts", lambda kernel, *args: kernel not in refused.split())
    defaults = dict(
        backend="triton", device="cuda", dtype=torch.bfloat16, precision="ieee", left=None, right=None, scale=0.125
    )
    values = defaults | options
    with FakeTensorMode():
        x = torch.empty(1, device=values.pop("device"))
    names = ("dtype", "precision", "q_shape", "k_shape", "left", "right", "scale")
    more = {name: values[name] for name in ("masks", "cu") if name in values}
    place = [values[name] for name in names]
    return attention_core.fused_core(values["backend"], x, *place, values.get("other"), **more)


@pytest.mark.parametrize("call", CHOICES)
def test_whose_kernel_the_core_is(call, monkeypatch):
    options, wanted = CHOICES[call]
    wanted = ["" if word == "-" else word for word in wanted.split(" ")]
    actual = [chosen(options, gpu, "", monkeypatch) for gpu in GPUS]
    assert actual == (wanted if len(wanted) > 1 else wanted * len(GPUS))


@pytest.mark.parametrize("call", SECOND)
def test_whose_kernel_is_next(call, monkeypatch):
    """Where torch refuses the first, the user disables it, or nothing of torch's may run."""
    refused, inside, wanted = SECOND[call]
    assert chosen(CHOICES[call][0], (9, 0), "", monkeypatch) != wanted
    with inside() if inside else contextlib.nullcontext():
        assert chosen(CHOICES[call][0], (9, 0), refused, monkeypatch) == wanted


def test_a_mode_of_torchs_bars_cudnn_alone(monkeypatch):
    """In it cuDNN's lse has another layout. Others are asked on the device, which is not there."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    case = attention_core.CoreCase(False, 64, True, False, False, False, False)
    assert not attention_core._accepts.__wrapped__("cudnn", 0, torch.bfloat16, case)
    with pytest.raises((AssertionError, RuntimeError)):
        attention_core._accepts.__wrapped__("flash", 99, torch.bfloat16, case)


ON_GPU = SimpleNamespace(is_meta=False, is_cuda=True, device=SimpleNamespace(index=0))  # all that is read of x


@pytest.mark.parametrize("right", [lambda Sq, Sk: Sk - Sq, lambda Sq, Sk: Sk // 2], ids=["0", "half of the keys"])
def test_a_compiled_graph_asks_with_numbers(right, monkeypatch):
    """Of any length: Dynamo calls what answers, with constants alone."""

    def kernels(index, dtype, head_dim, bounded, windowed, packed, masked, grouped):
        return ("efficient",) if windowed else ("flash",)

    kernels._dynamo_marked_constant = True
    monkeypatch.setattr(attention_core, "_constant_kernels", kernels)

    def chosen_of(q, k):
        Sq, Sk = q.shape[0], k.shape[0]
        shapes = (2, 4, Sq, 64), (2, 4, Sk, 64)
        core = attention_core.fused_core("triton", ON_GPU, torch.bfloat16, "ieee", *shapes, None, right(Sq, Sk), 0.125)
        return q + len(core)

    torch._dynamo.reset()
    compiled = torch.compile(chosen_of, backend="eager", fullgraph=True, dynamic=True)
    for S in (100, 120):
        assert torch.equal(compiled(*torch.zeros(2, S)), chosen_of(*torch.zeros(2, S)))


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attention_block"])
def test_sinks_and_a_window_that_hides_nothing_are_no_reason_for_another_kernel(name, monkeypatch):
    asked, inputs = [], catalog.OPS[name].inputs(catalog.Sizes())
    for module in (sdpa, arguments):
        monkeypatch.setattr(module, "fused_core", lambda *args, **more: asked.append((args[2:], more)) or "")
    causal, sinks = {"is_causal": True}, {"sinks": torch.zeros(2)}
    for more in (causal, causal | sinks, {"window_size": (2, 0)}, {"window_size": (1, 0)}):
        catalog.call(catalog.OPS[name], inputs, catalog.random_leaves(inputs), **more)
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


KERNELS = {  # its op; that of its gradients adds a word
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_flash_attention_forward",
    "efficient": "_scaled_dot_product_efficient_attention",
}
each_kernel = pytest.mark.parametrize("fused", KERNELS)


def gathered(x, *args, recompute: str = "full", **options):
    """The tensors and options of attention_block's arguments."""
    names = ("qkv_weight", "qkv_bias", "out_weight", "out_bias", "num_heads", "num_kv_heads")
    arguments = ATTENTION_ARGUMENTS.checked("test", "the arguments", dict(zip(names, args, strict=True)) | options)
    return gather("test", x, training=True, recompute=recompute, workspace=None, **arguments)


def backward_of(fused: str) -> str:
    return f"{KERNELS[fused].removesuffix('_forward')}_backward"


@pytest.mark.parametrize(("rotary", "sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mode", MODES)
@each_kernel
def test_a_block_round_torchs_kernel(fused, mode, kv_heads, rotary, sinks):
    """On tensors without data: torch's kernels take q, k, v as they lie in the packed projection and return what the op
    promises; o and lse are saved as always, and only "full" runs forward's kernel again. Sinks change neither."""
    B, S, H, D = 2, 64, 4, 64
    d = H * D
    with torch.no_grad():
        x = torch.empty(B, S, d, device="meta", dtype=torch.bfloat16)
        weights = [x.new_empty((H + 2 * kv_heads) * D, d), None, x.new_empty(d, d), x.new_empty(d)]
        with ckptkern.backend("eager"):
            t, o = gathered(
                x,
                *weights,
                H,
                kv_heads,
                is_causal=True,
                recompute=mode,
                rotary=tuple(x.new_empty(2, S, D, dtype=torch.float32)) if rotary else None,
                sinks=x.new_empty(H) if sinks else None,
            )
        o = o._replace(fused=fused)
        with Calls() as forward:
            y, results = AttentionBlock.compute(x, t, o)
        _, promised = AttentionBlock.compute(x, t, o._replace(fused=""))  # as fakes do
        saved = {name: results[name] for name in AttentionBlock.saves(o)}
        for name, tensor in saved.items():
            kinds = [(value.shape, value.dtype, value.stride()) for value in (tensor, promised[name])]
            assert kinds[0] == kinds[1], name
        needs = sum(1 << i for i, tensor in enumerate((x, *t)) if tensor is not None)
        with Calls() as backward:
            AttentionBlock.gradients(torch.empty_like(y), x, t, o, saved, needs)
    assert [counted.counts[KERNELS[fused]] for counted in (forward, backward)] == [1, mode == "full"]
    assert [counted.counts[backward_of(fused)] for counted in (forward, backward)] == [0, 1]
    repeats = fused == "efficient" and kv_heads != H
    unwanted = {"_softmax"} | (set() if rotary or repeats else {"clone"}) | (set() if sinks else {"exp"})
    unwanted |= set() if repeats else {"repeat_interleave"}
    assert not unwanted & (forward.counts + backward.counts).keys()
    assert rotary or not forward.counts["copy_"], "o has the layout that the op promises"


@pytest.mark.parametrize("keys", [64, 96])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_flash_attention_allocates_itself_is_counted(kv_heads, keys):
    """In its backward dq in float32, and for grouped heads dk and dv of every query head (flash_api.cpp)."""
    x = torch.empty(2, 64, 256, device="meta", dtype=torch.bfloat16)
    weights = [x.new_empty(heads * 64, 256) for heads in (4, kv_heads, kv_heads)], None, x.new_empty(256, 256), None
    memory = x.new_empty(2, keys, 256)
    t, o = gathered(x, *weights, 4, kv_heads, key_value=memory, recompute="full")
    flash, cudnn = (bytes_of_heads(128, t, o._replace(backend="triton", fused=fused)) for fused in ("flash", "cudnn"))
    assert flash - cudnn == 4 * 256 * 128 + (2 * 2 * 256 * 2 * keys if kv_heads == 2 else 0)


def test_what_flash_attention_allocates_itself_is_counted_beside_latents():
    """Latent attention has as many heads of k and v as of q."""
    sizes = latent_sublayer.LatentSizes(H=4, nope=16, rope=8, v=16, q_rank=0, kv_rank=32)
    o = SimpleNamespace(dtype=torch.bfloat16, backend="triton", recompute="full", dropout_p=0.0, softcap=0.0)
    flash, cudnn = (
        latent_sublayer.bytes_of_latent_heads(128, sizes, SimpleNamespace(**vars(o), fused=fused))
        for fused in ("flash", "cudnn")
    )
    assert flash - cudnn == 128 * 4 * 24 * 4


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
    q, do = (laid_out(torch.empty(shape, device="meta", dtype=torch.bfloat16), order) for order in (layout, do_layout))
    with Calls() as calls, torch.no_grad():
        _, lse, *_ = core_run(None, eager.AttentionCore(0.125, "ieee", (None, 0), fused=fused), q, q, q, do)
    assert lse.shape == (B, H, S)
    args = calls.args[backward_of(fused)]
    if fused == "cudnn":
        do, q, k, v, o, lse, *_ = args
        assert lse.shape == (B, H, S, 1)
        assert {head.stride() for head in (do, o, q, k, v)} == {(S * H * D, D, H * D, 1)}
    elif fused == "flash":
        do, q, k, v, o, lse, *_ = args
        assert lse.shape == (B, H, S)
        assert q.shape == (B, S, H, D)
        assert do.stride(-1) == o.stride(-1) == 1
    else:
        do, q, k, v, bias, o, lse, *_ = args
        assert lse.shape == (B, H, 64)
        assert bias is None
        assert {head.stride() for head in (do, o)} == {(S * H * D, D, H * D, 1)}


SLICES = (16 * 768, 64, 768, 1)  # strides of heads [2, 4, 16, 64] within q, k, v side by side


@pytest.mark.parametrize(
    ("strides", "offset", "wanted"),
    [
        (SLICES, 256, True),
        (SLICES, 257, False),
        ((4352, 68, 272, 1), 0, False),
        ((4096, 1024, 1, 16), 0, False),
        ((0, 1024, 64, 1), 0, False),
    ],
    ids=str,
)
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
    case = attention_core.CoreCase(False, D, causal, False, False, False, kv_heads != 4)
    names = [fused for fused in ("cudnn", "flash") if attention_core._accepts(fused, 0, dtype, case)]
    assert names, "torch accepts none of its kernels here"
    for name, layout, do_layout in itertools.product(names, *2 * [("heads", "tokens", "packed")]):
        core, leaves = core._replace(fused=name), [laid_out(t, layout).requires_grad_() for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=kv_heads != 4)
        o.backward(torch.empty_like(o).copy_(do))  # with another layout torch's own has been wrong
        heads = [t.detach() for t in leaves]
        got = core_run(eager, core, *heads, laid_out(do, do_layout))
        for reference, *both in zip(exact, got, own, strict=True):
            error, allowed = ((x.double() - reference).norm() / reference.norm() for x in both)
            assert error <= max(2 * allowed, 1e-5), (name, layout, do_layout)
            assert allowed < 0.02
        for _ in range(3):
            assert all(map(torch.equal, attention_core.attend(eager, *heads, core)[:2], got[:2])), name


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
