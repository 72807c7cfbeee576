"""`except` clauses for torch's errors catch ours: each mistake goes to torch's counterpart first, whose error is the
expected one. Tensors of a wrong dtype, device, layout or size are refused by a rule, which tests/ops/test_errors.py tests."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ckptkern
from ckptkern import errors

X, W, B = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
Q = torch.randn(2, 4, 6, 8)
PADDING = torch.zeros(4, dtype=torch.bool)
LAYERS = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def linear(*arguments):
    return ckptkern.linear_act(*arguments, "identity")


def call(*arguments, **options):
    return arguments, options


def of_module(name: str, *sizes: int):
    """A module of torch and of ours, which is built in the call."""
    return tuple(
        lambda *args, of=of, **options: getattr(of, name)(*sizes)(*args, **options) for of in (nn, ckptkern.nn)
    )


def built(name: str):
    return getattr(nn, name), getattr(ckptkern.nn, name)


TORCHS_REGION = functools.partial(checkpoint, use_reentrant=False)
TORCHS_REGIONS = functools.partial(checkpoint_sequential, use_reentrant=False)
# (torch's, ours), and calls that torch's refuses
MISTAKES = {
    "linear": ((F.linear, linear), {
        "features": call(X[:, :7], W, B),
        "a transposed weight": call(X, W.t(), B),
        "three dimensions of weight": call(X, W[None], B),
        "the bias's shape": call(X, W, B[:4]),
        "a list": call([[1.0]], W, B),
    }),
    "attention": ((F.scaled_dot_product_attention, ckptkern.scaled_dot_product_attention), {
        "head dims": call(Q, Q[..., :7], Q),
        "batch sizes": call(Q, Q[:1].repeat(3, 1, 1, 1), Q[:1].repeat(3, 1, 1, 1)),
        "heads": call(Q, Q[:, :2], Q[:, :2]),
        "heads that do not divide": call(Q, Q[:, :3], Q[:, :3], enable_gqa=True),
        "one dimension": call(*[Q[0, 0, 0]] * 3),
        "a mask of integers": call(Q, Q, Q, torch.ones(6, 6).long()),
        "a mask in double": call(Q, Q, Q, torch.ones(6, 6).double()),
        "a mask's shape": call(Q, Q, Q, torch.ones(6, 5)),
        "a mask's dimensions": call(Q, Q, Q, torch.ones(1, 1, 1, 6, 6)),
        "a sparse mask": call(Q, Q, Q, torch.ones(6, 6).to_sparse()),
        "a mask in a list": call(Q, Q, Q, [True]),
        "scale": call(Q, Q, Q, scale="1"),
    }),
    "dropout": ((F.dropout, ckptkern.dropout), {
        "probability": call(X, 1.5),
        "negative": call(X, -0.5),
        "bool": call(X > 0, 0.5),
    }),
    "Linear": (of_module("Linear", 8, 5), {"features": call(X[:, :7])}),
    "MultiheadAttention": (of_module("MultiheadAttention", 8, 2), {
        "embedding": call(X[:, :7], X, X),
        "key": call(X, X[:, :7], X),
        "rows": call(X, X, X[:2]),
        "dtype": call(*[X.double()] * 3),
        "mask": call(X, X, X, attn_mask=torch.ones(2, 3)),
        "mask of integers": call(X, X, X, attn_mask=torch.ones(3, 3).long()),
        "padding": call(X, X, X, key_padding_mask=PADDING),
        "hint without a mask": call(X, X, X, need_weights=False, is_causal=True),
    }),
    "TransformerEncoderLayer": (of_module("TransformerEncoderLayer", 8, 2, 16), {
        "embedding": call(X[:, :7]), "one dimension": call(X[0]), "mask": call(X, torch.ones(2, 2)),
        "padding": call(X, src_key_padding_mask=PADDING),
    }),
    "Linear()": (built("Linear"), {"negative": call(-1, 5), "a fraction": call(1.5, 5), "text": call("8", 5)}),
    "MultiheadAttention()": (built("MultiheadAttention"), {
        "heads": call(8, 3), "no heads": call(8, 0), "negative": call(-8, 2),
    }),
    "TransformerEncoderLayer()": (built("TransformerEncoderLayer"), {
        "heads": call(8, 3), "activation": call(8, 2, 16, 0.1, "tanh"),
    }),
    "Dropout()": (built("Dropout"), {"probability": call(1.5), "negative": call(-0.5)}),
    "checkpoint": ((TORCHS_REGION, ckptkern.checkpoint), {
        "no function": call(3, X),
        "an argument that it has not": call(torch.sin, X, other=1),
        "determinism_check": call(torch.sin, X, determinism_check="some"),
    }),
    "checkpoint_sequential": ((TORCHS_REGIONS, ckptkern.checkpoint_sequential), {
        "more regions than layers": call(LAYERS, 3, X),
        "an option that it has not": call(LAYERS, 1, X, other=1),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, call) for name, (_, calls) in MISTAKES.items() for call in calls])
def test_caught_as_torchs(name, mistake):
    (torchs, ours), calls = MISTAKES[name]
    arguments, options = calls[mistake]
    with pytest.raises(Exception) as theirs:  # noqa: PT011  what torch raises is the question
        torchs(*arguments, **options)
    with pytest.raises(theirs.type):
        ours(*arguments, **options)


@pytest.mark.parametrize(
    "name", [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
)
def test_errors_are_both_and_travel(name):
    error = getattr(ckptkern.errors, name)
    assert issubclass(error, RuntimeError)
    assert issubclass(error, ValueError) != issubclass(error, TypeError)
    copy = pickle.loads(pickle.dumps(error("said")))  # from a worker process
    assert (type(copy), str(copy)) == (error, "said")


def test_a_transposed_weight_says_which_way_it_lies():
    with pytest.raises(RuntimeError) as raised:
        ckptkern.linear_act(X, W.t(), B)
    assert str(raised.value) == (
        "linear_act: input has 8 features but weight has in_features=5; weight must be [out_features, in_features], as in "
        "nn.Linear, but is (8, 5): pass weight.t()"
    )
    with pytest.raises(RuntimeError, match=r"has in_features=8$"):  # transposed it would not fit either
        ckptkern.linear_act(X[:, :7], W, B)


def test_a_mask_beside_is_causal_says_what_to_pass():
    mask, attend = torch.rand(6, 6) > 0.3, functools.partial(ckptkern.scaled_dot_product_attention, Q, Q, Q)
    with pytest.raises(RuntimeError, match=r"pass window_size=\(-1, 0\) with attn_mask, .* or attn_mask alone"):
        attend(mask, is_causal=True)
    assert torch.equal(attend(mask, window_size=(-1, 0)), attend(mask.tril()))


def test_an_odd_head_dim_says_what_to_do():
    x, layer = torch.randn(2, 12), ckptkern.nn.LlamaDecoderLayer(12, 4)
    with pytest.raises(
        RuntimeError, match=r"head dim must be even for rotary .* but is 3: .* rope_theta=None of a layer"
    ):
        layer(x)
    with pytest.raises(RuntimeError, match=r"attention_block: the head dim must be even for rotary .* but is 3"):
        ckptkern.attention_block(x, torch.randn(36, 12), None, torch.randn(12, 12), None, 4, rotary=10000.0)
    assert ckptkern.nn.LlamaDecoderLayer(12, 4, rope_theta=None)(x).shape == (2, 12)
