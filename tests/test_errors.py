"""`except` clauses for torch's errors catch ours: each mistake goes to torch's counterpart first, whose error is the
expected one."""

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
META = torch.device("meta")
LAYERS = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def attention(tensors, **options):
    return lambda torchs: torchs(*tensors, **options)


def forward(*args, **options):
    """A counterpart whose module is built alike on both sides."""
    return lambda build: build()(*args, **options)


LINEAR = {
    "features": (X[:, :7], W, B),
    "a transposed weight": (X, W.t(), B),
    "three dimensions of weight": (X, W[None], B),
    "a scalar": (X[0, 0], W, B),
    "the bias's shape": (X, W, B[:4]),
    "the input's dtype": (X.double(), W, B),
    "the weight's dtype": (X, W.bfloat16(), B),
    "the bias's dtype": (X, W, B.long()),
    "integers": (X.long(), W, B),
    "the bias's device": (X, W, B.to(META)),
    "no tensor": ([[1.0]], W, B),
    "a weight that is none": (X, 3, B),
    "a bias that is none": (X, W, 0.5),
}
ATTENTION = {
    "head dims": attention((Q, Q[..., :7], Q)),
    "batch sizes": attention((Q, Q[:1].repeat(3, 1, 1, 1), Q[:1].repeat(3, 1, 1, 1))),
    "heads": attention((Q, Q[:, :2], Q[:, :2])),
    "heads that do not divide": attention((Q, Q[:, :3], Q[:, :3]), enable_gqa=True),
    "one dimension": attention((Q[0, 0, 0],) * 3),
    "no dimension": attention((Q[0, 0, 0, 0],) * 3),
    "dtypes": attention((Q, Q.double(), Q)),
    "integers": attention((Q.long(),) * 3),
    "devices": attention((Q, Q.to(META), Q)),
    "sparse": attention((Q.to_sparse(), Q, Q)),
    "a mask of integers": attention((Q, Q, Q, torch.ones(6, 6, dtype=torch.int64))),
    "a mask in double": attention((Q, Q, Q, torch.ones(6, 6, dtype=torch.float64))),
    "a mask's shape": attention((Q, Q, Q, torch.ones(6, 5))),
    "a mask's dimensions": attention((Q, Q, Q, torch.ones(1, 1, 1, 6, 6))),
    "a sparse mask": attention((Q, Q, Q, torch.ones(6, 6).to_sparse())),
    "a mask in a list": attention((Q, Q, Q, [True])),
    "no tensor": attention(([1.0], Q, Q)),
    "scale": attention((Q, Q, Q), scale="1"),
}
DROPOUT = {
    "probability": (X, 1.5),
    "negative": (X, -0.5),
    "integers": (X.long(), 0.5),
    "bool": (X > 0, 0.5),
    "sparse": (X.to_sparse(), 0.5),
    "no tensor": ([1.0], 0.5),
}
MODULES = {
    "Linear": (
        (8, 5),
        {
            "features": forward(X[:, :7]),
            "dtype": forward(X.double()),
            "integers": forward(X.long()),
            "scalar": forward(X[0, 0]),
            "no tensor": forward(None),
        },
    ),
    "MultiheadAttention": (
        (8, 2),
        {
            "embedding": forward(X[:, :7], X, X),
            "key": forward(X, X[:, :7], X),
            "rows": forward(X, X, X[:2]),
            "dtype": forward(X.double(), X.double(), X.double()),
            "integers": forward(X.long(), X.long(), X.long()),
            "device": forward(X, X.to(META), X),
            "no tensor": forward([1.0], X, X),
            "mask": forward(X, X, X, attn_mask=torch.ones(2, 3)),
            "mask of integers": forward(X, X, X, attn_mask=torch.ones(3, 3, dtype=torch.int64)),
            "padding": forward(X, X, X, key_padding_mask=torch.zeros(4, dtype=torch.bool)),
            "hint without a mask": forward(X, X, X, need_weights=False, is_causal=True),
        },
    ),
    "TransformerEncoderLayer": (
        (8, 2, 16),
        {
            "embedding": forward(X[:, :7]),
            "dtype": forward(X.double()),
            "integers": forward(X.long()),
            "device": forward(X.to(META)),
            "one dimension": forward(X[0]),
            "no tensor": forward([1.0]),
            "mask": forward(X, torch.ones(2, 2)),
            "padding": forward(X, src_key_padding_mask=torch.zeros(4, dtype=torch.bool)),
        },
    ),
}
BUILT = {
    "Linear": [(-1, 5), (1.5, 5), ("8", 5)],
    "MultiheadAttention": [(8, 3), (8, 0), (-8, 2)],
    "TransformerEncoderLayer": [(8, 3), (8, 2, 16, 0.1, "tanh")],
    "Dropout": [(1.5,), (-0.5,)],
}
CHECKPOINT = {
    "no function": ((3, X), {}),
    "an argument that it has not": ((torch.sin, X), {"other": 1}),
    "determinism_check": ((torch.sin, X), {"determinism_check": "some"}),
}
SEQUENTIAL = {
    "more regions than layers": ((LAYERS, 3, X), {}),
    "an option that it has not": ((LAYERS, 1, X), {"other": 1}),
}


def mistakes():
    def case(name, torchs, ours):
        return pytest.param(torchs, ours, id=name)

    for name, arguments in LINEAR.items():
        yield case(
            f"linear-{name}", lambda a=arguments: F.linear(*a), lambda a=arguments: ckptkern.linear_act(*a, "identity")
        )
    for name, call in ATTENTION.items():
        yield case(
            f"attention-{name}",
            lambda c=call: c(F.scaled_dot_product_attention),
            lambda c=call: c(ckptkern.scaled_dot_product_attention),
        )
    for name, arguments in DROPOUT.items():
        yield case(f"dropout-{name}", lambda a=arguments: F.dropout(*a), lambda a=arguments: ckptkern.dropout(*a))
    for module, (sizes, calls) in MODULES.items():
        for name, call in calls.items():
            yield case(
                f"{module}-{name}",
                lambda c=call, m=module, s=sizes: c(lambda: getattr(nn, m)(*s)),
                lambda c=call, m=module, s=sizes: c(lambda: getattr(ckptkern.nn, m)(*s)),
            )
    for module, all_sizes in BUILT.items():
        for sizes in all_sizes:
            yield case(
                f"{module}{sizes}",
                lambda m=module, s=sizes: getattr(nn, m)(*s),
                lambda m=module, s=sizes: getattr(ckptkern.nn, m)(*s),
            )
    for name, (args, options) in CHECKPOINT.items():
        yield case(
            f"checkpoint-{name}",
            lambda a=args, o=options: checkpoint(*a, use_reentrant=False, **o),
            lambda a=args, o=options: ckptkern.checkpoint(*a, **o),
        )
    for name, (args, options) in SEQUENTIAL.items():
        yield case(
            f"checkpoint_sequential-{name}",
            lambda a=args, o=options: checkpoint_sequential(*a, use_reentrant=False, **o),
            lambda a=args, o=options: ckptkern.checkpoint_sequential(*a, **o),
        )


@pytest.mark.parametrize(("torchs", "ours"), [*mistakes()])
def test_caught_as_torchs(torchs, ours):
    with pytest.raises(Exception) as theirs:  # noqa: PT011  what torch raises is the question
        torchs()
    with pytest.raises(theirs.type):
        ours()


def test_regions_of_an_mlp_and_a_layer():
    """These ops have no counterpart of one call; torch's layers raise a RuntimeError for every mistake of this kind."""
    h = torch.randn(16, 8)
    calls = (
        lambda: ckptkern.mlp(X, h, None, W, None),
        lambda: ckptkern.mlp(X, h.double(), None, h.t().double(), None),
        lambda: ckptkern.mlp(X, h.to(META), None, h.t(), None),
        lambda: ckptkern.gated_mlp(X, h, W, h.t()),
        lambda: ckptkern.linear_stack(X, [W, W]),
        lambda: ckptkern.mlp_block(X, h, None, h.t()[:5], None),
        lambda: ckptkern.attention_block(X, W, None, W, None, 1),
        lambda: ckptkern.attention_block(X[0], h[:, :3], None, W, None, 1),
        lambda: ckptkern.attention_block(
            X, torch.randn(24, 8), None, torch.randn(8, 8), None, 2, norm="rms", norm_weight=B
        ),
        lambda: ckptkern.nn.LlamaDecoderLayer(8, 2)(X[0]),
    )
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        assert isinstance(raised.value, ValueError | TypeError)


@pytest.mark.parametrize(
    "name", [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)]
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
    with pytest.raises(RuntimeError, match=r"fc2_weight must be .* but is \(16, 8\): pass fc2_weight.t\(\)"):
        ckptkern.mlp(X, torch.randn(16, 8), None, torch.randn(16, 8), None)
    with pytest.raises(RuntimeError, match=r"has in_features=8$"):  # transposed it would not fit either
        ckptkern.linear_act(X[:, :7], W, B)


def test_a_mask_beside_is_causal_says_what_to_pass():
    mask = torch.rand(6, 6) > 0.3
    with pytest.raises(
        RuntimeError, match=r"is_causal=True; pass window_size=\(-1, 0\) with attn_mask, .* or attn_mask alone"
    ):
        ckptkern.scaled_dot_product_attention(Q, Q, Q, mask, is_causal=True)
    ours = ckptkern.scaled_dot_product_attention(Q, Q, Q, mask, window_size=(-1, 0))
    assert torch.equal(
        ours, ckptkern.scaled_dot_product_attention(Q, Q, Q, mask & torch.ones(6, 6, dtype=torch.bool).tril())
    )


def test_an_odd_head_dim_says_where_it_comes_from():
    layer = ckptkern.nn.LlamaDecoderLayer(12, 4)
    for module in (layer, layer.self_attn):
        with pytest.raises(
            RuntimeError, match=r"LlamaAttention: head_dim must be even for rotary .* 12 / num_heads=4 gives 3"
        ):
            module(torch.randn(2, 12))
    with pytest.raises(RuntimeError, match=r"attention_block: the head dim must be even for rotary .* but is 3"):
        ckptkern.attention_block(
            torch.randn(2, 12), torch.randn(36, 12), None, torch.randn(12, 12), None, 4, rotary=10000.0
        )
    assert ckptkern.nn.LlamaDecoderLayer(12, 4, rope_theta=None)(torch.randn(2, 12)).shape == (2, 12)
