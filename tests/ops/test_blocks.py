"""What attention_block, mlp_block and transformer_layer promise besides what test_op.py tests of every op."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from support.blocks import (
    ALL,
    BATCH,
    BLOCKS,
    FEATURES,
    LENGTH,
    MLP,
    VARIANTS,
    Attention,
    Block,
    blocks,
    in_turn,
    joined_biases,
    unfused_attention,
    variants,
)
from support.cases import (
    DTYPES,
    MODES,
    SAMPLES,
    Watch,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    clone,
    gradients,
    op_samples,
    output_gradient,
    over_samples,
    with_saved_transposed,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.registration.codec import values_of
from ckptkern.ops.transformer_layer import TransformerLayer


def with_dtypes(pairs) -> list:
    """pytest parameters: blocks and their dtypes."""
    return [pytest.param(*one.values, dtype, id=f"{one.id}-{dtype}") for one, dtype in pairs]


def given(block) -> list[torch.Tensor]:
    """A block's arguments besides x and parameters."""
    return [*(block.attention.tables() or ())] if block.attention else []


def saved_by(block, tensors) -> int:
    with saved_tensors(exclude=[t for name, t in tensors.items() if name != "x"]) as saved:
        block.fused(tensors)
    extra = 0
    if block.attention is not None:
        extra += sum(t.numel() * t.element_size() for t in given(block))
        sublayers = [sublayer for sublayer in (block.attention, block.cross) if sublayer]
        extra += sum(BATCH * sublayer.columns() for sublayer in sublayers if sublayer.padded)  # the mask, inverted
    return saved.bytes - extra


SAVED_CASES = [(one, torch.float32) for one in blocks() + variants()]
SAVED_CASES += [(one, torch.bfloat16) for one in in_turn(ALL)]


@pytest.mark.sampled
@pytest.mark.parametrize(("block", "dtype"), with_dtypes(SAVED_CASES))
def test_saved_bytes_are_the_tables(block, dtype):
    assert saved_by(block, block.make(dtype)) == block.saved_bytes(dtype.itemsize, dtype.itemsize)


@pytest.mark.sampled
@pytest.mark.parametrize("block", in_turn(ALL, shift=1))
def test_autocast_saves_no_cast_weight(block):
    """float32 x and weights under bf16 autocast: x itself is saved, the rest in two bytes per element."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved_by(block, block.make()) == block.saved_bytes(4, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("block", in_turn(ALL))
def test_autocast(block):
    """Results are float32 if there is a residual, gradients are float32, and the error is not above autocast's own."""

    def under_autocast(function):
        def run(t):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(t)

        return run

    samples = [block.make(seed=seed) for seed in range(SAMPLES)]
    ours, theirs, exact = over_samples(under_autocast(block.fused), under_autocast(block.unfused), samples)
    residual = all(sublayer.residual for sublayer in block.sublayers)
    assert ours["y"].dtype == (torch.float32 if residual else torch.bfloat16)
    assert all(ours[name].dtype == torch.float32 for name in samples[0])
    ours, theirs = ({name: t.to(torch.bfloat16) for name, t in results.items()} for results in (ours, theirs))
    assert_as_exact(*map(joined_biases, (ours, theirs, exact)))


# Every block in every mode and in every dtype, not in every mode in every dtype: modes give the same bits.
EXACT_CASES = [(one, dtype) for shift, dtype in enumerate(DTYPES) for one in in_turn(ALL, shift=shift)]


@pytest.mark.sampled
@pytest.mark.parametrize(("block", "dtype"), with_dtypes(EXACT_CASES))
def test_gradients_are_as_exact_as_torchs(block, dtype):
    samples = [block.make(dtype, seed=seed) for seed in range(SAMPLES)]
    assert_as_exact(*map(joined_biases, over_samples(block.fused, block.unfused, samples)))


@pytest.mark.sampled
@pytest.mark.parametrize("lead", [(0, 5), (2, 0), (LENGTH,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "block",
    in_turn([one for one in BLOCKS if one.name in ("pre-norm", "bare")], ("none", "full"))
    + variants(("none", "full"), ("crossing", "post-norm decoder", "gated query", "gated heads", "gated crossing")),
)
def test_empty_and_unbatched(block, lead):
    """Empty batches, sizes of one, features of zero (attention-gym#260, mamba#387)."""
    if "gated" in block.name:  # whose tables and masks have the usual sizes
        block = block.with_(attention=replace(block.attention, rotary=False, padded=False))
    tensors = block.make(lead=lead)
    if len(lead) == 1:
        inputs = [name for name in ("x", "key_value") if name in tensors]
        batched = tensors | {name: tensors[name].detach()[None].requires_grad_() for name in inputs}
        dy = output_gradient(block.fused(tensors))
        expected = gradients(block.fused, batched, dy[None])
        assert_same(
            gradients(block.fused, tensors, dy), expected | {name: expected[name][0] for name in ("y", *inputs)}
        )
        return
    ours = gradients(block.fused, tensors)
    assert ours["y"].shape[:-1] == lead
    assert all(ours[name].shape == t.shape and ours[name].isfinite().all() for name, t in tensors.items())
    (dx,) = torch.autograd.grad(block.fused(tensors).sum(), tensors["x"], create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), tensors["x"], allow_unused=True)
    assert again is None or again.shape == tensors["x"].shape


@pytest.mark.parametrize("block", variants(names=("adaptive",)))
def test_each_vector_of_samples_alone_is_trained(block):
    tensors = block.make(torch.float64)
    whole = gradients(block.fused, tensors)
    for name in (one for one in tensors if one.endswith(("norm_scale", "norm_shift", "layer_scale"))):
        alone = gradients(block.fused, block.make(torch.float64, frozen=set(tensors) - {name}))
        assert_same_within_rounding({name: alone[name]}, {name: whole[name]})


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
def test_second_order_of_a_layer_norm_with_a_bias_alone(norm_first, needs_x):
    """torch's own second derivative of it is None, which would silently leave the bias without a gradient."""
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=needs_x)
    weight, bias = torch.randn(3, 3).double(), torch.randn(3, dtype=torch.float64, requires_grad=True)

    def second_order(norm_weight):
        options = dict(norm="layer", norm_weight=norm_weight, norm_bias=bias, norm_first=norm_first)
        y = ckptkern.mlp_block(x, weight, None, weight, None, **options)
        (grad,) = torch.autograd.grad(y.pow(3).sum(), bias, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), bias)[0]

    torch.testing.assert_close(second_order(None), second_order(torch.ones(3, dtype=torch.float64)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_attention_with_a_scale_that_is_not_positive(scale, packed):
    """torch's kernel on a CPU hides scores by -inf before it scales them, which gives NaN, also in torch's own attention."""
    block = Block("", Attention(norm=None, scale=scale, dropout_p=0.0, resid_p=0.0, residual=False), recompute="full")
    tensors = block.make()
    if packed:
        q, k, v = (torch.randn(7, 4, 6) for _ in range(3))
        ends = torch.tensor([0, 7], dtype=torch.int32)
        y = ckptkern.varlen_attn(q, k, v, ends, ends, 7, 7, is_causal=True, scale=scale)
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))
        expected = unfused_attention(*heads, scale=scale, causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(y, expected)
        return
    assert_same_within_rounding(gradients(block.fused, tensors), gradients(block.unfused, tensors))


def watched(block, tensors) -> Watch:
    with Watch() as watch:
        watch.gradients = gradients(block.fused, tensors)
    return watch


WITHOUT_DROPOUT = [one.without_dropout().with_(name=f"{one.name} without dropout") for one in ALL]


@pytest.mark.sampled
@pytest.mark.parametrize("block", blocks() + variants() + in_turn(WITHOUT_DROPOUT))
def test_number_of_matmuls(block):
    """No matmul that the mode does not recompute; the registered FLOPs are those that run, and torch's counter's."""
    seen = watched(block, block.make())
    assert seen.flops == 2 * BATCH * LENGTH * block.multiply_adds()
    with FlopCounterMode(display=False) as counter:
        gradients(block.fused, block.make())
    assert counter.get_total_flops() == seen.flops
    by_op = {str(op).removeprefix("ckptkern.") for op in counter.get_flop_counts()["Global"]}
    assert by_op == {f"{block.op}_fwd", f"{block.op}_bwd"}


@pytest.mark.sampled
@pytest.mark.parametrize("block", in_turn(ALL))
def test_subsets_of_frozen_inputs(block):
    """Gradients have the bits that they have if everything is trained, and no matmul runs besides the registered FLOPs."""
    names = list(block.make())
    everything = watched(block, block.make())
    subsets = [set(random.Random(i).sample(names, 1 + i % (len(names) - 1))) for i in range(6)]
    for frozen in [{one} for one in names] + [set(names) - {one} for one in names] + subsets:
        some = watched(block, block.make(frozen=frozen))
        assert_same(some.gradients, {name: g for name, g in everything.gradients.items() if name not in frozen})
        assert some.registered == some.flops, frozen
        assert some.flops <= everything.flops, frozen


def test_the_core_forms_what_leads_to_a_trained_weight():
    """q's weight takes 3 matmuls of the core (s, dp, dq), k's or v's 4 (s, dp, dk, dv), x all 5."""
    (block,) = (one.values[0] for one in blocks(("none",), names=("llama",)) if one.values[0].op == "attention_block")
    names, head_matmuls = list(block.make()), {}
    with FlopCounterMode(display=False) as counter:
        block.fused(block.make())
    forward = counter.get_total_flops()
    for trained in ("q_weight", "k_weight", "v_weight", "x"):
        tensors = block.make(frozen=[name for name in names if name != trained])
        seen = watched(block, tensors)
        head_matmuls[trained] = seen.flops - forward
    projections = {
        name: 2 * BATCH * LENGTH * block.make()[name].numel() for name in ("q_weight", "k_weight", "v_weight")
    }
    core = {name: head_matmuls[name] - projections[name] for name in projections}
    assert core["k_weight"] == core["v_weight"] > core["q_weight"]
    all_weights = sum(projections.values())
    assert head_matmuls["x"] - all_weights - core["k_weight"] == core["k_weight"] - core["q_weight"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_bias_of_several_layers(mode):
    """As in T5 all layers add one mask. It is saved once, and nothing else of its size; gradients of the layers add up."""
    (block,) = (one.values[0] for one in variants((mode,), ("learned bias",)) if one.values[0].mlp is None)
    block = block.without_dropout()
    tensors = block.make()

    def layers(run):
        return lambda t: run({**t, "x": run(t)})

    assert_same_within_rounding(gradients(layers(block.fused), tensors), gradients(layers(block.unfused), tensors))
    with saved_tensors(exclude=[t for name, t in tensors.items() if name not in ("x", "mask")]) as saved:
        layers(block.fused)(tensors)
    padding = BATCH * LENGTH
    assert saved.bytes == 2 * block.saved_bytes(4, 4) + tensors["mask"].nbytes + 2 * padding


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_pair_of_masks(mode, hides):
    """A trained bias and a mask that hides: the sum's numbers, while both are saved as they are."""
    (block,) = (one.values[0] for one in variants((mode,), ("learned bias",)) if one.values[0].mlp is None)
    block = block.without_dropout().with_(attention=replace(block.attention, dropout_p=0.0, padded=False))
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.4
    seen[..., 0] = True

    def call(t, mask):
        arguments = block.attention.arguments(t) | {"attn_mask": mask, "mask_is_exclusion": hides}
        return ckptkern.attention_block(t["x"], **arguments, recompute=mode)

    def pair(t):
        return call(t, (t["mask"], ~seen if hides else seen))

    def whole(t):
        return call(t, t["mask"].masked_fill(~seen, -torch.inf))

    tensors = block.make()
    assert_same_within_rounding(gradients(pair, tensors), gradients(whole, tensors))
    with saved_tensors(exclude=[*tensors.values()]) as saved:
        pair(tensors)
    assert saved.bytes == block.saved_bytes(4, 4) - tensors["x"].nbytes + seen.nbytes


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bias_alone(backend):
    """Nothing else is trained, and -inf hides keys and whole rows: gradients there are 0, never NaN."""
    (block,) = (one.values[0] for one in variants(("full",), ("learned bias",)) if one.values[0].mlp is None)
    names, results = list(block.make()), {}
    for frozen in ((), [name for name in names if name != "mask"]):
        tensors = block.make(frozen=frozen)
        with torch.no_grad():
            tensors["mask"][:, 2] = tensors["mask"][1, :, 3] = -torch.inf
        with ckptkern.backend(backend):
            results[bool(frozen)] = gradients(block.fused, tensors)
    assert_same(results[True], {name: results[False][name] for name in ("y", "mask")})
    dmask = results[True]["mask"]
    assert dmask.isfinite().all()
    assert not dmask[:, 2].any()
    assert not dmask[1, :, 3].any()
    assert (dmask != 0).sum() == 4 * 6 * 7 - 6
    qkv, out, core = block.attention.matmuls().values()
    forward, backward = qkv + out + 2 * core, qkv + out + 4 * core  # o again, its gradient, the scores and theirs
    if backend == "eager":
        assert watched(block, tensors).flops == 2 * BATCH * LENGTH * (forward + backward)


@pytest.mark.parametrize("block", variants(("none",), ("normed branch", "scaled branch", "adaptive", "gemma")))
def test_parameters_after_the_branch_cost_no_matmul_of_its_gradient(block):
    """Their gradients read what the last sublayer's branch gave, one matmul from what is saved."""
    last = block.sublayers[-1]
    after = [name for name in last.parameters_after() if name in block.make()]
    seen = watched(block, block.make(frozen=set(block.make()) - set(after)))
    with torch.no_grad():
        forward = watched(block, block.make(frozen=block.make()))
    assert seen.flops - forward.flops == 2 * BATCH * LENGTH * last.matmuls()["out"]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_precision_of_a_compiled_graph_is_read(way, monkeypatch):
    """A compiled graph of CUDA tensors carries "auto", which no kernel knows; a layer has one for each sublayer."""
    (block,) = (one.values[0] for one in variants(("selective",), ("parallel",)))
    op, args = op_samples(block, block.make())[way == "backward"]
    body, seen = getattr(TransformerLayer, way), []

    def watching(*arguments):
        seen.extend(values_of(arguments, "precision"))
        return body(*arguments)

    monkeypatch.setattr(TransformerLayer, way, staticmethod(watching))
    op(*(["auto" if one == "ieee" else one for one in arg] if isinstance(arg, list) else arg for arg in args))
    assert seen == ["ieee", "ieee"]


@pytest.mark.parametrize("block", [
    *blocks(("selective",), names=("pre-norm",))[:2], *blocks(("selective",), names=("llama",))[2:],
    *variants(("selective",), ("latent",)),
])  # fmt: skip
def test_one_graph_for_all_batch_sizes(block):
    """Sizes compile once, dynamically; seeds compile nothing. Lengths compile once too, unless tables fix one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(block.call, backend=counter, fullgraph=True)
    lengths = (7,) if block.attention and block.attention.rotary else (7, 9, 33)
    for (batch, length), seed in itertools.product([(2, 7), (5, 7), (3, lengths[-1]), (16, lengths[-1])], (1, 2)):
        tensors = block.make(lead=(batch, length))
        torch.manual_seed(seed)
        ours = gradients(call, tensors)
        torch.manual_seed(seed)
        assert_same(ours, gradients(block.call, tensors))
    assert counter.frame_count <= 2 + (len(lengths) > 1)  # the first size, then any batch, then any length


def test_parallel_halves_run_no_backward_of_each_other():
    """With one weight of the attention sublayer trained, its own matmul is all that backward runs."""
    (block,) = (one.values[0] for one in variants(("none",), ("parallel",)))
    with torch.no_grad():
        forward = watched(block, block.make(frozen=block.make()))
    seen = watched(block, block.make(frozen=set(block.make()) - {"out_weight"}))
    assert seen.flops - forward.flops == 2 * BATCH * LENGTH * block.attention.matmuls()["out"]


@pytest.mark.parametrize("compiled", [False, True])
def test_parallel_halves_share_a_norm(compiled):
    """Its tensors are given twice: autograd adds what the two sublayers return for them."""
    torch._dynamo.reset()
    sublayer = dict(norm="rms", bias=False, dropout_p=0.0, resid_p=0.0)
    block = Block("", Attention(**sublayer), MLP(**sublayer), parallel=True)
    tensors = block.make()
    del tensors["mlp_norm_weight"]

    def shared(function):
        return lambda t: function(t | {"mlp_norm_weight": t["norm_weight"]})

    call = shared(block.call)
    ours = gradients(torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call, tensors)
    assert_same_within_rounding(ours, gradients(shared(block.unfused), tensors))


@pytest.mark.parametrize("lead", [(6, 2, 3), (6, 2), (9,)], ids=str)
def test_whole_samples_are_dropped(lead):
    """A sample is a row of the first dimension if there are tokens in it; else all of x."""
    block = Block("", mlp=MLP(norm=None, dropout_p=0.0, resid_p=0.0, path_p=0.5))
    tensors = block.make(lead=lead)
    branch = block.fused(tensors) - tensors["x"]
    whole = block.without_dropout().fused(tensors) - tensors["x"]
    samples, seen = lead[0] if len(lead) > 1 else 1, set()
    for one, saved in zip(branch.chunk(samples), whole.chunk(samples), strict=True):
        torch.testing.assert_close(one, saved * 2 if one.any() else saved * 0)
        seen.add(bool(one.any()))
    assert len(seen) == min(samples, 2)


def test_dropout_stops_outside_of_training():
    block = variants(("full",), ("normed branch",))[0].values[0]
    tensors = block.make()
    y = ckptkern.attention_block(tensors["x"], **block.attention.arguments(tensors), training=False)
    torch.testing.assert_close(y, block.without_dropout().unfused(tensors))


CU = torch.tensor([0, 4, 4, 11], dtype=torch.int32)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "block",
    blocks(("full",), names=("pre-norm", "bare"), dropout=False)[:2]
    + [one.values[0].without_dropout() for one in variants(("full",), ("gated heads",))],
)
def test_packed_sequences(block, mode):
    """Each sequence is computed as if it were alone; one of them is empty."""
    tensors = block.make(lead=(11,))

    def packed(t):
        return ckptkern.attention_block(
            t["x"], **block.attention.arguments(t), cu_seqlens=CU, max_seqlen=7, recompute=mode
        )

    def one_by_one(t):
        return torch.cat([block.call({**t, "x": t["x"][CU[n] : CU[n + 1]]}) for n in (0, 2)])

    assert_same_within_rounding(gradients(packed, tensors), gradients(one_by_one, tensors))


@pytest.mark.parametrize(
    ("mode", "backend"), [("none", "eager"), ("selective", "eager"), ("full", "eager"), ("full", "triton")]
)
@pytest.mark.parametrize(
    "block",
    blocks(("full",), names=("pre-norm", "llama"), dropout=False)[:2]
    + [one.values[0].without_dropout() for one in variants(("full",), ("gated heads",))],
)
def test_tokens_in_no_sequence(block, mode, backend):
    """Attention gives them zeros and does not see them: the others' results and gradients are those without them."""
    block = block.with_(attention=replace(block.attention, rotary=False, post_norm=None))
    tensors = block.make(lead=(14,))

    def packed(t):
        with ckptkern.backend(backend):
            return ckptkern.attention_block(
                t["x"], **block.attention.arguments(t), cu_seqlens=CU, max_seqlen=7, recompute=mode
            )

    few = {**tensors, "x": tensors["x"].detach()[:11].requires_grad_()}
    dy = output_gradient(packed(tensors))
    dy[11:] = 0
    expected = gradients(packed, few, dy[:11])
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    try:
        results = gradients(packed, tensors, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    bias = tensors.get("out_bias", 0)
    torch.testing.assert_close(results["y"][11:], tensors["x"][11:] + bias)
    assert not results["x"][11:].any()
    results |= {name: results[name][:11] for name in ("x", "y")}
    assert_same_within_rounding(results, expected)


X, QKV, OUT, MEMORY = torch.randn(2, 7, 10), torch.randn(72, 10), torch.randn(10, 24), torch.randn(2, 5, 8)
ERRORS = {
    "dimensions": (ValueError, "input must be", {"x": X[0, 0]}),
    "an array": (TypeError, "rotary must be a pair of tensors or a number", {"rotary": torch.ones(3).numpy()}),
    "kv heads": (ValueError, "num_kv_heads=3 must divide num_heads=4", {"num_kv_heads": 3}),
    "weights": (ValueError, "must be one tensor or three", {"qkv_weight": [QKV, QKV]}),
    "layout": (ValueError, "qkv_layout must be one of 'qkv', 'heads'", {"qkv_layout": "bsd"}),
    "layout of three": (ValueError, "needs q, k and v in one qkv_weight", {"qkv_weight": QKV.chunk(3), "qkv_layout": "heads"}),
    "rows": (ValueError, "do not fit", {"qkv_weight": QKV[:70]}),
    "features": (ValueError, "qkv_weight has in_features=9", {"qkv_weight": QKV[:, :9]}),
    "core": (ValueError, "out_weight has in_features=23", {"out_weight": OUT[:, :23]}),
    "residual": (ValueError, "residual needs out_weight with 10 rows", {"out_weight": OUT[:5], "residual": True}),
    "norm": (ValueError, "norm must be one of 'layer', 'rms'", {"norm": "batch"}),
    "norm's device": (ValueError, "input is on cpu but norm_weight is on meta", {
        "norm": "layer", "norm_weight": torch.ones(10, device="meta")}),
    "norm's dtype": (TypeError, "norm_weight must be floating point", {"norm": "layer", "norm_weight": torch.arange(10)}),
    "q/k norm's device": (ValueError, "q's norm weight is on meta", {"qk_norm": (torch.ones(6, device="meta"),) * 2}),
    "rotary's device": (ValueError, "rotary is on meta", {"rotary": (torch.ones(7, 6, device="meta"),) * 2}),
    "a list of padding": (TypeError, "key_padding_mask must be a Tensor, not list", {"key_padding_mask": [True]}),
    "packed on another device": (ValueError, "cu_seqlens is on meta", {"x": X[0], "cu_seqlens": CU.to("meta")}),
    "norm's weight": (ValueError, "need norm=", {"norm_weight": X[0, 0]}),
    "kind of q/k norm": (ValueError, "qk_norm_kind must be one of 'layer', 'rms'", {"qk_norm_kind": "batch"}),
    "q/k norm's bias": (ValueError, "k's norm bias must have the shape of its weight", {
        "qk_norm": (torch.ones(6), (torch.ones(24), torch.ones(6)))}),
    "q/k norm": (ValueError, "q's norm weight must have shape", {"qk_norm": (X[0, 0], X[0, 0])}),
    "rotary": (ValueError, "rotary must be", {"rotary": (torch.ones(7, 8), torch.ones(7, 8))}),
    "learned rotary": (ValueError, "no gradient is formed for rotary", {"rotary": (torch.ones(7, 4, requires_grad=True),) * 2}),
    "padding": (ValueError, "key_padding_mask must be bool", {"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}),
    "packed": (ValueError, "cu_seqlens must be int32", {"cu_seqlens": CU}),
    "no sequences": (ValueError, "cu_seqlens must be int32", {"x": X[0], "cu_seqlens": CU[:0]}),
    "padding of another dtype": (TypeError, "key_padding_mask is torch.float64", {
        "key_padding_mask": torch.zeros(2, 7, dtype=torch.float64)}),
    "packed and mask": (ValueError, "no meaning for sequences packed", {
        "x": X[0], "cu_seqlens": CU, "key_padding_mask": torch.zeros(7, dtype=torch.bool)}),
    "dtypes": (TypeError, "use one dtype, or torch.autocast", {"qkv_weight": QKV.double()}),
    "mode": (ValueError, "recompute must be one of", {"recompute": "some"}),
    "learned slopes": (ValueError, "no gradient is formed for alibi_slopes", {
        "alibi_slopes": torch.ones(4, requires_grad=True)}),
    "sinks": (ValueError, r"sinks must have a number for each query head, \[4\]", {"sinks": torch.ones(2)}),
    "a number of sinks": (TypeError, "sinks must be a Tensor, not float", {"sinks": 0.5}),
    "rows of a gate": (ValueError, "gate_weight must have 24 rows, one for each column of o, or 4, one for each head", {
        "gate_weight": QKV[:6]}),
    "features of a gate": (ValueError, "gate_weight has in_features=9", {"gate_weight": QKV[:4, :9]}),
    "a gate's bias alone": (ValueError, "gate_bias needs gate_weight", {"gate_bias": torch.ones(4)}),
    "two gates": (ValueError, "gate_weight does not go with gate_in_query", {
        "gate_weight": QKV[:4], "qkv_weight": [QKV[:48], *QKV[24:].chunk(2)], "gate_in_query": True}),
    "a gate in one weight": (ValueError, "gate_in_query needs three weights", {"gate_in_query": True}),
    "no gate in the query": (ValueError, "with gate_in_query", {"qkv_weight": QKV.chunk(3), "gate_in_query": True}),
    "an update of a gate": (ValueError, "lora", {
        "gate_weight": QKV[:4], "lora": {"gate": ckptkern.LoRA(torch.ones(2, 10), torch.ones(4, 2))}}),
    "dtype of a gate": (TypeError, "use one dtype", {"gate_weight": QKV[:4].double()}),
    "learned padding": (ValueError, "no gradient is formed for key_padding_mask", {
        "key_padding_mask": torch.zeros(2, 7, requires_grad=True)}),
    "heads": (ValueError, "num_heads must be an integer of at least 1, not 0", {"num_heads": 0}),
    "heads in words": (ValueError, "num_heads must be an integer of at least 1, not '4'", {"num_heads": "4"}),
    "heads of a kind": (ValueError, "num_kv_heads must be an integer of at least 1, not 2.0", {"num_kv_heads": 2.0}),
    "no weight": (TypeError, "qkv_weight must be one Tensor or three", {"qkv_weight": None}),
    "no pair": (TypeError, "rotary must be a pair of tensors", {"rotary": torch.ones(7, 6)}),
    "half a pair": (TypeError, "qk_norm must be a pair of tensors", {"qk_norm": (X[0, 0],)}),
    "longest": (ValueError, "max_seqlen must be an integer", {"x": X[0], "cu_seqlens": CU, "max_seqlen": "7"}),
    "longest of none": (ValueError, "max_seqlen needs cu_seqlens, which is None", {"max_seqlen": 7}),
    "learned scale": (ValueError, "no gradient is formed for scale", {"scale": torch.ones((), requires_grad=True)}),
    "no flag": (TypeError, "is_causal must be a bool, not 'x'", {"is_causal": "x"}),
    "a number of biases": (TypeError, "qkv_bias must be one Tensor or three", {"qkv_bias": 1.5}),
    "a tensor of heads": (ValueError, "num_heads must be an integer", {"num_heads": torch.tensor(4)}),
    "a sparse bias": (TypeError, "the bias of out_weight must be a dense tensor", {"out_bias": torch.ones(10).to_sparse()}),
    "a sparse mask": (TypeError, "attn_mask must be a dense tensor", {"attn_mask": torch.zeros(7, 7).to_sparse()}),
    "scale": (TypeError, "scale must be a number, not 'a'", {"scale": "a"}),
    "eps": (TypeError, "norm_eps must be a number, not None", {"norm_eps": None}),
    "probability": (ValueError, "dropout probability has to be", {"dropout_p": 1.5}),
    "post norm's weight": (ValueError, "post_norm_weight and post_norm_bias need post_norm=", {"post_norm_weight": X[0, 0]}),
    "post norm": (ValueError, "post_norm must be one of 'layer', 'rms'", {"post_norm": "batch"}),
    "post norm's features": (ValueError, r"post_norm_bias must have shape \(10,\), but has \(9,\)", {
        "post_norm": "layer", "post_norm_bias": X[0, 0, :9]}),
    "branch scale": (ValueError, r"layer_scale must be a number, have shape \(10,\), or have shape \(2, 10\) or \(2, 1, 10\), "
        r"one vector for each sample of the input \(2, 7, 10\), but has \(9,\)", {"layer_scale": X[0, 0, :9]}),
    "a gate of one sample": (ValueError, r"layer_scale must .* but has \(1, 10\)", {"layer_scale": X[:1, 0]}),
    "a gate of each token": (ValueError, r"layer_scale must .* but has \(2, 7, 10\)", {"layer_scale": X}),
    "a scale of each token": (ValueError, r"norm_scale must have shape \(2, 10\) or \(2, 1, 10\), one vector for each sample", {
        "norm": "layer", "norm_scale": X}),
    "a scale of all samples": (ValueError, r"norm_shift must have .* but has \(10,\)", {
        "norm": "layer", "norm_shift": X[0, 0]}),
    "a scale without a norm": (ValueError, "norm_scale is of a norm before the branch; pass norm='layer' or 'rms' and", {
        "norm_scale": X[:, 0]}),
    "a shift of a trailing norm": (ValueError, "norm_shift is of a norm before the branch", {
        "norm": "rms", "norm_first": False, "norm_shift": X[:, 0]}),
    "a scale of another device": (ValueError, "input is on cpu but norm_scale is on meta", {
        "norm": "rms", "norm_scale": X[:, 0].to("meta")}),
    "no branch scale": (TypeError, "layer_scale must be a number, not 'a'", {"layer_scale": "a"}),
    "path's probability": (ValueError, "dropout probability has to be", {"drop_path_p": 1.5}),
    "another probability": (ValueError, "dropout probability has to be", {"resid_dropout_p": "0.1"}),
    "three masks": (TypeError, "attn_mask must be one mask or a pair of them, not 3", {"attn_mask": [X[0, :, :7]] * 3}),
    "a pair and padding": (ValueError, "key_padding_mask does not go with a pair of masks", {
        "attn_mask": [torch.zeros(7, 7)] * 2, "key_padding_mask": torch.zeros(2, 7)}),
    "the second is trained": (ValueError, "no gradient is formed for the second attn_mask", {
        "attn_mask": (torch.zeros(7, 7), torch.zeros(7, 7, requires_grad=True))}),
    "the shape of a second": (ValueError, r"attn_mask of shape \(6, 7\) does not broadcast", {
        "attn_mask": (torch.zeros(7, 7), torch.zeros(6, 7))}),
    "another number of samples": (ValueError, r"key_value must be \[B, S_k, d_k\] with the samples of the input", {
        "key_value": MEMORY[:1]}),
    "no memory": (TypeError, "key_value must be a Tensor, not list", {"key_value": [1.0]}),
    "features of the memory": (ValueError, "key_value has 8 features but the input 10; qkv_weight must then be three weights", {
        "key_value": MEMORY}),
    "rows of the memory's weight": (ValueError, "key_value has 8 features but k_weight has in_features=10", {
        "key_value": MEMORY, "qkv_weight": QKV.chunk(3)}),
    "dtype of the memory": (TypeError, "use one dtype", {"key_value": X.double()}),
    "rotary of two kinds": (ValueError, "rotary is for self-attention and does not go with key_value", {
        "key_value": X, "rotary": 1e4}),
    "packed memory": (ValueError, "cu_seqlens is for self-attention", {"x": X[0], "key_value": X[1], "cu_seqlens": CU}),
    "memory by head": (ValueError, "qkv_layout is for self-attention", {"key_value": X, "qkv_layout": "heads"}),
    "padding of the memory": (ValueError, r"of shape \(2, 5\), but is torch.bool of shape \(2, 7\)", {
        "key_value": X[:, :5], "key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}),
    "mask of the memory": (ValueError, r"attn_mask of shape \(7, 7\) does not broadcast to \(2, 4, 7, 5\)", {
        "key_value": X[:, :5], "attn_mask": torch.zeros(7, 7)}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "changes"), ERRORS.values(), ids=ERRORS)
def test_errors(error, message, changes):
    arguments = dict(x=X, qkv_weight=QKV, qkv_bias=None, out_weight=OUT, out_bias=None, num_heads=4)
    with pytest.raises(error, match=f"attention_block: .*{message}"):
        ckptkern.attention_block(**arguments | changes)


def test_a_list_of_parameters_is_three_weights():
    weights = torch.nn.ParameterList(QKV.chunk(3))
    expected = ckptkern.attention_block(X, list(weights), None, OUT, None, 4)
    assert torch.equal(ckptkern.attention_block(X, weights, None, OUT, None, 4), expected)


UP, DOWN = torch.randn(12, 10), torch.randn(10, 12)
MLP_ERRORS = {
    "gate": (ValueError, "gate_bias needs gate_weight", {"gate_bias": UP[:, 0]}),
    "residual": (ValueError, "residual needs down_weight with 10 rows", {"down_weight": DOWN[:9]}),
    "activation": (ValueError, "activation must be one of", {"activation": "tanh"}),
    "mode": (ValueError, "recompute must be one of", {"recompute": "some"}),
    "probability": (ValueError, "dropout probability has to be", {"dropout_p": -0.1}),
    "dtype": (TypeError, "use one dtype, or torch.autocast", {"up_weight": UP.double()}),
    "device": (ValueError, "input is on cpu but up_weight is on meta", {"up_weight": UP.to("meta")}),
    "features": (ValueError, "input has 10 features but up_weight has in_features=9", {"up_weight": UP[:, :9]}),
    "eps": (TypeError, "norm_eps must be a number", {"norm_eps": None}),
    "a slip": (TypeError, "residual must be a bool, not 0.1", {"residual": 0.1}),
    "workspace": (ValueError, "workspace must be a positive number of bytes", {"workspace": "a"}),
}


@pytest.mark.parametrize(("error", "message", "changes"), MLP_ERRORS.values(), ids=MLP_ERRORS)
def test_errors_of_the_mlp_block(error, message, changes):
    arguments = dict(x=X, up_weight=UP, up_bias=None, down_weight=DOWN, down_bias=None)
    with pytest.raises(error, match=f"mlp_block: .*{message}"):
        ckptkern.mlp_block(**arguments | changes)


ATTENTION_SUBLAYER = dict(qkv_weight=QKV, qkv_bias=None, out_weight=OUT, out_bias=None, num_heads=4, dropout_p=0.5)
MLP_SUBLAYER = dict(up_weight=UP, up_bias=None, down_weight=DOWN, down_bias=None)
LAYER_ERRORS = {
    "its own arguments": (ValueError, "recompute is an argument of transformer_layer, not of", {"recompute": "full"}, {}),
    "unknown": (TypeError, "attention_arguments has 'heads', but its arguments are qkv_weight,", {"heads": 4}, {}),
    "unknown to the MLP": (TypeError, "mlp_arguments has 'num_heads', but its arguments are up_weight,", {}, {"num_heads": 4}),
    "missing": (TypeError, "mlp_arguments must have up_weight, up_bias, down_weight, down_bias", {}, None),
    "no dict": (TypeError, "attention_arguments must be a dict of arguments by name, not list", [1], {}),
    "rows": (ValueError, "out_weight must have 10 rows", {"out_weight": OUT[:5], "residual": False}, {}),
    "parallel after": (
        ValueError, "mlp_arguments has norm_first=False", {"parallel": True}, {"norm": "rms", "norm_first": False}),
    "parallel alone": (ValueError, "mlp_arguments has residual=False", {"parallel": True}, {"residual": False}),
    "parallel rows": (ValueError, "down_weight must have 10 rows, but it has 9", {"parallel": True}, {"down_weight": DOWN[:9]}),
    "parallel no flag": (TypeError, "parallel must be a bool, not 1", {"parallel": 1}, {}),
    "dtype": (TypeError, "use one dtype, or torch.autocast", {}, {"down_weight": DOWN.double()}),
    "no memory": (TypeError, "cross_attention_arguments must have key_value", {"cross": {}}, {}),
    "unknown to the cross-attention": (TypeError, "cross_attention_arguments has 'heads'", {"cross": {"heads": 1}}, {}),
    "parallel memory": (
        ValueError, "parallel sublayers take no cross_attention_arguments", {"parallel": True, "cross": {"key_value": X}}, {}),
    "rows of the cross-attention": (
        ValueError, "out_weight must have 10 rows", {"cross": {"key_value": X, "out_weight": OUT[:5], "residual": False}}, {}),
    "half a dtype": (TypeError, "use one dtype, or torch.autocast", {}, {"up_weight": UP.bfloat16()}),
    "learned slopes": (
        ValueError, "no gradient is formed for alibi_slopes", {"alibi_slopes": torch.ones(4, requires_grad=True)}, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "attention", "mlp"), LAYER_ERRORS.values(), ids=LAYER_ERRORS)
def test_errors_of_the_layer(error, message, attention, mlp):
    """No error moves the generator, even if the attention sublayer, which is checked first, has dropout."""
    attention = ATTENTION_SUBLAYER | attention if isinstance(attention, dict) else attention
    options = {"parallel": attention.pop("parallel")} if "parallel" in attention else {}
    if "cross" in attention:
        own = {name: value for name, value in ATTENTION_SUBLAYER.items() if name in attention}
        options["cross_attention_arguments"] = own | attention.pop("cross")
    before = torch.get_rng_state()
    with pytest.raises(error, match=f"transformer_layer: .*{message}"):
        ckptkern.transformer_layer(X, attention, {} if mlp is None else MLP_SUBLAYER | mlp, **options)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("compiled", [False, True])
def test_slopes_get_no_wrong_gradient(compiled):
    """Also under torch.func, where grad mode is on for a tensor that requires no gradient."""

    def loss(slopes):
        return ckptkern.attention_block(X, QKV, None, OUT, None, 4, alibi_slopes=slopes).sum()

    torch._dynamo.reset()
    if not compiled:
        with pytest.raises(ValueError, match="no gradient is formed for alibi_slopes"):
            torch.func.grad(loss)(torch.ones(4))
        return
    with pytest.raises(Exception, match="no gradient is formed for alibi_slopes"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("call", [
    lambda: ckptkern.mlp_block(X, UP, None, DOWN, None, dropout_p=0.5, workspace="a"),
    lambda: ckptkern.attention_block(**ATTENTION_SUBLAYER, x=X, norm_eps="a"),
    lambda: ckptkern.scaled_dot_product_attention(X, X, X, dropout_p=0.5, scale="a"),
])  # fmt: skip
def test_errors_leave_the_generator_alone(call):
    before = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError)):
        call()
    assert torch.equal(torch.get_rng_state(), before)


# -- the kernels ------------------------------------------------------------------------------------------------------

KERNEL_BLOCKS = [
    block for block in blocks(("full",))
    if block.id.startswith(("attention_block-pre-norm", "mlp_block", "transformer_layer-llama"))
]  # fmt: skip


# An MLP sublayer after its branch, an attention sublayer alone, and all three sublayers.
KERNEL_VARIANTS = [
    one for one in VARIANTS
    if one.name in ("normed heads in groups", "learned bias", "gated query", "gated heads", "gated crossing", "latent")
    and not one.mlp
]  # fmt: skip
KERNEL_VARIANTS += [
    one for one in VARIANTS if one.name in ("normed branch", "post-norm decoder", "low-rank llama") and one.mlp
]


@pytest.mark.parametrize("block", KERNEL_BLOCKS + in_turn(KERNEL_VARIANTS, ("full",)))
def test_whole_ops_on_the_kernels(block):
    """Every mode on the interpreted kernels: twice eager's error at most, and the same bits in every mode, so recompute
    = forward."""
    tensors = block.make(torch.bfloat16)
    with ckptkern.backend("triton"):
        # an MLP's modes: triton_kernels/test_ops.py
        modes = MODES if block.name == "pre-norm" and not block.mlp else ("none", "full")
        ours = {mode: gradients(block.with_(recompute=mode).fused, tensors) for mode in modes}
    eager = gradients(block.unfused, tensors)
    exact = gradients(block.unfused, clone(tensors, torch.float64))
    assert_as_exact(*map(joined_biases, (ours["full"], eager, exact)))
    for results in ours.values():
        assert_same(results, ours["none"])


@pytest.mark.parametrize("block", blocks(("full",), names=("pre-norm",))[:1])
def test_recomputed_output_of_the_core_is_that_of_forward(block):
    """If y's gradient is one in a single place, out_weight's gradient is a row of the recomputed o, bit for bit."""
    block = block.without_dropout()
    tensors = block.make(torch.bfloat16)
    for token in (0, LENGTH - 1):
        dy = torch.zeros(BATCH, LENGTH, FEATURES, dtype=torch.bfloat16)
        dy[1, token, 3] = 1
        with ckptkern.backend("triton"):
            rows = [
                gradients(block.with_(recompute=mode).fused, tensors, dy)["out_weight"][3] for mode in ("none", "full")
            ]
        assert rows[0].any()
        assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("block", "backend"),
    [
        *(
            pytest.param(*one.values, "eager", id=one.id)
            for one in blocks(("none", "full"), names=("pre-norm", "llama")) + variants(("none", "full"), ("latent",))
        ),
        *(
            pytest.param(*one.values, "triton", id=f"{one.id}-triton")
            for one in blocks(("none", "full"), names=("llama",))[:2]
        ),
    ],
)
def test_saved_tensors_may_come_back_with_other_strides(block, backend):
    """The kernels read lse and delta as if both had one layout."""
    tensors = block.make()
    with ckptkern.backend(backend):
        ours, expected = gradients(with_saved_transposed(block.fused), tensors), gradients(block.fused, tensors)
    for name, reference in expected.items():  # other strides, other matmuls of the BLAS
        torch.testing.assert_close(ours[name], reference, rtol=1e-4, atol=1e-4)
