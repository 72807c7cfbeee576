"""Every region of a table beside the same function without a checkpoint: output, gradients, buffers and random numbers under
every option, inside and around other checkpoints; what it saves, how often it runs, and what an error leaves behind.

A region is a function of `run`, which is a checkpoint or `plain`. It returns its output, and then what a step is compared by:
tensors and modules. To hold another kind of region to all of this, add it to the table.
"""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves

import ckptkern
from ckptkern import checkpoint, checkpointed
from ckptkern.memory import dense_parts, saved_tensors

REGIONS = {}


def region(function):
    REGIONS[function.__name__] = function
    return function


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def mlp(p=0.0):
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 8), nn.LayerNorm(8))


# -- what is called and how it computes --------------------------------------------------------------------------------


@region
def dropout(run):
    """pytorch#14253."""
    model, x = mlp(0.5), leaf(5, 8)
    return run(model, x), x, model


@region
def normal_numbers(run):
    """The CPU's generator keeps the second of a pair of normal numbers for the next call, beside the state of its engine."""
    torch.randn(1)
    x = leaf(3)
    return run(lambda x: (x * torch.randn(3)).sin(), x) * torch.randn(3), x


@region
def autocast(run):
    """Backward runs outside of it. Casts are cached, at first without a graph (pytorch#71124, #112583, #141896)."""
    model, x = mlp(0.5), leaf(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            run(model, x)
        y = run(lambda x: model(model(x).float()), x)
    return y.float(), x, model


@region
def default_device(run):
    x = leaf(4)
    with torch.device("meta"):
        y = run(lambda x: x.sin().exp() * (2 if torch.empty(1).is_meta else 3), x)
    return y, x


@region
def nested(run):
    model, x = mlp(0.5), leaf(5, 8)

    def nest(level, x):
        return model(x) if level == 0 else run(nest, level - 1, run(nest, level - 1, x))

    return nest(3, x), x, model


@region
def gradient_inside(run):
    def function(x):
        (gradient,) = torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)
        return gradient * x.exp()

    x = leaf(4)
    return run(function, x), x


@region
def ends_in_place(run):
    """pytorch#26546."""
    model, x = mlp(), leaf(5, 8)
    return run(lambda x: F.relu_(model(x)), x), x, model


@region
def output_that_is_changed_in_place(run):
    model, x = mlp(), leaf(5, 8)
    return run(model, x).mul_(2), x, model


@region
def fused_layers(run):
    """They recompute themselves outside of a checkpoint, and save everything inside."""
    layer, x = ckptkern.nn.MLP(8, 32, dropout=0.5), leaf(5, 8)
    return run(layer, x), x, layer


@region
def in_chunks(run):
    model, x = mlp(0.5), leaf(5, 8)
    return run(lambda x: ckptkern.tiled(model, x, 3).sin(), x), x, model


# -- arguments, outputs and what is trained ----------------------------------------------------------------------------


Pair = collections.namedtuple("Pair", "left right")


@region
def nested_arguments(run):
    """Containers, None, strings and whole numbers, in and out (pytorch#121212, DeepSpeed#660)."""
    a, b, c = leaf(4), leaf(4), leaf(4)

    def function(pair, options, *, table, flag):
        assert (type(pair), pair.right, flag, options["w"][1]) == (Pair, 7, "text", None)
        y = pair.left.sin() * options["w"][0] + table[1]
        return {"y": y, "whole": table[0] + 1, "none": None}, [y.cos(), "text"]

    out, (cos, text) = run(function, Pair(a, 7), {"w": [b, None]}, table=(torch.arange(4), c), flag="text")
    assert (text, out["none"]) == ("text", None)
    return out["y"] * cos + out["whole"], a, b, c


@region
def containers_that_change(run):
    """Recompute uses the arguments as they were given."""
    x = leaf(3)
    arguments = [x]
    y = run(lambda values: values[0].sin(), arguments)
    arguments.clear()
    return y, x


@region
def arguments_that_autograd_cannot_save(run):
    x = leaf(3)
    with torch.inference_mode():
        mask = torch.ones(3)
    return run(lambda x, d, *, mask: (x.sin() + d["mask"]).exp() + mask, x, {"mask": mask}, mask=mask), x


@region
def a_cache_that_forward_writes(run):
    def write(x, caches):
        with torch.no_grad():
            caches[0].copy_(x)
        return x.sin().exp()

    x = leaf(3)
    return run(write, x, [torch.zeros(3)]), x


@region
def jagged(run):
    layer, x = nn.Linear(4, 4), leaf(7, 4)
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 7]))
    return run(lambda rows: layer(rows).sin().exp(), rows).values(), x, layer


@region
def frozen_input(run):
    """transformers#26221."""
    model = mlp()
    return run(model, torch.randn(5, 8)), model


@region
def one_trained_bias(run):
    model = mlp().requires_grad_(False)
    model[0].bias.requires_grad_()
    return run(model, torch.randn(5, 8)), model


@region
def a_part_without_gradient(run):
    model, x = mlp(), leaf(5, 8)
    a, _ = run(lambda x: (model(x), x.sin().exp()), x)
    return a, x, model


# -- modules that change themselves ------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x).sin()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x.sin().exp()


@region
def parameters_that_forward_changes(run):
    layer, embedding, x = Clamped(4, 4), nn.Embedding(10, 4, max_norm=1.0), leaf(3, 4)
    y = run(lambda x: run(layer, x.sin()).exp(), x)
    return y + run(embedding, torch.arange(3)) + run(embedding, torch.arange(2, 5)), x, layer, embedding


@region
def a_buffer_that_forward_replaces(run):
    module, x = Counting(), leaf(3)
    return run(module, x), x, module


@region
def scripted_and_traced(run):
    """Their buffers lie in no dict."""
    x = leaf(5, 8)
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), torch.jit.trace(nn.BatchNorm1d(8), x.detach()), nn.Tanh())
    return run(model, x), x, model


@region
def lazy(run):
    model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh()), leaf(5, 3)
    return run(model, x), x, model


@region
def a_module_that_holds_itself(run):
    model, x = mlp(), leaf(5, 8)
    model[0]._modules["parent"] = model
    y = run(model[0], x)
    del model[0]._modules["parent"]
    return y, x, model


FINDS_MODULES = {
    "module": lambda run, model, x: run(model, x),
    "method": lambda run, model, x: run(model.forward, x),
    "lambda": lambda run, model, x: run(lambda x: model(x), x),
    "default": lambda run, model, x: run(lambda x, of=model: of(x), x),
    "argument": lambda run, model, x: run(lambda of, x: of(x), model, x),
    "global": lambda run, model, x: run(eval("lambda x: of(x)", {"of": model}), x),
    "global list": lambda run, model, x: run(eval("lambda x: of[0](x)", {"of": [model]}), x),
    "partial": lambda run, model, x: run(functools.partial(lambda of, x: of(x), of=model), x=x),
}


def running_statistics(way, run):
    """Batch norm's are updated once, not again by the recompute (pytorch#96136), wherever the region finds the module."""
    x = leaf(2, 3, 9)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Conv1d(4, 2, 3))
    FINDS_MODULES[way](run, model, x)  # and no backward
    return FINDS_MODULES[way](run, model, x), x, model


REGIONS |= {f"statistics of a {way}": functools.partial(running_statistics, way) for way in FINDS_MODULES}

# -- properties --------------------------------------------------------------------------------------------------------


def matmuls():
    aten = torch.ops.aten
    return torch_checkpoint.create_selective_checkpoint_contexts([aten.addmm.default, aten.mm.default])


def patched(function, *args, **kwargs):
    with ckptkern.patch_torch():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=True, **kwargs)  # runs as False does


torchs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
CHECKPOINTS = {
    "checkpoint": checkpoint,
    "decorator": lambda function, *args, **kwargs: checkpointed(function)(*args, **kwargs),
    "without early stop": lambda function, *args, **kwargs: checkpointed(early_stop=False)(function)(*args, **kwargs),
    "debug": functools.partial(checkpoint, debug=True),
    "values": functools.partial(checkpoint, determinism_check="values"),
    "unchecked": functools.partial(checkpoint, determinism_check="none"),
    "matmuls saved": functools.partial(checkpoint, context_fn=matmuls),
    "decisions saved": functools.partial(checkpoint, context_fn=ckptkern.saved_decisions),
    "patched": patched,
    "in its own": lambda function, *args, **kwargs: checkpoint(
        functools.partial(checkpoint, function), *args, **kwargs
    ),
    "in torch's": lambda function, *args, **kwargs: torchs(functools.partial(checkpoint, function), *args, **kwargs),
    "around torch's": lambda function, *args, **kwargs: checkpoint(
        functools.partial(torchs, function), *args, **kwargs
    ),
}


def step(name, run, backward=torch.autograd.grad):
    """What a step with `run` leaves, by name; `backward` is called with torch.autograd.grad's arguments."""
    torch.manual_seed(3)
    y, *watched = REGIONS[name](run)
    results = {"y": y.detach().clone(), "generator after forward": torch.get_rng_state()}
    torch.randn(1)  # backward starts from another state
    state = {
        f"{i}.{key}": t
        for i, module in enumerate(watched)
        if isinstance(module, nn.Module)
        for key, t in module.state_dict(keep_vars=True).items()
    }
    state |= {str(i): t for i, t in enumerate(watched) if isinstance(t, torch.Tensor)}
    trained = {key: t for key, t in state.items() if t.requires_grad}
    grads = backward(y, list(trained.values()), torch.linspace(-1, 1, y.numel()).view_as(y), allow_unused=True)
    results |= {f"gradient of {key}": grad for key, grad in zip(trained, grads, strict=True)}
    results |= {f"value of {key}": t.detach().clone() for key, t in state.items()}
    return results | {"generator after backward": torch.get_rng_state(), "next numbers": torch.randn(3)}


def assert_as_plain(name, run, backward=torch.autograd.grad):
    torch.testing.assert_close(step(name, run, backward), step(name, plain), rtol=0, atol=0)


every_region = pytest.mark.parametrize("name", REGIONS)
# Torch's checkpoint reads containers late and updates statistics again, its policies do not know autocast's cache, and its
# debug mode allows one recompute. A forward that reads a buffer which it updates recomputes from the updated one, as
# "values" says.
EXCEPTIONS = {
    ("matmuls saved", "autocast"),
    ("debug", "gradient_inside"),
    ("values", "scripted_and_traced"),
    ("values", "lazy"),
}
EXCEPTIONS |= {(how, "containers_that_change") for how in ("in torch's", "around torch's")}
EXCEPTIONS |= {
    ("around torch's", name) for name in REGIONS if "statistics" in name or name in ("lazy", "scripted_and_traced")
}
STEPS = [(how, name) for how in CHECKPOINTS for name in REGIONS if (how, name) not in EXCEPTIONS]
# In the exception a recompute writes an argument, and the next one finds it changed.
recomputed_twice = pytest.mark.parametrize("name", [name for name in REGIONS if name != "a_cache_that_forward_writes"])


@pytest.mark.filterwarnings("ignore:ckptkern.patch_torch")
@pytest.mark.parametrize(("how", "name"), STEPS)
def test_a_step_is_that_of_the_function(how, name):
    assert_as_plain(name, CHECKPOINTS[how])


@recomputed_twice
def test_backward_again_through_a_retained_graph(name):
    """axolotl#3892, mamba#1020."""

    def backward(*args, **kwargs):
        first = torch.autograd.grad(*args, retain_graph=True, **kwargs)
        torch.testing.assert_close(torch.autograd.grad(*args, **kwargs), first, rtol=0, atol=0)
        return first

    assert_as_plain(name, checkpoint, backward)


class Leaving:
    """A context that calls a function when it is left. It has a length of zero, and so is false."""

    def __len__(self):
        return 0

    def __init__(self, leave=lambda: None):
        self.leave = leave

    def __enter__(self):
        pass

    def __exit__(self, *_):
        self.leave()


def observed(leave, *, early_stop=True):
    """A checkpoint that calls `leave` after each recompute, in the state that recompute runs in."""
    return functools.partial(checkpoint, context_fn=lambda: (Leaving(), Leaving(leave)), early_stop=early_stop)


@every_region
def test_it_saves_its_arguments_and_runs_twice(name):
    recomputed, regions = [], []

    def run(function, *args, **kwargs):
        if (
            torch._C._autograd._top_saved_tensors_default_hooks(True) or not torch.is_grad_enabled()
        ):  # inside another region
            return checkpoint(function, *args, **kwargs)
        with saved_tensors() as saved:
            y = observed(lambda: recomputed.append(None))(function, *args, **kwargs)
        tensors = {
            id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_inference()
        }
        regions.append((saved.bytes, sum(part.nbytes for t in tensors.values() for part in dense_parts(t))))
        return y

    step(name, run)
    assert all(saved == arguments for saved, arguments in regions), f"(bytes saved, bytes of arguments): {regions}"
    assert len(recomputed) <= len(regions) + (name == "gradient_inside")


@recomputed_twice
def test_an_error_in_recompute_leaves_nothing_behind(name):
    """Random state, autocast, grad mode, default device and hooks are as before; backward again is right (pytorch#37874)."""
    failing = []

    def fail():
        if failing:
            raise KeyError("injected")

    def state():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device(), hooks

    def backward(*args, **kwargs):
        before, generator = state(), torch.get_rng_state()
        failing.append(None)
        with pytest.raises(KeyError, match="injected"):
            torch.autograd.grad(*args, retain_graph=True, **kwargs)
        failing.clear()
        assert state() == before
        assert torch.equal(torch.get_rng_state(), generator)
        return torch.autograd.grad(*args, **kwargs)

    assert_as_plain(name, observed(fail, early_stop=False), backward)
