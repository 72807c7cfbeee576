"""convert on layers that know nothing of ckptkern: the same results, less memory, and nothing else changed."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable

import pytest
import torch
from support import architectures
from support.architectures import (
    ARCHITECTURES,
    HEADS,
    WIDTH,
    Buffers,
    Gated,
    Llama,
    Stack,
    adapted,
    fused_of,
    ids,
    over_inputs,
    results,
    saved,
    with_mask,
    with_part_of_tables,
    with_tables,
)
from support.cases import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import binding
from ckptkern.conversion.unread import Unread
from ckptkern.eager import ACTIVATIONS
from ckptkern.memory import saved_tensors

by_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


# -- what is converted computes what it did


@pytest.mark.sampled
@by_architecture
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loss_and_gradients_are_those_of_the_original(name: str, autocast: torch.dtype | None) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.model().train()
    theirs, before = over_inputs(model, autocast), saved(model)
    reference = over_inputs(copy.deepcopy(model).double())
    conversion = ckptkern.convert(model, ids())
    assert fused_of(conversion) == [*architecture.replaced_by] * 2
    ours = over_inputs(model, autocast)
    norms = {key: value.norm() for key, value in reference.items()}
    zeros = [key for key, norm in norms.items() if norm < 1e-12 * max(norms.values())]  # of a key's bias without rotary
    assert all(ours[key].norm() < 1e-2 * max(norms.values()) for key in zeros)
    assert_as_exact(*({key: t for key, t in one.items() if key not in zeros} for one in (ours, theirs, reference)))
    after = saved(model)
    gain = conversion.saved_before - conversion.saved_after
    assert 0 < after < before, str(conversion)
    assert before - after == pytest.approx(gain, rel=0.05), "the report says what is saved"
    assert all(row.error < 2e-5 for row in conversion.converted)


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


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gated", [True, False])
def test_activations_that_a_forward_calls_or_writes_out(gate: str, gated: bool) -> None:
    """Each of torch's functions, and what each activation is written out, in a forward and not in a module of it."""
    mlp = Gated(GATES[gate])
    if not gated:
        with_forward(mlp, lambda mlp, x: mlp.down_proj(mlp.activation(mlp.gate_proj(x))))
    (row,) = ckptkern.convert(nn.Sequential(mlp), torch.randn(2, 6, WIDTH)).converted
    assert row.replaced_by == "mlp_block"


@pytest.mark.parametrize(
    "gate",
    [F.elu, torch.clone, lambda z: z * F.dropout(torch.sigmoid(z), 0.0), lambda z: z * torch.sigmoid(z).detach()],
)
def test_other_gates_are_left(gate: Callable[[Tensor], Tensor]) -> None:
    """A dropout inside may be switched on later."""
    (row,) = ckptkern.convert(nn.Sequential(Gated(gate)), torch.randn(2, 6, WIDTH)).left
    assert row.reason.startswith("not a gated product")


def test_probabilities_are_there_for_who_reads_them() -> None:
    ours, x = ARCHITECTURES["weighted"].layer(), torch.randn(2, 6, WIDTH)
    theirs = copy.deepcopy(ours)
    (row,) = ckptkern.convert(ours, x).converted
    assert row.replaced_by == "transformer_layer"
    found = []
    for layer in (ours, theirs):
        _, weights = layer(x)
        grads = torch.autograd.grad((weights * weights.detach().cos()).sum(), layer.qkv.weight)
        found.append((weights + 0, weights.sum(-1), torch.stack([weights, weights]), *grads))
    unread = ours(x)[1]
    assert isinstance(unread, Unread)
    assert (unread.requires_grad, unread.dtype, unread.original.made) == (False, torch.float32, [])
    assert ours(x)[1].shape == (2, HEADS, 6, 6)
    torch.testing.assert_close(*found)
    with torch.no_grad():
        ours.fc2.bias.add_(1)
    with pytest.raises(
        RuntimeError, match="a parameter or an argument of their layer has changed since the call; read them"
    ):
        unread.sum()


def test_parallel_branches_have_dropouts_of_their_own() -> None:
    layer = ARCHITECTURES["parallel"].layer()
    layer.down, layer.dense = (nn.Sequential(one, nn.Dropout(0.25)) for one in (layer.down, layer.dense))
    x = torch.randn(2, 6, WIDTH)
    (row,) = ckptkern.convert(layer, x, **with_part_of_tables(x)).converted
    assert row.replaced_by == "transformer_layer"


def test_scores_are_no_probabilities() -> None:
    """A layer that hands on something else than probabilities is not replaced."""
    layer = architectures.Weighted(scores=True)
    conversion = ckptkern.convert(layer, torch.randn(2, 6, WIDTH))
    assert not conversion.converted
    assert isinstance(layer(torch.randn(2, 6, WIDTH))[1], torch.Tensor)


@by_architecture
def test_revert_gives_back_the_original(name: str) -> None:
    model = ARCHITECTURES[name].model()
    theirs = results(model)
    attributes = [set(vars(m)) for m in model.modules()]
    ckptkern.convert(model, ids())
    assert ckptkern.revert(model) is model
    assert [set(vars(m)) for m in model.modules()] == attributes
    ours = results(model)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_modes_save_less_and_less(recompute: str) -> None:
    model = ARCHITECTURES["llama"].model()
    theirs = results(model)
    ckptkern.convert(model, ids(), recompute=recompute)
    torch.testing.assert_close(results(model), theirs)
    x = ids().numel() * WIDTH * 4
    layers = {"full": x, "selective": 2 * x + ids().numel() * HEADS * 4, "none": 10**9}[recompute]
    tables, after = 2 * 6 * 8 * 4, saved(model)  # cos and sin [1, 6, 8], shared
    assert after <= 2 * layers + tables + 2 * x, (after, layers)  # the head saves its input, and ids are saved


def test_twenty_steps_have_the_same_losses() -> None:
    ours, theirs = ARCHITECTURES["llama"].model(), ARCHITECTURES["llama"].model()
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (ours, theirs)]  # before the conversion
    assert len(ckptkern.convert(ours, ids()).converted) == 2
    for _ in range(20):
        losses = [results(model)["loss"] for model in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[0] < 0.9 * F.cross_entropy(torch.zeros(1, 20), torch.zeros(1, dtype=torch.long))


def test_dropout_is_where_it_was() -> None:
    """The mean over many masks is the result without dropout only if every p, and its place, is right: the variances tell."""
    model = ARCHITECTURES["gpt"].model().train()
    layer = model.layers[0]
    layer.resid_dropout.p, layer.p = 0.3, 0.2
    x = torch.randn(4, 6, WIDTH)

    def moments(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        drawn = torch.stack([layer(x)[0] for _ in range(400)]).detach()
        return drawn.mean(0), drawn.var(0)

    theirs, others = moments(1), moments(2)
    assert fused_of(ckptkern.convert(layer, x)) == ["transformer_layer"]
    ours = moments(3)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    for mine, one, other in zip(ours, theirs, others, strict=True):
        noise = (one - other).square().mean().sqrt()
        assert (mine - one).square().mean().sqrt() < 1.25 * noise
    layer.eval()
    torch.testing.assert_close(layer(x)[0], layer(x)[0])


def test_drop_path_is_drawn_for_each_sample() -> None:
    layer = ARCHITECTURES["vision"].layer().train()
    x = torch.randn(1, 6, WIDTH).expand(64, 6, WIDTH)
    for path in (layer.drop_path1, layer.drop_path2):
        path.drop_prob = 0.5
    assert fused_of(ckptkern.convert(layer, x)) == ["transformer_layer"]
    layer.drop_path2.eval()  # a mode of its own: the class's forward runs
    layer.drop_path2.train()
    y = layer(x)
    kinds = y.detach().flatten(1).round(decimals=4).unique(dim=0)
    assert len(kinds) == 4, "each branch is dropped or not, of whole samples"
    layer.eval()
    assert len(layer(x).detach().flatten(1).round(decimals=4).unique(dim=0)) == 1


def test_a_probability_may_change_after_conversion() -> None:
    layer = ARCHITECTURES["gpt"].layer().train()
    x = torch.randn(2, 6, WIDTH)
    assert fused_of(ckptkern.convert(layer, x)) == ["transformer_layer"]
    torch.testing.assert_close(layer(x)[0], layer(x)[0])
    layer.resid_dropout.p = 0.5
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert saved(Stacked(layer)) < 3 * x.numel() * 4, "it is still fused"


class Stacked(nn.Module):
    """One layer, called as a Stack is."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, ids: Tensor, **kwargs) -> Tensor:
        y = self.layer(torch.randn(2, 6, WIDTH, requires_grad=True), **kwargs)
        return y[0] if isinstance(y, tuple) else y


# -- what must not be taken for something else


def changed(change: Callable[[Llama], None]) -> Llama:
    layer = Llama()
    change(layer)
    return layer


def with_forward(module: nn.Module, forward: Callable) -> None:
    """As if its class had this forward."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def host_read(mlp: nn.Module, x: Tensor) -> Tensor:
    y = Llama().mlp.__class__.forward(mlp, x)
    return y if y.abs().max() < 3 else y / 2


def counting(mlp: nn.Module, x: Tensor) -> Tensor:
    mlp.calls = getattr(mlp, "calls", 0) + 1
    return Llama().mlp.__class__.forward(mlp, x) / mlp.calls


def second_output(layer: Llama, x: Tensor, tables=None, attention_mask=None):
    y = Llama.forward(layer, x, tables, attention_mask)
    return y, y.mean()


def noisy(mlp: nn.Module, x: Tensor) -> Tensor:
    y = Llama().mlp.__class__.forward(mlp, x)
    return y + torch.randn_like(y) if mlp.training else y


def dropped_before(mlp: nn.Module, x: Tensor) -> Tensor:
    return Llama().mlp.__class__.forward(mlp, F.dropout(x, 0.1, mlp.training))


def scaled(attention: nn.Module, x: Tensor, tables=None, attention_mask=None):
    return Llama().self_attn.__class__.forward(attention, 1.01 * x, tables, attention_mask)


def normed_residual(layer: Llama, x: Tensor, tables=None, attention_mask=None) -> Tensor:
    x = layer.input_layernorm(x)
    return Llama.forward(layer, x, tables, attention_mask)


NEAR_MISSES = {
    "host read": lambda layer: with_forward(layer.mlp, host_read),
    "changes its attributes": lambda layer: with_forward(layer.mlp, counting),
    "second output": lambda layer: with_forward(layer, second_output),
    "noise in training": lambda layer: with_forward(layer.mlp, noisy),
    "dropout before a branch": lambda layer: with_forward(layer.mlp, dropped_before),
    "a scaled input": lambda layer: with_forward(layer.self_attn, scaled),
    "a normed residual": lambda layer: with_forward(layer, normed_residual),
    "BatchNorm": lambda layer: layer.mlp.add_module("activation", nn.Sequential(nn.BatchNorm1d(6), nn.SiLU())),
    "another activation": lambda layer: layer.mlp.add_module("activation", nn.ELU()),
}


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_what_is_not_a_layer_of_ours_is_left(why: str) -> None:
    """The layer as a whole may not be replaced; its sound parts may."""
    model = Stack(lambda: changed(NEAR_MISSES[why]), with_tables).eval()
    reference, theirs = copy.deepcopy(model), copy.deepcopy(model)
    conversion = ckptkern.convert(model, ids())
    whole = [row for row in conversion.converted if row.replaced_by == "transformer_layer"]
    assert not whole
    assert all(row.reason for row in conversion.left)
    assert conversion.left, "the table says what was left"
    if why == "second output":
        return  # a Stack goes on with y alone
    want = results(theirs)
    for key, value in results(model).items():
        torch.testing.assert_close(value, want[key])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(theirs.named_buffers())[name]), f"the probe moved {name}"
    del reference


def test_a_window_that_the_example_does_not_reach_is_seen() -> None:
    layer = Buffers(window=8)
    conversion = ckptkern.convert(layer, torch.randn(2, 6, WIDTH))
    assert fused_of(conversion) == ["mlp_block"], "over 6 tokens it is causal, over 16 it is not"
    layer, x = Buffers(), torch.randn(2, 16, WIDTH)
    theirs = layer(x)
    assert fused_of(ckptkern.convert(layer, x[:, :6])) == ["transformer_layer"]
    torch.testing.assert_close(layer(x), theirs)


def test_a_mask_that_appears_later_is_applied() -> None:
    model = ARCHITECTURES["llama"].model()
    other = copy.deepcopy(model)
    ckptkern.convert(model, ids())
    x = torch.zeros(2, 6, 1)
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    seen[0, ..., 0] = False
    seen[0, :, 0, 0] = True
    for mask in (seen, torch.zeros(2, 1, 6, 6).masked_fill(~seen, -1e4), with_mask(x)["attention_mask"]):
        theirs, ours = results(other, attention_mask=mask), results(model, attention_mask=mask)
        torch.testing.assert_close(ours, theirs)
    assert saved(model, attention_mask=seen) < saved(other, attention_mask=seen) / 2, (
        "a bool mask was checked beforehand"
    )


def test_the_probe_moves_nothing() -> None:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.dropout = Llama(), nn.Dropout(0.5)
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(self.dropout(self.norm(x)))

    model = Counting().train()
    model.inner.mlp.eval()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    random = torch.get_rng_state()
    ckptkern.convert(model, torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(p.grad is None for p in model.parameters())


# -- everything else stays as it is


def test_parameters_names_hooks_and_ties_stay() -> None:
    model = ARCHITECTURES["llama"].model()
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    parameters, names = dict(model.named_parameters()), [name for name, _ in model.named_modules()]
    state = list(model.state_dict())
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state
    assert model.head.weight is model.embed.weight
    seen.clear()
    model(ids())
    assert seen == [1]
    assert inspect.signature(model.layers[1].forward) == inspect.signature(Llama().forward)


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_is_converted_and_on_its_own(copied: Callable) -> None:
    model = ARCHITECTURES["llama"].model()
    ckptkern.convert(model, ids())
    model(ids())
    other = copied(model)
    theirs = results(model)
    for p in model.parameters():
        p.data.zero_()
    ours = results(other)
    for key in theirs:
        assert torch.equal(ours[key], theirs[key])
    assert saved(other) == saved(model)
    ckptkern.revert(other)
    assert "forward" in vars(model.layers[0])
    other.layers[0].self_attn.scaling = 0.0  # is seen by the copy alone
    assert saved(other) > saved(model)


def test_it_compiles_without_a_break() -> None:
    model = ARCHITECTURES["llama"].model()
    theirs = results(model)
    ckptkern.convert(model, ids())
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    ours = results(compiled)
    for key in theirs:
        torch.testing.assert_close(
            ours[key.removeprefix("_orig_mod.")] if key in ours else ours[f"_orig_mod.{key}"], theirs[key]
        )


# -- what happens to it later


LATER = {
    "adapters": adapted,
    "a hook inside": lambda layer: layer.mlp.register_forward_hook(lambda module, args, y: 2 * y),
    "an attribute": lambda layer: setattr(layer.self_attn, "scaling", 0.1),
    "another norm": lambda layer: setattr(layer, "input_layernorm", nn.LayerNorm(WIDTH)),
    "a parametrized weight": lambda layer: nn.utils.parametrizations.weight_norm(layer.mlp.down_proj),
    "a forward of its own": lambda layer: setattr(layer.mlp, "forward", lambda x: 2 * x),
    "a mode of its own": lambda layer: layer.self_attn.eval(),
}


@pytest.mark.parametrize("what", LATER)
def test_a_later_change_counts_and_memory_stays_low(what: str) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"].model().train()
    converted = copy.deepcopy(model)
    ckptkern.convert(converted, ids())
    converted(ids())
    for one in (model, converted):
        torch.manual_seed(1)
        for layer in one.layers:
            LATER[what](layer)
    theirs, ours = results(model), results(converted)
    torch.testing.assert_close(ours, theirs)
    inputs = ids().numel() * WIDTH * 4
    assert saved(converted) < 6 * inputs < saved(model), "the layers save their input"


def test_a_reentrant_checkpoint_draws_the_same_masks_twice() -> None:
    layer, outputs = ARCHITECTURES["gpt"].layer().train(), []
    layer.resid_dropout.p = 0.4
    assert fused_of(ckptkern.convert(layer, torch.randn(2, 6, WIDTH))) == ["transformer_layer"]
    layer.register_forward_hook(lambda module, args, y: outputs.append(y[0].detach()))
    x = torch.randn(2, 6, WIDTH, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)[0].sum().backward()
    first, again = outputs
    assert torch.equal(first, again)


def test_without_gradients_the_original_runs() -> None:
    model = ARCHITECTURES["llama"].model().eval()
    with torch.no_grad():
        theirs = model(ids())
        ckptkern.convert(model, ids())
        assert torch.equal(model(ids()), theirs)


# -- the front


def test_nothing_of_the_example_stays_in_memory() -> None:
    model, file = ARCHITECTURES["llama"].model(), io.BytesIO()
    example = torch.randint(0, 20, (16, 64))
    converted = ckptkern.convert(model, example).converted
    assert len(converted) == 2
    torch.save(model, file)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert file.tell() < parameters + example.numel() * WIDTH * 4 / 4, "less than a quarter of one layer's input"


def test_include_and_exclude() -> None:
    model = ARCHITECTURES["llama"].model()
    assert fused_of(ckptkern.convert(model, ids(), include="layers.1")) == ["transformer_layer"]
    assert "forward" not in vars(model.layers[0]), "only what the last call converted is"
    assert fused_of(ckptkern.convert(model, ids(), include="*.mlp")) == ["mlp_block"] * 2
    assert fused_of(ckptkern.convert(model, ids(), exclude=[Llama])) == []
    assert (
        fused_of(ckptkern.convert(model, ids(), exclude=lambda name, m: name.endswith("self_attn")))
        == ["transformer_layer"] * 2
    )


def test_the_table() -> None:
    conversion = ckptkern.convert(ARCHITECTURES["llama"].model(), ids())
    text = str(conversion)
    assert "layers.* (2)" in text
    assert "transformer_layer" in text
    assert text.splitlines()[-1].startswith("2 modules converted; the whole model saves ")
    assert [row.name for row in conversion] == ["layers.0", "layers.1", "head"]
    assert "head: the example's call has no F.cross_entropy of it" in text


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not function"):
        ckptkern.convert(lambda x: x, ids())
    with pytest.raises(ValueError, match="recompute"):
        ckptkern.convert(ARCHITECTURES["llama"].model(), ids(), recompute="some")
    with pytest.raises(IndexError):  # the model's own
        ckptkern.convert(ARCHITECTURES["llama"].model(), ids() + 100)


# -- adapters and other weights that are there before


def quantized(layer: Llama) -> None:
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.detach().as_subclass(Scaled), False)


class Scaled(Tensor):
    """A weight with operations of its own, as a quantized one has."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def unfused(value):
            return value.as_subclass(Tensor) if isinstance(value, Scaled) else value

        if function is F.linear:
            return F.linear(args[0], unfused(args[1]) * 2, *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


BEFORE = {
    "adapters with a bias": lambda layer: adapted(layer, "q_proj", bias=True),
    "a quantized weight": quantized,
    "a parametrized weight": LATER["a parametrized weight"],
    "a hook inside": LATER["a hook inside"],
}


@pytest.mark.parametrize("what", BEFORE)
def test_what_cannot_be_fused_runs_as_an_activation_checkpoint(what: str) -> None:
    model = ARCHITECTURES["llama"].model().train()
    for layer in model.layers:
        BEFORE[what](layer)
    theirs, before = results(model), saved(model)
    conversion = ckptkern.convert(model, ids())
    assert fused_of(conversion) == ["checkpoint"] * 2
    assert all(row.reason for row in conversion)
    torch.testing.assert_close(results(model), theirs)
    assert saved(model) < 6 * ids().numel() * WIDTH * 4 < before
    ckptkern.revert(model)
    assert saved(model) == before


# -- without example inputs


def test_torchs_own_layers_become_drop_ins() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN_FEATURES, 0.0, batch_first=True), 2)
    x = torch.randn(2, 6, WIDTH, requires_grad=True)

    def step() -> tuple[list[Tensor], int]:
        with saved_tensors(model) as saved:
            y = model(x)
        return torch.autograd.grad(y.square().sum(), [x, *model.parameters()]), saved.bytes

    (theirs, before), kinds = step(), [type(m) for m in model.modules()]
    conversion = ckptkern.convert(model)
    assert fused_of(conversion) == ["ckptkern.nn.TransformerEncoderLayer"] * 2
    assert str(conversion).endswith("\n2 modules converted")
    ours, after = step()
    torch.testing.assert_close(ours, theirs)
    assert after < before / 3
    ckptkern.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert step()[1] == before
    measured = ckptkern.convert(model, x)
    assert (measured.saved_before, measured.saved_after) == (before, after)


HIDDEN_FEATURES = 64


def sequences() -> dict[str, tuple[nn.Sequential, list[str]]]:
    """Layers, and the ops that they become."""
    return {
        "mlp": (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8)), ["mlp_block"]),
        "stack": (nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.ReLU()))), ["linear_stack"]),
        "one": (nn.Sequential(nn.Linear(8, 32), nn.SiLU()), ["linear_act"]),
        "runs": (
            nn.Sequential(
                nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)
            ),
            ["mlp_block", "mlp_block"],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", sequences())
@pytest.mark.parametrize("dims", [2, 3])
def test_sequences_of_linear_layers(name: str, dims: int) -> None:
    sequence, replaced_by = sequences()[name]
    model = nn.ModuleDict({"body": sequence})
    x = torch.randn(5, 4, 8)[..., :] if dims == 3 else torch.randn(20, 8)
    x.requires_grad_()

    def step() -> tuple[list[Tensor], int]:
        with saved_tensors(model) as saved:
            y = model["body"](x)
        return torch.autograd.grad(y.square().sum(), [x, *model.parameters()]), saved.bytes

    theirs, before = step()
    conversion = ckptkern.convert(model)
    assert fused_of(conversion) == replaced_by, str(conversion)
    ours, after = step()
    torch.testing.assert_close(ours, theirs)
    assert after < before
    if name == "runs":
        model["body"][0] = nn.Linear(8, 32)
        assert step()[1] == before, "another layer in a run's place: the sequence runs as it is"
    ckptkern.revert(model)
    assert step()[1] == before


def test_a_linear_layer_is_converted_when_it_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert fused_of(ckptkern.convert(model, include="2")) == ["linear_act"]
    x = torch.randn(3, 8)
    assert torch.equal(model(x), ckptkern.revert(model)(x))


# -- caches


class Cache:
    """As transformers hands it from layer to layer."""

    def __init__(self):
        self.keys: list[Tensor] = []

    def get_seq_length(self) -> int:
        return self.keys[0].shape[-2] if self.keys else 0

    def update(self, k: Tensor) -> Tensor:
        self.keys.append(k)
        return k


class Caching(Llama):
    def forward(self, x: Tensor, tables=None, attention_mask=None, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.update(x)
        return super().forward(x, tables, attention_mask)


def test_a_cache_is_filled_in_evaluation_and_not_in_training() -> None:
    model = Stack(Caching, lambda x: with_tables(x) | {"cache": Cache()})
    theirs = results(model)
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    layer, x = model.layers[0], torch.randn(2, 6, WIDTH)
    evaluated, trained = Cache(), Cache()
    layer.eval()(x, **with_tables(x), cache=evaluated)
    assert len(evaluated.keys) == 1
    with torch.no_grad():
        generated = Cache()
        layer.train()(x, **with_tables(x), cache=generated)
    assert len(generated.keys) == 1, "a model in training mode may generate"
    binding._warn_of_cache.cache_clear()  # which warns once
    with pytest.warns(UserWarning, match="use_cache=False"):
        layer.train()(x, **with_tables(x), cache=trained)
    assert not trained.keys
    layer(x, **with_tables(x), cache=evaluated)
    assert len(evaluated.keys) == 2, "one with something in it goes to the original"
    torch.testing.assert_close(results(model), theirs)
