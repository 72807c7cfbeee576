"""nn.LlamaAttention and LlamaDecoderLayer: masks, packed sequences, rotary tables, norms of heads, and what is refused."""

import functools

import pytest
import torch
from support.drop_ins import B, E, T, assert_drop_in, pair_of, pairwise, tokens
from torch.nn.attention import bias

import ckptkern
from ckptkern.ops.attention.rotary import positions_of

H, HEAD = 4, 6
NAMES = ["LlamaAttention", "LlamaDecoderLayer"]
every_module = pytest.mark.parametrize("name", NAMES)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
HIDDEN = torch.arange(T).expand(B, T) > torch.tensor([[9], [2]])  # the end of the second sample


def masks_of(kind):
    """(arguments, who sees whom, which the reference takes)."""
    if kind == "bool":
        visible = (torch.rand(B, H, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)
        return {"attn_mask": visible, "is_causal": False}, visible
    return {
        "causal": ({}, CAUSAL),
        "padding": ({"key_padding_mask": HIDDEN}, CAUSAL & ~HIDDEN[:, None, None]),
        "window": ({"window_size": (1, -1)}, CAUSAL.triu(-1)),
        "upper left": ({"attn_mask": bias.causal_upper_left(T, T), "is_causal": False}, CAUSAL),
        "none": ({"is_causal": False}, torch.ones(T, T, dtype=torch.bool)),
    }[kind]


MASKS = ("causal", "bool", "padding", "window", "upper left", "none")


@pytest.mark.parametrize(
    "case",
    pairwise(
        num_kv_heads=("1", "2", "4"),
        qk_norm=(False, True),
        rotary=("built", "given", "none"),
        bias=(False, True),
        activation=("silu", "gelu"),
        recompute=("none", "selective", "full"),
        mask=MASKS,
        training=(True, False),
        composed=(False, True),
    ),
)
def test_equals_eager_pytorch(case):
    """composed: called by its parts, because one of them has a hook."""
    pair = pair_of(
        "LlamaDecoderLayer",
        args=(E, H, int(case["num_kv_heads"]), 20, HEAD),
        qk_norm=case["qk_norm"],
        attention_bias=case["bias"],
        mlp_bias=case["bias"],
        activation=case["activation"],
        recompute=case["recompute"],
        rope_theta=None if case["rotary"] == "none" else 100.0,
    )
    ours, theirs = (module.train(case["training"]) for module in pair)
    rotary = ckptkern.nn.rotary_tables(torch.arange(T), HEAD, 100.0) if case["rotary"] == "given" else None
    if case["composed"]:
        ours.self_attn.q_proj.register_forward_hook(lambda *_: None)
    masks, visible = masks_of(case["mask"])
    x = {"x": tokens("batch_first", T)}
    assert_drop_in(ours, theirs, lambda m, x: m(x, rotary, **masks), x, lambda m, x: m(x, visible))


@pytest.mark.parametrize("composed", [False, True])
@every_module
def test_packed_sequences_start_at_position_zero(name, composed):
    ours, theirs = pair_of(name, qk_norm=True, rope_theta=10.0)
    if composed:
        ours.get_submodule("self_attn" if "Layer" in name else "").q_proj.register_forward_hook(lambda *_: None)
    x, cu = {"x": tokens("unbatched", 9)}, torch.tensor([0, 2, 6, 9], dtype=torch.int32)
    packed = functools.partial(torch.nn.Module.__call__, cu_seqlens=cu, max_seqlen=4)
    assert_drop_in(ours, theirs, packed, x, lambda m, x: torch.cat([m(part[None])[0] for part in x.split((2, 4, 3))]))
    assert_drop_in(ours, theirs, lambda m, x: m(x), x, lambda m, x: m(x[None])[0])
    # scores read differences of positions alone: a position that runs on would cost precision, not correctness
    assert positions_of(9, x["x"].device, cu).tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]


# -- rotary tables -----------------------------------------------------------------------------------------------------


def test_rotary_tables():
    positions = torch.tensor([[0, 3], [7, 100]])
    angles = positions[..., None] * torch.tensor([1.0, 50**-0.5])
    for interleaved, expected in ((False, torch.cat((angles, angles), -1)), (True, angles.repeat_interleave(2, -1))):
        tables = ckptkern.nn.rotary_tables(positions, 4, 50.0, interleaved=interleaved)
        torch.testing.assert_close(tables, (expected.cos(), expected.sin()))
    assert ckptkern.nn.rotary_tables(torch.arange(3), 4, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


# -- norms and biases that differ --------------------------------------------------------------------------------------


class Own(torch.nn.Module):
    """A norm that has neither a weight nor an eps."""

    def forward(self, x):
        return x.tanh()


def weightless(attention):
    attention.q_norm = attention.k_norm = torch.nn.RMSNorm(HEAD, 0.1, elementwise_affine=False)


UNEVEN = {
    "one eps": lambda attention: (setattr(attention.q_norm, "eps", 0.5), setattr(attention.k_norm, "eps", 0.5)),
    "two eps": lambda attention: setattr(attention.q_norm, "eps", 0.5),
    "eps None": lambda attention: setattr(attention.q_norm, "eps", None),
    "no weight": weightless,
    "another norm": lambda attention: setattr(attention, "k_norm", Own()),
    "one norm": lambda attention: setattr(attention, "q_norm", None),
    "a missing bias": lambda attention: setattr(attention.q_proj, "bias", None),
}


@pytest.mark.parametrize("case", UNEVEN)
@every_module
def test_attention_whose_parts_differ(name, case):
    ours, theirs = pair_of(name, qk_norm=True, **{"attention_bias" if "Layer" in name else "bias": True})
    for module in (ours, theirs):
        UNEVEN[case](module.get_submodule("self_attn") if "Layer" in name else module)
    assert_drop_in(ours, theirs, lambda m, x: m(x), {"x": tokens("batch_first", T)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eps_none_is_torchs(dtype):
    """eps None is that of the dtype which torch computes in, at least float32. The squares here are as small as this eps."""
    small = torch.finfo(torch.promote_types(dtype, torch.float32)).eps ** 0.5
    x, results = (small * torch.randn(B, T, E, dtype=torch.float64)).to(dtype), []
    for module in pair_of("LlamaAttention", qk_norm=True, rope_theta=None):
        module.q_norm.eps = module.k_norm.eps = None
        results.append(module.to(dtype)(x).double())
    assert (results[0] - results[1]).norm() < (1e-5 if dtype == torch.float64 else 0.03) * results[1].norm()


# -- what is refused ---------------------------------------------------------------------------------------------------


REFUSED = [  # a call of a module of each kind; messages of the op are tested with it
    (lambda kind: kind(E, 4, 3), ValueError, "num_kv_heads=3 must divide num_heads=4"),
    (lambda kind: kind(12, 5), ValueError, "num_heads=5 must divide hidden_size=12"),
    (lambda kind: kind(E, 4)(torch.ones(B, T, E).long()), TypeError, "input must be floating point, not torch.int64"),
    (lambda kind: kind(E, 4)(torch.ones(E)), ValueError, r"input must be \[B, S, d\], .*, not \(12,\)"),
    (lambda kind: kind(E, 4)(torch.ones(T, E)), ValueError, "head dim must be even for rotary embedding"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
@every_module
def test_what_is_refused(name, case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call(getattr(ckptkern.nn, name))


REFUSED_TABLES = [
    ((3, 4), TypeError, "positions must be a Tensor, not int"),
    ((torch.arange(3), 3), ValueError, "dim must be even, not 3"),
    ((torch.arange(3), "4"), ValueError, "dim must be an integer of at least 1, not '4'"),
    ((torch.arange(3), 4, "1e4"), TypeError, "theta must be a number, not '1e4'"),
    ((torch.arange(3), 4, -1.0), ValueError, "theta must be .*, not -1.0"),
]


@pytest.mark.parametrize(("args", "error", "message"), REFUSED_TABLES, ids=str)
def test_wrong_arguments_of_rotary_tables(args, error, message):
    with pytest.raises(error, match=f"^rotary_tables: {message}"):
        ckptkern.nn.rotary_tables(*args)
