"""attention_block and latent_attention_block: what no rule over their options shows. What they refuse is in test_errors.py."""

import pytest
import torch
from support.calls import call_of
from support.cases import assert_same, assert_same_within_rounding, gradients
from support.oracles import attention_block as oracle
from support.oracles import varlen_attn as varlen_oracle

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.attention import latent_sublayer, sublayer
from ckptkern.ops.catalog import Normal, Sizes

(B, S), H = Sizes().lead, Sizes().heads
each_backend = pytest.mark.parametrize("backend", ["eager", "triton"])


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_is_not_positive(scale):
    """torch's kernel on a CPU hides scores by -inf before it scales them, which gives NaN, also in torch's own attention."""
    call = call_of("attention_block", is_causal=True, scale=scale, recompute="full")
    given = {name: value for name, value in call.arguments.items() if not isinstance(value, Normal)}
    assert_same_within_rounding(gradients(call, call.make()), gradients(lambda t: oracle(**given | t), call.make()))
    q, ends = torch.randn(7, 4, 6), torch.tensor([0, 7], dtype=torch.int32)
    both = (of(q, q, q, ends, ends, 7, 7, is_causal=True, scale=scale) for of in (ckptkern.varlen_attn, varlen_oracle))
    torch.testing.assert_close(*both)


@each_backend
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


def test_a_list_of_parameters_is_three_weights():
    call = call_of("attention_block", qkv_weight=torch.nn.ParameterList(torch.randn(24, 6).chunk(3)), qkv_bias=None)
    t = call.make()
    assert torch.equal(call(t), call.with_(qkv_weight=list(call.arguments["qkv_weight"]))(t))


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
        run(torch.ones(H, requires_grad=compiled))


@each_backend
def test_slopes_and_tables_by_sample(backend):
    """Slopes [B, H] are each sample's own; tables [1, S, R] are any sample's, and leave dimensions beyond R as they are."""
    call, slopes = call_of("attention_block"), torch.rand(B, H)
    tables = ckptkern.nn.rotary_tables(torch.arange(S), 2, 10.0)
    t = call.make()
    with ckptkern.backend(backend):
        found = call.with_(alibi_slopes=slopes, rotary=tuple(table[None] for table in tables))(t)
        each = [call.with_(alibi_slopes=slopes[n], rotary=tables)(t | {"x": t["x"][n : n + 1]}) for n in range(B)]
    torch.testing.assert_close(found, torch.cat(each))


@each_backend
def test_bounds_and_slopes_of_any_strides(backend):
    """The kernels read both with a stride of 1, so for a column of a table they would read its neighbours."""
    call, ends, slopes = (
        call_of("attention_block"),
        torch.tensor([0, 2, S], dtype=torch.int32),
        torch.tensor([0.5, 0.25]),
    )
    t = call.make() | {"x": torch.randn(S, 6)}
    with ckptkern.backend(backend):
        strided, dense = (
            call.with_(cu_seqlens=of(ends), alibi_slopes=of(slopes))(t)
            for of in (lambda t: torch.stack((t, torch.full_like(t, 9)), -1)[..., 0], torch.clone)
        )
    assert torch.equal(strided, dense)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_fewer_columns_rotate_the_first_of_the_latents_rotated_dimensions(interleaved):
    """As tables whose other angles are zero."""
    sizes, (nope, rope, _) = Sizes((2, 7), heads=4), catalog.LATENT_HEAD
    call = call_of("latent_attention_block", sizes=sizes, rotary_interleaved=interleaved)
    tensors = call.make(torch.float64)
    few = torch.arange(7, dtype=torch.float64)[:, None].expand(7, 2)
    all_, other = torch.cat((few, torch.zeros_like(few)), -1), {name: t.detach().clone() for name, t in tensors.items()}
    if not interleaved:  # of two columns these are 0 and 1, of four 0 and 2
        order = [0, 2, 1, 3]
        all_ = all_[:, order]
        for rows in (other["q_weight"].view(4, nope + rope, -1)[:, nope:], other["kv_a_weight"][None, -rope:]):
            rows.copy_(rows[:, order])
    found, expected = (call.with_(rotary=(one.cos(), one.sin()))(t) for one, t in ((few, tensors), (all_, other)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "module", "divides"), [
    ("attention_block", sublayer, "division"), ("latent_attention_block", latent_sublayer, "latent_groups"),
])  # fmt: skip
def test_the_fewest_groups_of_heads(name, module, divides, monkeypatch):
    """As many groups as the workspace makes necessary, all or none of them in each kv head; the same number in both passes."""
    seen, found, divide = [], [], getattr(module, divides)
    monkeypatch.setattr(module, divides, lambda *args: seen.append(divide(*args)) or seen[-1])
    call = call_of(name, sizes=Sizes((2, 7), heads=4), recompute="full")
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        seen.clear()
        gradients(call.with_(workspace=workspace), call.make())
        (groups,) = {getattr(one, "groups", one) for one in seen}
        found.append(groups)
    assert list(dict.fromkeys(found)) == [1, 2, 4]
