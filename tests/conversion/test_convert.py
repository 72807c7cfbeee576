"""convert on layers that know nothing of ckptkern: what it reads, what it leaves, and what it tells."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import zipfile

import pytest
import torch
from conversion.steps import assert_same_steps, calls_of, compiled, pair, saved, variant
from support import architectures
from support.architectures import (
    ARCHITECTURES,
    HEADS,
    WIDTH,
    Gated,
    Llama,
    RMSNorm,
    Stack,
    adapted,
    fused_of,
    ids,
    with_mask,
    with_part_of_tables,
    with_tables,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.binding import Unread
from ckptkern.conversion.report import WARNED
from ckptkern.eager import ACTIVATIONS

LAYER = ["transformer_layer"]
X = ids().numel() * WIDTH * 4  # bytes of a layer's input


def tokens(B=2):
    return torch.randn(B, 6, WIDTH, generator=torch.Generator().manual_seed(B))


@functools.cache
def _llama():
    torch.manual_seed(0)
    return pair(ARCHITECTURES["llama"].model().train(), ids())[:2]


def llama():
    """Returns copies of (the converted model, the model as it was)."""
    return copy.deepcopy(_llama())


# -- what is read


GATES = {
    f"{name}{i}": gate
    for name, entry in ACTIVATIONS.items()
    for i, gate in enumerate([*filter(inspect.isroutine, entry.torchs), entry.act])
    if name != "identity"
}
GATES |= {
    "gelu, scaled by 1": lambda z: F.gelu(z) * 1.0,
    "silu in place": lambda z: -z.neg_() * torch.sigmoid(-z),
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh(0.7978845608 * (z + 0.044715 * z**3))),
}


class Ungated(Gated):
    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)))


@pytest.mark.parametrize("gate", GATES)
def test_activations_that_a_forward_calls_or_writes_out(gate):
    """Each of torch's functions, and what each activation is written out, in a forward and not in a module of it."""
    model = nn.Sequential(Gated(GATES[gate]), Ungated(GATES[gate]))
    assert fused_of(ckptkern.convert(model, tokens())) == ["mlp_block"] * 2


@pytest.mark.parametrize(
    "gate",
    [F.elu, torch.clone, lambda z: z * F.dropout(torch.sigmoid(z), 0.0), lambda z: z * torch.sigmoid(z).detach()],
)
def test_other_gates_are_not_fused(gate):
    """A dropout inside may be switched on later."""
    (row,) = ckptkern.convert(nn.Sequential(Gated(gate)), tokens())
    assert row.replaced_by in (None, "checkpoint")
    assert row.reason.startswith("not a gated product")


def test_probabilities_are_there_for_who_reads_them():
    x = tokens()
    ours, theirs, conversion = pair(ARCHITECTURES["weighted"].layer(), x)
    assert fused_of(conversion) == LAYER
    results = []
    for layer in (ours, theirs):
        _, weights = layer(x)
        grads = torch.autograd.grad((weights * weights.detach().cos()).sum(), layer.qkv.weight)
        results.append((weights + 0, torch.stack([weights, weights]), *grads))
    torch.testing.assert_close(*results)
    unread = ours(x)[1]
    assert isinstance(unread, Unread)
    assert (unread.dtype, unread.original.cache_info().currsize) == (torch.float32, 0)
    assert ours(x)[1].shape == (2, HEADS, 6, 6)
    nn.init.ones_(ours.fc2.bias)
    with pytest.raises(
        RuntimeError, match="a parameter or an argument of their layer has changed since the call; read them"
    ):
        unread.sum()


def test_parallel_branches_have_dropouts_of_their_own():
    layer, x = ARCHITECTURES["parallel"].layer(), tokens()
    layer.fc2, layer.proj = (nn.Sequential(linear, nn.Dropout(0.25)) for linear in (layer.fc2, layer.proj))
    assert fused_of(ckptkern.convert(layer, x, **with_part_of_tables(x))) == LAYER


@pytest.mark.slow
def test_dropout_is_where_it_was():
    """The mean over many masks is the result without dropout only if every p, and its place, is right: the variances tell."""
    layer, x = ARCHITECTURES["gpt"].layer().train(), tokens(4)
    layer.resid_dropout.p, layer.p = 0.3, 0.2

    def moments(seed):
        torch.manual_seed(seed)
        sampled = torch.stack([layer(x)[0] for _ in range(300)]).detach()
        return sampled.mean(0), sampled.var(0)

    theirs, others = moments(1), moments(2)
    assert fused_of(ckptkern.convert(layer, x)) == LAYER
    for mine, expected, other in zip(moments(3), theirs, others, strict=True):
        noise, error = ((a - expected).square().mean().sqrt() for a in (other, mine))
        assert error < 1.25 * noise, f"off by {error:.2e}, where another seed is by {noise:.2e}"
    layer.resid_dropout.p = 1.0  # is read in each call
    torch.testing.assert_close(layer(x)[0], x)
    assert calls_of(layer)["checkpointed"] == 0
    layer.eval()
    torch.testing.assert_close(layer(x)[0], type(layer).forward(layer, x)[0])


def test_drop_path_is_sampled_for_each_sample():
    layer, x = ARCHITECTURES["vision"].layer().train(), tokens(1).expand(64, 6, WIDTH)
    for path in (layer.drop_path1, layer.drop_path2):
        path.drop_prob = 0.5
    assert fused_of(ckptkern.convert(layer, x)) == LAYER

    def kinds():
        return len(layer(x).detach().flatten(1).round(decimals=4).unique(dim=0))

    assert kinds() == 4, "each branch is dropped or not, of whole samples"
    layer.eval()
    assert kinds() == 1


def test_a_mask_that_appears_later_is_applied():
    ours, theirs = llama()
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    seen[0, ..., 0] = False
    seen[0, :, 0, 0] = True
    for mask in (seen, torch.zeros(2, 1, 6, 6).masked_fill(~seen, -1e4), with_mask(tokens())["attention_mask"]):
        assert_same_steps(ours, theirs, ids(), attention_mask=mask)
    after, before = (saved(m, ids(), attention_mask=seen) for m in (ours, theirs))
    assert after < before / 2, "a bool mask was checked beforehand"


class Biased(nn.Module):
    """Attention with a trained bias of each head beside a mask of all heads, which is expanded."""

    def __init__(self, of_heads: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn((1, HEADS, 6, 6)[4 - of_heads :]))

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias + mask.expand(-1, HEADS, -1, -1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("of_heads", [4, 3])
def test_a_mask_of_all_heads_may_be_expanded_beside_a_trained_bias(of_heads):
    conversion = ckptkern.convert(Biased(of_heads), tokens(), torch.randn(2, 1, 6, 6))
    assert fused_of(conversion) == ["attention_block"], str(conversion)


def test_a_mask_by_position_may_be_another_kind_later():
    """A forward with *args takes no argument by its name that stands before them."""
    kind = variant(
        Llama, forward=lambda self, x, tables, attention_mask, *others: Llama.forward(self, x, tables, attention_mask)
    )
    x = tokens()
    tables, added = with_tables(x)["tables"], with_mask(x)["attention_mask"]
    ours, theirs, conversion = pair(kind(), x, tables, added)
    assert fused_of(conversion) == LAYER
    for mask in (added, added == 0, None):
        assert_same_steps(ours, theirs, x, tables, mask)
    assert conversion.calls == {"fused": 3, "checkpointed": 0, "original": 0}


# -- everything else stays as it is


def test_the_probe_moves_nothing():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), Llama()).train()
    model[2].mlp.eval()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    random = torch.get_rng_state()
    ckptkern.convert(model, tokens())
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_hooks_and_signatures_stay():
    model, seen = llama()[1], []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert fused_of(ckptkern.convert(model, ids())) == LAYER * 2
    seen.clear()
    model(ids())
    assert seen == [1]
    assert inspect.signature(model.layers[1].forward) == inspect.signature(Llama().forward)


def test_nothing_of_the_example_stays_in_memory():
    model, file = llama()[1], io.BytesIO()
    assert len(ckptkern.convert(model, torch.randint(0, 20, (16, 64))).converted) == 2
    torch.save(model, file)
    with zipfile.ZipFile(file) as archive:
        tensors = sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    assert tensors == sum(p.nbytes for p in model.parameters())


def test_a_reentrant_checkpoint_samples_the_same_masks_twice():
    layer, outputs = ARCHITECTURES["gpt"].layer().train(), []
    layer.resid_dropout.p = 0.4
    assert fused_of(ckptkern.convert(layer, tokens())) == LAYER
    layer.register_forward_hook(lambda module, args, y: outputs.append(y[0].detach()))
    torch.utils.checkpoint.checkpoint(layer, tokens().requires_grad_(), use_reentrant=True)[0].sum().backward()
    assert torch.equal(*outputs)


# -- what changes inside, later or before


def quantized(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Scaled), False)


class Scaled(Tensor):
    """A weight with operations of its own, as a quantized one has."""

    def __deepcopy__(self, memo):
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def unfused(value):
            return value.as_subclass(Tensor) if isinstance(value, Scaled) else value

        if function is F.linear:
            return F.linear(args[0], unfused(args[1]) * 2, *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


def with_another_forward(module):
    kind = type(module)
    module.__class__ = variant(kind, forward=lambda self, x: 2 * kind.forward(self, x))


OF_LINEAR = {
    "a hook": lambda linear: linear.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook before": lambda linear: linear.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a backward hook": lambda linear: linear.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],)),
    "a parametrized weight": nn.utils.parametrizations.weight_norm,
    "a quantized weight": quantized,
    "another class": with_another_forward,
    "another weight": lambda linear: setattr(linear, "weight", nn.Parameter(torch.randn_like(linear.weight))),
}
LATER = {name: lambda layer, change=change: change(layer.mlp.up_proj) for name, change in OF_LINEAR.items()} | {
    "adapters": adapted,
    "an attribute": lambda layer: setattr(layer.self_attn, "scaling", 0.1),
    "an epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
    "another norm": lambda layer: setattr(layer, "input_layernorm", nn.LayerNorm(WIDTH)),
    "another norm of its class": lambda layer: setattr(layer, "input_layernorm", RMSNorm(WIDTH, 0.5)),
    "a forward of its own": lambda layer: setattr(layer.mlp, "forward", lambda x: 2 * x),
    "a mode of its own": lambda layer: layer.self_attn.eval(),
}


@pytest.mark.parametrize("is_called", [True, False], ids=["called before", "a new copy"])
@pytest.mark.parametrize("change", LATER)
def test_a_later_change_counts_and_memory_stays_low(change, is_called):
    ours, theirs = llama()
    if is_called:  # the guard looks up then what it compares
        ours(ids())
    for model in (ours, theirs):
        torch.manual_seed(1)
        for layer in model.layers:
            LATER[change](layer)
    assert_same_steps(ours, theirs, ids())
    assert calls_of(ours)["checkpointed"] == (0 if change == "another weight" else 2)
    assert saved(ours, ids()) < 6 * X < saved(theirs, ids()), "the layers save their input"


class Tied(nn.Module):
    """Gate and up have one weight, which is a parameter of the layer's own."""

    def __init__(self):
        super().__init__()
        self.norm, self.down = RMSNorm(WIDTH), nn.Linear(48, WIDTH)
        self.gate = self.up = nn.Parameter(torch.randn(48, WIDTH) * 0.1)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up))


def test_a_weight_in_two_places_that_is_one_no_more():
    ours, theirs, conversion = pair(Tied(), tokens())
    assert fused_of(conversion) == ["mlp_block"]
    for m in (ours, theirs):
        torch.manual_seed(1)
        m.up = nn.Parameter(torch.randn(48, WIDTH))
    assert_same_steps(ours, theirs, tokens())


BEFORE = {
    "a quantized weight": "is a Scaled",
    "a parametrized weight": "a weight is parametrized",
    "a hook": "there are hooks inside",
}


@pytest.mark.parametrize("change", BEFORE)
def test_what_cannot_be_fused_runs_as_an_activation_checkpoint(change):
    model = llama()[1]
    for layer in model.layers:
        LATER[change](layer)
    ours, theirs, conversion = pair(model, ids())
    layers = [row for row in conversion.converted if row.replaced_by != "tiled"]  # modules inside may be
    assert [row.replaced_by for row in layers] == ["checkpoint"] * 2
    assert all(BEFORE[change] in row.reason for row in layers), str(conversion)
    assert_same_steps(ours, theirs, ids())
    assert saved(ours, ids()) < 6 * X < saved(theirs, ids())


# -- what is told and asked


def test_include_and_exclude():
    model = llama()[1]
    assert fused_of(ckptkern.convert(model, ids(), include="layers.1")) == LAYER
    assert "forward" not in vars(model.layers[0]), "only what the last call converted is"
    assert fused_of(ckptkern.convert(model, ids(), include="*.mlp")) == ["mlp_block"] * 2
    assert fused_of(ckptkern.convert(model, ids(), exclude=[Llama])) == []
    inside = ckptkern.convert(model, ids(), exclude=lambda name, m: name.endswith("self_attn"))
    assert fused_of(inside) == LAYER * 2


def test_the_table():
    conversion = ckptkern.convert(llama()[1], ids())
    text = str(conversion)
    assert "layers.* (2)" in text
    assert "transformer_layer" in text
    *_, saves, calls = text.splitlines()
    assert saves.startswith("2 modules converted; the whole model saves ")
    assert calls == "calls since then: 0 fused, 0 checkpointed, 0 original"
    assert [row.name for row in conversion] == ["layers.0", "layers.1", "head"]
    assert "head: the example's call has no F.cross_entropy of its logits" in text


class Towers(nn.Module):
    """A text tower, an image tower that shares its embedding, a head that is tied by a function, a layer whose weight a
    function takes, and one that no call runs."""

    def __init__(self):
        super().__init__()
        self.embed, self.text = nn.Embedding(20, WIDTH), nn.ModuleList(Llama() for _ in range(2))
        self.vision = nn.ModuleDict({"embed": self.embed, "layers": nn.ModuleList(Llama() for _ in range(2))})
        self.tied, self.other, self.norm = nn.Linear(WIDTH, 20, bias=False), nn.Linear(WIDTH, 3), nn.LayerNorm(WIDTH)
        self.vision["table"], self.tied.weight = nn.Embedding(20, WIDTH), self.embed.weight
        self.vision["table"].weight = self.embed.weight
        self.taken = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, ids, with_image=False):
        x = self.embed(ids)
        for layer in (*self.text, *(self.vision["layers"] if with_image else ())):
            x = layer(x, **with_tables(x))
        return F.linear(x, self.tied.weight), F.linear(x, self.taken.weight)


NOT_RUN = {
    "an example of text": ({}, {"vision.layers", "other"}),
    "an example of both": ({"with_image": True}, {"other"}),
    "exclude": ({"exclude": "vision*"}, {"other"}),
    "include what ran": ({"include": "text*"}, set()),
    "include a part": ({"include": "vision.layers.1"}, {"vision.layers.1"}),
    "under autocast": ({}, {"vision.layers", "other"}),
}


@pytest.mark.parametrize("case", NOT_RUN)
def test_what_the_example_does_not_run_has_a_row(case):
    options, names = NOT_RUN[case]
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "under autocast"):
        conversion = ckptkern.convert(Towers(), ids(), every=2, **options)
    rows = {row.name: row for row in conversion.left if "did not run it" in row.reason}
    assert rows.keys() == names, str(conversion)
    text = f"{'/'.join(names)}: the example's call did not run it. Give convert a call that does"
    assert len(names) != 1 or text in str(conversion)


def test_errors():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not function"):
        ckptkern.convert(lambda x: x, ids())
    with pytest.raises(IndexError):  # the model's own
        ckptkern.convert(llama()[1], ids() + 100)


# -- without example inputs


def test_torchs_own_layers_become_drop_ins():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True), 2)
    ours, theirs, conversion = pair(model, workspace="1MiB")
    assert fused_of(conversion) == ["ckptkern.nn.TransformerEncoderLayer"] * 2
    assert "workspace='1MiB'" in ours.layers[0].extra_repr()
    for run in (ours, compiled(ours)):
        assert_same_steps(run, theirs, tokens())
    x = tokens().requires_grad_()
    before, after = saved(theirs, x), saved(ours, x)
    assert after < before / 3
    ckptkern.revert(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    measured = ckptkern.convert(ours, x.detach())
    assert ours.layers[0].workspace is None
    assert (measured.saved_before, measured.saved_after) == (before, after)


SEQUENCES = {
    "mlp": (lambda: [nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8)], ["mlp_block"]),
    "stack": (lambda: [m for _ in range(3) for m in (nn.Linear(8, 8), nn.ReLU())], ["linear_stack"]),
    "one": (lambda: [nn.Linear(8, 32), nn.SiLU()], ["linear_act"]),
    "runs": (
        lambda: [
            nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)
        ], ["mlp_block"] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_linear_layers(name):
    layers, replaced_by = SEQUENCES[name]
    ours, theirs, conversion = pair(nn.ModuleDict({"body": nn.Sequential(*layers())}))
    assert fused_of(conversion) == replaced_by, str(conversion)
    ours, theirs = ours["body"], theirs["body"]
    for x in (torch.randn(20, 8), torch.randn(5, 4, 8)):
        x.requires_grad_()
        assert_same_steps(ours, theirs, x)
        assert saved(ours, x) < saved(theirs, x)
    if name == "runs":
        ours[0] = nn.Linear(8, 32)
        assert saved(ours, x) == saved(theirs, x), "another layer in a run's place: the sequence runs as it is"
    assert saved(ckptkern.revert(ours), x) == saved(theirs, x)


# -- caches


class Cache:
    """As transformers hands it from layer to layer."""

    def __init__(self):
        self.keys = []

    def get_seq_length(self):
        return len(self.keys)


def caching(kind):
    def forward(self, x, tables=None, attention_mask=None, cache=None):
        if cache is not None:
            cache.keys.append(x)
        return kind.forward(self, x, tables, attention_mask)

    return variant(kind, forward=forward)


def test_what_a_layer_appends_beside_a_cache_is_there():
    def forward(self, x, tables=None, attention_mask=None, cache=None, collected=None):
        if collected is not None:
            collected.append(len(x))
        return architectures.Scaled.forward(self, x, tables, attention_mask)

    model = Stack(variant(architectures.Scaled, forward=forward), lambda x: with_tables(x) | {"cache": Cache()})
    ckptkern.convert(model, ids(), recompute="full")
    x, collected = tokens().requires_grad_(), []
    model.layers[0](x, **with_tables(x), cache=Cache(), collected=collected)
    assert collected == [2]


@pytest.mark.parametrize(("kind", "replaced_by"), [(Llama, "transformer_layer"), (architectures.Scaled, "checkpoint")])
def test_a_cache_is_filled_in_evaluation_and_not_in_training(kind, replaced_by):
    model = Stack(caching(kind), lambda x: with_tables(x) | {"cache": Cache()})
    ours, theirs, conversion = pair(model, ids(), recompute="full")
    assert [row.replaced_by for row in conversion if row.name.count(".") == 1] == [replaced_by] * 2
    layer, x = ours.layers[0], tokens().requires_grad_()

    def filled(cache):
        layer(x, **with_tables(x), cache=cache).sum().backward()
        return len(cache.keys)

    WARNED.clear()
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert filled(Cache()) == 0
    layer.eval()
    assert filled(evaluated := Cache()) == 1
    layer.train()
    assert filled(evaluated) == 2, "one with something in it goes to the original"
    with torch.no_grad():
        layer(x, **with_tables(x), cache=(generated := Cache()))
    assert len(generated.keys) == 1, "a model in training mode may generate"
    assert_same_steps(ours, theirs, ids())
