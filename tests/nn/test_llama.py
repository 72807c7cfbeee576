"""nn.LlamaDecoderLayer against the same layer in eager PyTorch, in float64."""

import re

import pytest
import torch
from support.cases import assert_as_exact
from support.drop_ins import dropout_is_one_mask, pairwise, run
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.attention.rotary import positions_of

E, H, HEAD, HIDDEN, B, S = 12, 4, 6, 20, 2, 5


def layer(**kwargs):
    module = ckptkern.nn.LlamaDecoderLayer(
        E, H, **{"num_kv_heads": 2, "intermediate_size": HIDDEN, "head_dim": HEAD, "dtype": torch.float64} | kwargs
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def rotated(x, positions, theta):
    """x [B, S, H, D]: (x_i, x_(i + D/2)) as a complex number, rotated by position · theta^(-2i/D)."""
    D = x.shape[-1]
    angles = positions.double()[:, None] * theta ** (-torch.arange(0, D, 2).double() / D)
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


def unfused(module, x, visible=None, positions=None):
    """The layer spelled out; visible: bool, broadcastable to [B, H, S, S]."""
    attention, mlp = module.self_attn, module.mlp
    h = module.input_layernorm(x)
    q, k, v = (getattr(attention, f"{name}_proj")(h).unflatten(-1, (-1, HEAD)) for name in "qkv")
    q, k = (one if norm is None else norm(one) for one, norm in ((q, attention.q_norm), (k, attention.k_norm)))
    if attention.rope_theta is not None:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        q, k = (rotated(one.double(), positions, attention.rope_theta).to(one.dtype) for one in (q, k))
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    visible = causal if visible is None else visible
    o = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    x = x + attention.o_proj(o.transpose(1, 2).flatten(2))
    h = module.post_attention_layernorm(x)
    act = F.silu if mlp.activation == "silu" else F.gelu
    return x + mlp.down_proj(act(mlp.gate_proj(h)) * mlp.up_proj(h))


def assert_same(module, ours, theirs, x, atol=1e-6):
    """The rotary angles are float32's, so float64 results agree to 1e-7 or so."""
    mine, reference = run(module, ours, {"x": x}), run(module, theirs, {"x": x})
    for name, wanted in reference.items():
        torch.testing.assert_close(mine[name], wanted, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "case",
    pairwise(
        num_kv_heads=("1", "2", "4"),
        qk_norm=(False, True),
        rotary=("built", "given", "none"),
        bias=(False, True),
        activation=("silu", "gelu"),
        recompute=("none", "selective", "full"),
        mask=("causal", "bool", "padding", "window", "none"),
        training=(True, False),
    ),
)
def test_equals_eager_pytorch(case):
    module = layer(
        num_kv_heads=int(case["num_kv_heads"]), qk_norm=case["qk_norm"], attention_bias=case["bias"],
        mlp_bias=case["bias"], activation=case["activation"], recompute=case["recompute"],
        rope_theta=None if case["rotary"] == "none" else 100.0,
    ).train(case["training"])  # fmt: skip
    rotary = ckptkern.nn.rotary_tables(torch.arange(S), HEAD, 100.0) if case["rotary"] == "given" else None
    visible = torch.ones(S, S, dtype=torch.bool).tril()
    masks = {}
    if case["mask"] == "bool":
        masks = {"attn_mask": (torch.rand(B, H, S, S) < 0.5) | torch.eye(S, dtype=torch.bool), "is_causal": False}
        visible = masks["attn_mask"]
    elif case["mask"] == "padding":
        padding = torch.zeros(B, S, dtype=torch.bool)
        padding[1, 3:] = True
        masks, visible = {"key_padding_mask": padding}, visible & ~padding[:, None, None, :]
    elif case["mask"] == "window":
        masks, visible = {"window_size": (1, -1)}, visible.triu(-1)
    elif case["mask"] == "none":
        masks, visible = {"is_causal": False}, torch.ones(S, S, dtype=torch.bool)
    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    assert_same(module, lambda m, x: m(x, rotary, **masks), lambda m, x: unfused(m, x, visible), x)


def test_packed_sequences_start_at_position_zero():
    module = layer(qk_norm=True, rope_theta=10.0)
    lengths = (2, 4, 3)
    cu = torch.tensor([0, 2, 6, 9], dtype=torch.int32)

    def theirs(module, x):
        return torch.cat([unfused(module, part[None])[0] for part in x.split(lengths)])

    x = torch.randn(sum(lengths), E, dtype=torch.float64, requires_grad=True)
    assert_same(module, lambda m, x: m(x, cu_seqlens=cu, max_seqlen=4), theirs, x)
    # scores read differences of positions alone: a position that runs on would cost precision, not correctness
    assert positions_of(9, x.device, cu).tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert_same(module, lambda m, x: m(x[:2]), lambda m, x: unfused(m, x[None, :2])[0], x)


def test_rotary_tables():
    cos, sin = ckptkern.nn.rotary_tables(torch.tensor([[0, 3], [7, 100]]), 4, 50.0)
    assert cos.shape == sin.shape == (2, 2, 4)
    angles = torch.tensor([3.0, 3 * 50**-0.5, 3.0, 3 * 50**-0.5])
    torch.testing.assert_close(cos[0, 1], angles.cos())
    torch.testing.assert_close(sin[0, 1], angles.sin())
    assert (cos[0, 0] == 1).all()
    assert ckptkern.nn.rotary_tables(torch.arange(3), 4, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    pairs = ckptkern.nn.rotary_tables(torch.tensor([[0, 3], [7, 100]]), 4, 50.0, interleaved=True)
    assert torch.equal(pairs[0], cos[..., [0, 0, 1, 1]])
    assert torch.equal(pairs[1], sin[..., [0, 0, 1, 1]])
    with pytest.raises(ValueError, match="dim must be even, not 3"):
        ckptkern.nn.rotary_tables(torch.arange(3), 3)


def test_names_are_those_of_hugging_faces_llama():
    names = [name for name, _ in layer(attention_bias=False).named_parameters()]
    assert sorted(names) == sorted(
        ["input_layernorm.weight", "post_attention_layernorm.weight"]
        + [f"self_attn.{n}_proj.weight" for n in "qkvo"]
        + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    )
    more = {name for name, _ in layer(attention_bias=True, mlp_bias=True, qk_norm=True).named_parameters()} - set(names)
    assert more == {f"self_attn.{n}_proj.bias" for n in "qkvo"} | {f"self_attn.{n}_norm.weight" for n in "qk"} | {
        f"mlp.{n}_proj.bias" for n in ("gate", "up", "down")
    }
    module = ckptkern.nn.LlamaDecoderLayer(E, H)
    assert module.self_attn.k_proj.weight.shape == (E, E)
    assert module.mlp.up_proj.weight.shape == (4 * E, E)


@pytest.mark.parametrize(("recompute", "saved"), [("selective", E + H * HEAD + H), ("full", E)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes(dropout, recompute, saved):
    """x; x, o and the logsumexp; the rotary tables are the model's; 16 bytes for each of three draws."""
    module = layer(qk_norm=True, dropout=dropout, resid_dropout=dropout, recompute=recompute)
    rotary = ckptkern.nn.rotary_tables(torch.arange(S), HEAD)
    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    with saved_tensors(exclude=[*module.parameters(), *rotary]) as found:
        module(x, rotary)
    assert found.bytes == 8 * B * S * saved + (48 if dropout else 0), found.tensors


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_layers_save_no_tables(mode):
    """Four layers save four times what one saves, and as much as without rotation."""

    def saved(theta, count):
        model = torch.nn.Sequential(*(layer(recompute=mode, rope_theta=theta) for _ in range(count)))
        x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
        with saved_tensors(exclude=model.parameters()) as found:
            model(x)
        return found.bytes

    assert saved(100.0, 4) == 4 * saved(100.0, 1) == 4 * saved(None, 1)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_tables_of_one_row_cover_a_batch(name, composed):
    module = getattr(ckptkern.nn, name)(24, H)
    module = adapted(module) if composed else module
    tables, x = ckptkern.nn.rotary_tables(torch.arange(S), HEAD), torch.randn(B, S, 24)
    expected = module(x, tables)
    assert torch.equal(module(x, tuple(table[None] for table in tables)), expected)
    assert torch.equal(module(x, tuple(table.expand(B, S, HEAD) for table in tables)), expected)
    assert torch.equal(module(x), expected)


def test_dropout_is_one_mask():
    module = layer(dropout=0.3, resid_dropout=0.2)
    x = torch.randn(B, S, E, dtype=torch.float64)
    dropout_is_one_mask(module, lambda m, x: m(x), x)
    module.eval()
    torch.testing.assert_close(module(x), unfused(module, x), rtol=1e-5, atol=1e-6)


def test_attention_alone_is_the_layers():
    module = layer(qk_norm=True)
    x = torch.randn(B, S, E, dtype=torch.float64)
    mid = x + module.self_attn(module.input_layernorm(x))
    h = module.post_attention_layernorm(mid)
    torch.testing.assert_close(module(x), mid + module.mlp(h))


class Adapter(torch.nn.Module):
    """A layer with a weight and a bias, like nn.Linear, and more: LoRA."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.gain = layer, torch.nn.Parameter(torch.randn((), dtype=torch.float64))
        self.weight, self.bias, self.eps = layer.weight, getattr(layer, "bias", None), 0.0

    def forward(self, x):
        return self.layer(x) * self.gain


PARTS = (
    "input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "self_attn.q_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.k_norm", "mlp.gate_proj", "mlp.down_proj",
)  # fmt: skip


@pytest.mark.parametrize("how", ["adapter", "hook", "forward"])
@pytest.mark.parametrize("name", PARTS)
def test_what_stands_for_a_submodule_is_called(name, how):
    module = layer(qk_norm=True, rope_theta=100.0, recompute="full")
    part, (owner, _, last) = module.get_submodule(name), name.rpartition(".")
    whole = name in ("self_attn", "mlp")
    if how == "adapter" and not whole:
        setattr(module.get_submodule(owner), last, Adapter(part))
    elif how == "hook":
        part.register_forward_hook(lambda part, args, y: 2 * y)
    else:
        part.forward = lambda *args, own=part.forward, **kwargs: own(*args, **kwargs) * 2
    factor = {name: 2.0} if whole else {}

    def spelled_out(module, x):
        h = module.input_layernorm(x)
        attention, mlp = module.self_attn, module.mlp
        q, k, v = (getattr(attention, f"{one}_proj")(h).unflatten(-1, (-1, HEAD)) for one in "qkv")
        q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = (rotated(one, torch.arange(S), 100.0) for one in (q, k))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + factor.get("self_attn", 1.0) * attention.o_proj(o.transpose(1, 2).flatten(2))
        h = module.post_attention_layernorm(x)
        return x + factor.get("mlp", 1.0) * mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))

    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    assert_same(module, lambda m, x: m(x), spelled_out, x)


@pytest.mark.parametrize("eps", [(0.5, 0.5), (0.5, 0.01), (0.5, None), (None, None)], ids=str)
@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_the_eps_of_the_heads_norms_counts(name, eps):
    module = layer(qk_norm=True, rope_theta=100.0)
    module.self_attn.q_norm.eps, module.self_attn.k_norm.eps = eps

    def ours(module, x):
        if name == "LlamaDecoderLayer":
            return module(x)
        x = x + module.self_attn(module.input_layernorm(x))
        return x + module.mlp(module.post_attention_layernorm(x))

    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    assert_same(module, ours, unfused, x)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eps_none_is_torchs(dtype, autocast):
    """eps None is that of the dtype which torch computes in, at least float32. The squares here are as small as this eps."""
    module = layer(qk_norm=True, rope_theta=None)
    attention, small = module.self_attn, torch.finfo(torch.promote_types(dtype, torch.float32)).eps ** 0.5
    for norm in (module.input_layernorm, module.post_attention_layernorm, attention.q_norm, attention.k_norm):
        norm.eps = None
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.o_proj):
            projection.weight.mul_(small)
    x = (small * torch.randn(B, S, E, dtype=torch.float64)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine, reference = (
            run(module.to(dtype), call, {"x": x})["output 0"].double() for call in (lambda m, x: m(x), unfused)
        )
    assert (mine - reference).norm() < (1e-5 if dtype == torch.float64 else 0.03) * reference.norm()


class Own(torch.nn.Module):
    """A norm that has neither a weight nor an eps."""

    def forward(self, x):
        return x.tanh()


@pytest.mark.parametrize("which", ["weightless", "other", "one"])
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_other_norms_of_heads(name, which):
    module = layer(qk_norm=True, rope_theta=100.0)
    attention = module.self_attn
    if which == "weightless":
        attention.q_norm = attention.k_norm = torch.nn.RMSNorm(HEAD, 0.1, elementwise_affine=False)
    else:
        setattr(attention, name, Own() if which == "other" else None)

    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    assert_same(module, lambda m, x: m(x), unfused, x)


@pytest.mark.parametrize("kind", ["causal", "bool", "padding", "window", "packed"])
def test_masks_reach_a_composed_layer(kind):
    """An adapter that adds nothing changes nothing, whatever the masks."""
    module = layer()
    x, masks = torch.randn(B, S, E, dtype=torch.float64), {}
    if kind == "bool":
        masks = {"attn_mask": (torch.rand(B, H, S, S) < 0.5) | torch.eye(S, dtype=torch.bool), "is_causal": False}
    elif kind == "padding":
        masks = {
            "key_padding_mask": torch.arange(S).expand(B, S) > 2,
            "attn_mask": torch.randn(S, S, dtype=torch.float64, requires_grad=True),
        }
    elif kind == "window":
        masks = {"window_size": (1, -1)}
    elif kind == "packed":
        x, masks = x.flatten(0, 1), {"cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32), "max_seqlen": 6}
    trained = [t for t in masks.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    expected = module(x, **masks)
    grads = torch.autograd.grad(expected.square().sum(), trained) if trained else ()
    module.self_attn.q_proj = Adapter(module.self_attn.q_proj)
    module.self_attn.q_proj.gain.data.fill_(1.0)
    y = module(x, **masks)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    composed = torch.autograd.grad(y.square().sum(), trained) if trained else ()
    torch.testing.assert_close(composed, grads, rtol=1e-4, atol=1e-5)


def test_a_missing_bias_among_others():
    module = layer(attention_bias=True)
    module.self_attn.q_proj.bias = None
    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    assert_same(module, lambda m, x: m(x), unfused, x, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_is_as_exact_as_torch():
    module, x = layer(qk_norm=True), torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    exact = run(module, lambda m, x: unfused(m, x), {"x": x})
    module, x = module.float(), x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mine, eager = (run(module, call, {"x": x}) for call in (lambda m, x: m(x), lambda m, x: unfused(m, x)))
    assert_as_exact(mine, eager, exact)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    """With dynamic shapes, theta is a symbol too."""
    module, x = layer(qk_norm=True), torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: module(x), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_same(module, lambda m, x: compiled(x), lambda m, x: m(x), x, atol=1e-12)


def test_wrong_arguments_are_refused():
    for kwargs, message in (
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"recompute": "all"}, "recompute must be one of"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"dropout": 2.0}, "dropout probability"),
        ({"workspace": "lots"}, "workspace must be"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**kwargs)
    with pytest.raises(ValueError, match="num_heads=5 must divide hidden_size=12"):
        ckptkern.nn.LlamaDecoderLayer(12, 5)
    with pytest.raises(ValueError, match="rotary must be"):
        layer()(torch.randn(B, S, E).double(), ckptkern.nn.rotary_tables(torch.arange(S + 1), HEAD))


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
@pytest.mark.parametrize("wrong", [None, "4", 0, -4, 2.0, [4]], ids=repr)
def test_no_numbers_at_construction(name, wrong):
    build = getattr(ckptkern.nn, name)
    options = {"hidden_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1}
    if name == "LlamaDecoderLayer":
        options["intermediate_size"] = 0
    for option, least in options.items():
        if (option, wrong) == ("intermediate_size", 0) or (
            wrong is None and option not in ("hidden_size", "num_heads")
        ):
            continue
        with pytest.raises(ValueError) as raised:  # noqa: PT011  compared below
            build(**({"hidden_size": 16, "num_heads": 4} | {option: wrong}))
        op = name if option in ("hidden_size", "intermediate_size") else "LlamaAttention"
        assert str(raised.value) == f"{op}: {option} must be an integer of at least {least}, not {wrong!r}"


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_no_constants_at_construction(name):
    build, eps = getattr(ckptkern.nn, name), "norm_eps" if name == "LlamaAttention" else "rms_norm_eps"
    for option, wrong in ((eps, None), (eps, "1e-6"), ("rope_theta", "1e4"), ("rope_theta", [1e4])):
        with pytest.raises(TypeError) as raised:
            build(16, 4, **{option: wrong})
        op = "LlamaAttention" if option == "rope_theta" else name
        assert str(raised.value) == f"{op}: {option} must be a number, not {wrong!r}"
    for theta in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"LlamaAttention: rope_theta must be above 0 and finite, not {theta}"):
            build(16, 4, rope_theta=theta)


def adapted(module):
    (module.self_attn if hasattr(module, "self_attn") else module).q_proj.register_forward_hook(lambda *args: None)
    return module


@pytest.mark.parametrize("rotary", ["built", "none"])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_wrong_input(name, composed, rotary):
    module = getattr(ckptkern.nn, name)(E, H, rope_theta=None if rotary == "none" else 100.0)
    module = adapted(module) if composed else module
    for wrong in (None, "x", [1.0], 3):
        with pytest.raises(TypeError, match=f"{name}: input must be a Tensor, not {type(wrong).__name__}"):
            module(wrong)
    with pytest.raises(TypeError, match=f"{name}: input must be floating point, not torch.int64"):
        module(torch.ones(B, S, E, dtype=torch.int64))
    for shape in ((E,), (1, B, S, E)):
        with pytest.raises(ValueError, match=rf"{name}: input must be \[B, S, d\], .*, not {re.escape(str(shape))}"):
            module(torch.ones(shape))


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_wrong_cu_seqlens(name, composed):
    module = getattr(ckptkern.nn, name)(E, H)
    module, x = adapted(module) if composed else module, torch.randn(6, E)
    with pytest.raises(TypeError, match="cu_seqlens must be a Tensor, not list"):
        module(x, cu_seqlens=[0, 6])
    for cu in (torch.tensor([0, 6]), torch.tensor([[0, 6]], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)):
        with pytest.raises(
            ValueError, match=r"cu_seqlens must be int32 \[N \+ 1\] and come with an input \[tokens, d\]"
        ):
            module(x, cu_seqlens=cu)


def test_wrong_arguments_of_rotary_tables():
    for positions in (None, 3, [0, 1]):
        with pytest.raises(TypeError, match="rotary_tables: positions must be a Tensor, not"):
            ckptkern.nn.rotary_tables(positions, 4)
    for dim in (None, "4", 0, -2, 4.0):
        with pytest.raises(ValueError, match=f"rotary_tables: dim must be an integer of at least 1, not {dim!r}"):
            ckptkern.nn.rotary_tables(torch.arange(3), dim)
    for theta, error in ((None, TypeError), ("1e4", TypeError), (0, ValueError), (-1.0, ValueError)):
        with pytest.raises(error, match=f"rotary_tables: theta must be .*, not {theta!r}"):
            ckptkern.nn.rotary_tables(torch.arange(3), 4, theta)
