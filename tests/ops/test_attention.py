"""scaled_dot_product_attention and the attention blocks: shapes, hidden rows, extreme scores, what kernels refuse, and in how
many groups heads are taken. Options are tested in test_properties.py, other refusals in test_errors.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import (
    assert_as_exact,
    assert_same_within_rounding,
    clone,
    each_backend,
    gradients,
    output_gradient,
)
from support.catalog import Sizes
from support.properties import call_of
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern.ops.attention import latent_sublayer, sublayer
from ckptkern.ops.attention.core_sublayer import plan_of
from ckptkern.ops.attention.sublayer import attention_table
from ckptkern.ops.registration.functions import bodies_seen

QUERY, KEY = (2, 4, 7, 6), (2, 4, 5, 6)


def inputs(query=QUERY, key=KEY, value=None, attn_mask=None, dtype=torch.float32):
    """Leaves of these shapes."""
    shapes = dict(query=query, key=key, value=value or key) | ({"attn_mask": attn_mask} if attn_mask else {})
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def ours(**options):
    return lambda t: ckptkern.scaled_dot_product_attention(**t, **options)


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(**t, **options)


# What the options' rule has not: a scale in a tensor, masks of fewer dimensions, whose gradients have their shapes, and sizes
# by size.
GROUPED, FIVE = dict(key=(2, 2, 5, 6)), (2, 3, 4, 7, 6)
SHAPES = (
    ((7, 6), (5, 6)), (FIVE, FIVE), (QUERY, (2, 1, 5, 6), KEY), ((4, 7, 6), (1, 5, 6)), ((2, 1, 7, 6), KEY),
    ((5, 8), (1, 1, 3, 8)), ((1, 5, 8), (4, 8)), ((4, 1, 2, 5, 8), (3, 1, 4, 8)), ((2, 2, 1, 2, 5, 8), (2, 4, 8)),
)  # fmt: skip
TRAINED = [(GROUPED, shape) for shape in ((4, 7, 5), (2, 1, 7, 5), (2, 1, 1, 5), (5,))]
TRAINED += [(dict(query=FIVE, key=FIVE), shape) for shape in ((3, 1, 7, 7), (4, 7, 7), (2, 1, 1, 1, 7))]
LIKE_TORCHS = {
    "a scale in a tensor": (GROUPED, dict(scale=torch.tensor(0.2))),
    **{str(shapes): (dict(zip(("query", "key", "value"), shapes, strict=False)), {}) for shapes in SHAPES},
    **{f"trained {shape}": (sizes | dict(attn_mask=shape), {}) for sizes, shape in TRAINED},
}


@each_backend
@pytest.mark.parametrize("case", LIKE_TORCHS)
def test_like_torchs(case, backend):
    sizes, options = LIKE_TORCHS[case]
    tensors, options = inputs(**sizes), options | {"enable_gqa": GROUPED.items() <= sizes.items()}
    with ckptkern.backend(backend):
        actual = gradients(ours(**options), tensors)
    assert_same_within_rounding(actual, gradients(torchs(**options), tensors))


def test_a_list_of_parameters_is_three_weights():
    call = call_of("attention_block", qkv_weight=torch.nn.ParameterList(torch.randn(24, 6).chunk(3)), qkv_bias=None)
    t = call.make()
    assert torch.equal(call(t), call.with_(qkv_weight=list(call.arguments["qkv_weight"]))(t))


# -- rows that see nothing ---------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("kind", ["bool", "additive", "trained"])
def test_rows_that_see_nothing(kind, backend):
    """Zeros and zero gradients, never NaN (pytorch#103749, pytorch#41508), and elsewhere torch's."""
    mask = torch.randn(4, 7, 5) if kind != "bool" else torch.zeros(4, 7, 5)
    mask[:, 2] = mask[:, 5] = mask[1, :, 3] = -math.inf
    tensors = inputs() | {"attn_mask": (mask == 0) if kind == "bool" else mask.requires_grad_(kind == "trained")}
    with ckptkern.backend(backend):
        actual = gradients(ours(), tensors)
    for name in {"y", "query", "attn_mask"} & actual.keys():
        assert not actual[name][..., [2, 5], :].any(), name
    expected = gradients(torchs(), tensors)
    assert_same_within_rounding(actual, {name: t.nan_to_num() for name, t in expected.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [-1e4, torch.finfo(torch.float32).min, "large scores"])
def test_weights_of_extreme_scores_add_up_to_one(hidden, dtype):
    """Of rows that a finite mask hides, and next to a score of 1e4, where a float32 logsumexp has no digits left for log(5): as
    exact as softmax's own, in both directions."""
    tensors, mask = inputs(dtype=dtype), torch.zeros(7, 5, dtype=dtype)
    if hidden == "large scores":  # |q| of 100, keys alike
        tensors = {name: t.detach() for name, t in tensors.items()}
        tensors["query"] = 100 * tensors["query"].sign()
        tensors["key"] = (100 * tensors["key"][:, :, :1].sign()).expand(KEY)
        tensors["value"].requires_grad_()
    else:
        mask[2:4] = max(hidden, torch.finfo(dtype).min)

    def softmaxed(t):
        s = t["query"] @ t["key"].mT * 6**-0.5 + mask.to(t["query"].dtype)
        return s.softmax(-1) @ t["value"]

    dy = output_gradient(tensors["query"])
    exact = gradients(softmaxed, clone(tensors, torch.float64), dy.double())
    assert_as_exact(gradients(ours(attn_mask=mask), tensors, dy), gradients(softmaxed, tensors, dy), exact)


@each_backend
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("none_of", ["samples", "rows", "columns", "features"])
def test_zeros_where_there_is_nothing_to_see(none_of, packed, backend):
    sizes = dict(samples=2, rows=7, columns=5, features=6) | {none_of: 0}
    B, *lengths, D = sizes.values()
    query, key = ((S, 4, D) if packed else (B, 4, S, D) for S in lengths)
    ends = [torch.tensor([0, S] if B else [0], dtype=torch.int32) for S in lengths]
    tensors = inputs(query, key)
    call = (lambda t: ckptkern.varlen_attn(*t.values(), *ends, 7, 5)) if packed else ours(dropout_p=0.3)
    with ckptkern.backend(backend):
        actual = gradients(call, tensors)
    for name, t in actual.items():
        assert t.shape == (query if name == "y" else tensors[name].shape)
        assert not t.any(), name


# -- what is refused ---------------------------------------------------------------------------------------------------

WIDE, NARROW = torch.randn(1, 3, 1, 257), torch.randn(1, 3, 1, 16)
ROWS, SLOPES, ones = torch.randn(3, 8), torch.ones(3, requires_grad=True), torch.ones
sdpa, TOO_WIDE = ckptkern.scaled_dot_product_attention, "the attention kernels cover head dims up to 256, not 257"
REFUSED = {
    "query": (lambda: sdpa(WIDE, WIDE, NARROW), TOO_WIDE),
    "value": (lambda: sdpa(NARROW, NARROW, WIDE), TOO_WIDE),
    "block": (lambda: ckptkern.attention_block(ROWS, ones(771, 8), None, ones(8, 257), None, 1), TOO_WIDE),
    "latents": (
        lambda: ckptkern.latent_attention_block(ROWS, ones(10, 8), ones(6, 8), ones(265, 4), ones(8, 257), 1), TOO_WIDE
    ),
    "slopes": (
        lambda: sdpa(NARROW, NARROW, NARROW, alibi_slopes=SLOPES), "the kernels compute no gradient for alibi_slopes"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_only_eager_computes_is_an_error_of_the_kernels(call, message):
    assert call().isfinite().all()
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize("compiled", [False, True])
def test_slopes_get_no_wrong_gradient(compiled):
    """Also under torch.func, where grad mode is on for a tensor that requires no gradient."""
    call = call_of("attention_block")
    tensors = call.make()

    def loss(slopes):
        return call.with_(alibi_slopes=slopes).unseeded(tensors).sum()

    torch._dynamo.reset()
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else torch.func.grad(loss)
    with pytest.raises(Exception, match="no gradient is formed for alibi_slopes"):
        run(torch.ones(2, requires_grad=compiled))


@pytest.mark.parametrize(
    ("name", "module", "divides"),
    [
        ("attention_block", sublayer, "division"),
        ("latent_attention_block", latent_sublayer, "latent_groups"),
    ],
)
def test_the_fewest_groups_of_heads(name, module, divides, monkeypatch):
    """As many groups as the workspace makes necessary, all or none of them in each kv head; the same number in both passes."""
    seen, counts, divide = [], [], getattr(module, divides)
    monkeypatch.setattr(module, divides, lambda *args: seen.append(divide(*args)) or seen[-1])
    call = call_of(name, sizes=Sizes((2, 7), heads=4), recompute="full")
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        seen.clear()
        gradients(call.with_(workspace=workspace), call.make())
        (groups,) = {getattr(division, "groups", division) for division in seen}
        counts.append(groups)
    assert list(dict.fromkeys(counts)) == [1, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True], ids=["three weights", "packed"])
@pytest.mark.parametrize("H_kv", [1, 2])
def test_groups_share_heads_of_k_and_v(H_kv, packed, dtype):
    """In a small workspace each query head is a group, at every option that reads k or v."""
    torch.manual_seed(0)
    sizes = [(40, 16), (16 + 8 * H_kv, 16), (16 + 8 * H_kv,), (16, 16), (4,), (4,), (4, 16), (4 * H_kv, 4)]
    leaves = [(torch.randn(size, dtype=dtype) / 2).requires_grad_() for size in sizes]

    def backward(workspace, recompute):
        x, weight, bias, out, *norms, a, b = leaves
        layers, lora = (weight, bias), {"k": ckptkern.LoRA(a, b, 1.0)}
        if packed:
            lora = None
        else:
            layers = [tensor.split([16, 4 * H_kv, 4 * H_kv]) for tensor in layers]
        y = ckptkern.attention_block(
            x, *layers, out, None, 4, H_kv, qk_norm=norms, rotary=100.0, is_causal=True, lora=lora, recompute=recompute,
            workspace=workspace,
        )  # fmt: skip
        return torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)

    def groups(workspace):
        with pytest.MonkeyPatch.context() as patch:
            seen, divide = [], sublayer.division
            patch.setattr(sublayer, "division", lambda *args: seen.append(divide(*args)) or seen[-1])
            return [backward(workspace, mode) for mode in ("none", "selective", "full")], {d.groups for d in seen}

    whole, count = groups(2**30)
    assert count == {1}
    parts, count = groups(1)
    assert count == {4}
    rounding = 1e-4 if dtype == torch.float32 else 1e-10  # gradients are sums of up to some tens
    torch.testing.assert_close(parts, whole, rtol=rounding, atol=rounding)


AFTER_CORE = {"o", "gated", "f", "z", "y"}


@pytest.mark.parametrize(
    ("need", "saved", "formed", "values"),
    [
        ("wk", "o", {"k", "k_heads", *AFTER_CORE}, {"h", "q", "k", "v", "g", "q_heads", "k_heads", "o"}),
        ("wk", "o q k v g", {"k", "k_heads", *AFTER_CORE}, {"h", "q", "k", "v", "g", "q_heads", "k_heads", "o"}),
        ("wg", "o", {"g", *AFTER_CORE} - {"o"}, {"h", "g", "o"}),
        ("wo", "o", {"f", "z", "y"}, {"h", "g", "o", "gated"}),
        ("bo", "o", {"f", "z", "y"}, set()),
    ],
)
def test_what_one_gradient_leads_to(need, saved, formed, values):
    """Of an attention sublayer with three weights and a gate: a gate's gradient needs neither q nor k."""
    layout = False, False, "g", False, False, False
    plan = plan_of(attention_table, layout, frozenset([need]), frozenset(saved.split()))
    assert plan.formed - {need} == formed
    assert plan.values == values


class Biases(TorchDispatchMode):
    """The results of matmuls to which a bias is added."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.addmm and args[0].dim() == 1:
            self.found.append(out)
        return out


BIASED = [
    ("attention_block", "three weights with updates"), ("attention_block", "memory of other features"),
    ("attention_block", "gate_bias"), ("latent_attention_block", "q_a_bias", "kv_a_bias"),
]  # fmt: skip


@pytest.mark.parametrize("workspace", [2**30, 1], ids=["at once", "in groups"])
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("case", BIASED, ids=" ".join)
def test_a_bias_is_added_in_an_epilogue(case, mode, workspace):
    """Where cuBLASLt can, which is to contiguous results: with a stride torch copies the bias into the result before."""
    call = call_of(*case, sizes=Sizes((2, 7), heads=4), recompute=mode, workspace=workspace)
    with bodies_seen(), Biases() as biases:
        gradients(call, call.make())
    assert biases.found
    assert all(result.is_contiguous() for result in biases.found)


def test_gradients_of_a_mask_that_layers_share_are_added_in_place():
    t = inputs(attn_mask=(2, 4, 7, 5))
    mask = t.pop("attn_mask") * 1
    y = sum(ckptkern.scaled_dot_product_attention(*(t[n] for n in ("query", "key", "value")), mask) for _ in range(3))
    with torch.profiler.profile(record_shapes=True) as profile:
        y.sum().backward()
    added = [event for event in profile.events() if event.input_shapes[:2] == [list(mask.shape)] * 2]
    of_engine = {event.name for event in added if event.cpu_parent.name.startswith("autograd::engine")}
    assert of_engine == {"aten::add_"}
