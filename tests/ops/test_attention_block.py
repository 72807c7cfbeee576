"""attention_block: what no rule over its options shows. What it refuses is in test_refusals.py."""

import pytest
import torch
from support.calls import call_of
from support.cases import assert_same, assert_same_within_rounding, gradients
from support.oracles import attention_block as oracle
from support.oracles import varlen_attn as varlen_oracle
from support.properties import Case

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.attention import sublayer as _sublayer
from ckptkern.ops.catalog import HEAD_DIM, Normal, Sizes

SIZES = Sizes()
(B, S), d, H = SIZES.lead, SIZES.features, SIZES.heads


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_is_not_positive(scale):
    """torch's kernel on a CPU hides scores by -inf before it scales them, which gives NaN, also in torch's own attention."""
    call = call_of("attention_block", is_causal=True, scale=scale, recompute="full")
    given = {name: value for name, value in call.arguments.items() if not isinstance(value, Normal)}
    assert_same_within_rounding(gradients(call, call.make()), gradients(lambda t: oracle(**given | t), call.make()))
    q, ends = torch.randn(7, 4, 6), torch.tensor([0, 7], dtype=torch.int32)
    packed = (
        function(q, q, q, ends, ends, 7, 7, is_causal=True, scale=scale)
        for function in (ckptkern.varlen_attn, varlen_oracle)
    )
    torch.testing.assert_close(*packed)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bias_alone(backend):
    """Nothing else is trained, and -inf hides keys and whole rows: gradients there are 0, never NaN."""
    call, found = call_of("attention_block", attn_mask=Normal((B, H, S, S)), recompute="full"), []
    for frozen in ((), call.make().keys() - {"attn_mask"}):
        tensors = call.make(frozen=frozen)
        with torch.no_grad():
            tensors["attn_mask"][0, 1, 2] = tensors["attn_mask"][1, :, :, 0] = -torch.inf
        with ckptkern.backend(backend):
            found.append(gradients(call, tensors))
    assert_same(found[1], {name: found[0][name] for name in found[1]})
    dmask = found[1]["attn_mask"]
    assert dmask.isfinite().all()
    assert (dmask != 0).sum() == dmask.numel() - S - H * S


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_tokens_in_no_sequence(backend):
    """Attention gives them zeros and does not see them, whatever is in memory: deterministic torch.empty gives NaN."""
    case = Case(
        catalog.OPS["attention_block"],
        ("sequences, of which one is empty, and tokens in none",),
        "full",
        Sizes((2, 70)),
    )
    leaves = case.make(torch.float32)
    expected = gradients(lambda t: case.oracle(t)[0], leaves)
    torch.use_deterministic_algorithms(True)
    try:
        with ckptkern.backend(backend):
            found = gradients(lambda t: case.results(t)[0], leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_within_rounding(found, expected)


def test_a_list_of_parameters_is_three_weights():
    weights, out, x = torch.nn.ParameterList(torch.randn(72, 10).chunk(3)), torch.randn(10, 24), torch.randn(2, 7, 10)
    expected = ckptkern.attention_block(x, list(weights), None, out, None, 4)
    assert torch.equal(ckptkern.attention_block(x, weights, None, out, None, 4), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_slopes_get_no_wrong_gradient(compiled):
    """Also under torch.func, where grad mode is on for a tensor that requires no gradient."""
    call = call_of("attention_block")

    def loss(slopes):
        return call.with_(alibi_slopes=slopes).unseeded(tensors).sum()

    tensors = call.make()
    torch._dynamo.reset()
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else torch.func.grad(loss)
    with pytest.raises(Exception, match="no gradient is formed for alibi_slopes"):
        run(torch.ones(H, requires_grad=compiled))


# -- groups of heads ---------------------------------------------------------------------------------------------------


def test_input_gradients_are_summed_in_float32():
    """Over 32 groups, whose 96 terms would each be rounded to bfloat16."""
    sizes, rows = Sizes((1, 64), 32, heads=32), 32 * HEAD_DIM
    arguments = dict(qkv_weight=[Normal((rows, 32))] * 3, qkv_bias=None, out_bias=None, scale=0.02)
    call = call_of("attention_block", sizes=sizes, **arguments)
    tensors = call.make(torch.bfloat16)

    def dx(workspace, dtype=torch.bfloat16):
        t = {name: one.detach().to(dtype).requires_grad_() for name, one in tensors.items()}
        return gradients(call.with_(workspace=workspace), t)["x"].double()

    exact = dx(None, torch.float64)
    of_groups, of_all = ((dx(workspace) - exact).norm() for workspace in (1, None))
    assert of_groups < 1.1 * of_all


def test_the_fewest_groups(monkeypatch):
    """As many groups as the workspace makes necessary, all or none of them in each kv head; the same number in both passes."""
    counts, division, found = [], _sublayer.division, []

    def recorded(*args):
        made = division(*args)
        counts.append(made.groups)
        return made

    monkeypatch.setattr(_sublayer, "division", recorded)
    call = call_of("attention_block", sizes=Sizes((2, 7), heads=4), recompute="full")
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        counts.clear()
        gradients(call.with_(workspace=workspace), call.make())
        assert len(set(counts)) == 1
        found.append(counts[0])
    assert list(dict.fromkeys(found)) == [1, 2, 4]
