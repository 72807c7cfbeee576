"""What every drop-in replacement promises: constructor, parameters, initialisation, results, gradients and errors of what it
replaces, in training and evaluation, copied, hooked, under autocast and compiled. The table is in tests/support/drop_ins.py.
"""

import copy
import functools
import inspect
import itertools
import pickle
import re

import pytest
import torch
from support.cases import assert_as_exact
from support.drop_ins import (
    DROP_INS,
    HIDDEN,
    Adapter,
    B,
    E,
    H,
    T,
    assert_drop_in,
    call,
    inputs_of,
    ours_of,
    pair_of,
    raised,
    run,
    step,
    theirs_of,
)
from torch import nn

import ckptkern
from ckptkern.memory import saved_tensors

CLASSES = [name for name in ckptkern.nn.__all__ if isinstance(getattr(ckptkern.nn, name), type)]
OF_TORCH = [name for name in CLASSES if getattr(getattr(nn, name, None), "__mro__", ())]
OF_LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
every_module = pytest.mark.parametrize("name", DROP_INS)

# -- constructor, parameters, results ----------------------------------------------------------------------------------


def arguments_of(name):
    return inspect.signature(getattr(ckptkern.nn, name)).parameters


CHOICES = {"bias": (True, False), "activation": ("gelu", "silu"), "norm_first": (True,), "batch_first": (False,)}
CHOICES |= dict.fromkeys(("qk_norm", "attention_bias", "mlp_bias", "add_bias_kv", "add_zero_attn"), (True,))
VARIANTS = [(name, {}) for name in DROP_INS] + [
    (name, {option: value})
    for name in DROP_INS
    for option, values in CHOICES.items()
    for value in values
    if option in arguments_of(name) and (value != "silu" or name not in OF_TORCH)  # torch's has no such name
]


@pytest.mark.parametrize("name", sorted({*OF_TORCH} - {"Sequential"}))
def test_it_is_torchs_class_with_torchs_arguments(name):
    """In torch's order, as far as this torch has them."""
    ours, theirs = getattr(ckptkern.nn, name), getattr(nn, name)
    assert issubclass(ours, theirs)
    mine, reference = (
        {
            parameter.name: parameter.default
            for parameter in inspect.signature(kind).parameters.values()
            if parameter.kind != parameter.KEYWORD_ONLY
        }
        for kind in (ours, theirs)
    )
    assert [(key, value) for key, value in mine.items() if key in reference] == [
        (key, value) for key, value in reference.items() if key in mine
    ]


@pytest.mark.parametrize(("name", "options"), [*VARIANTS, ("MultiheadAttention", {"kdim": 4, "vdim": 6})], ids=str)
def test_initialisation_and_state_dict(name, options):
    modules = []
    for build in (ours_of, theirs_of):
        torch.manual_seed(3)
        modules.append(build(name, **options))
    ours, theirs = modules
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if name in OF_TORCH:
        assert [path for path, _ in ours.named_modules()] == [path for path, _ in theirs.named_modules()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_outputs_and_gradients(name, options, training):
    """In evaluation without gradients too, where torch's classes take their fast path."""
    layout = "seq_first" if options.get("batch_first") is False else "batch_first"
    ours, theirs = (module.train(training) for module in pair_of(name, **options))
    assert_drop_in(ours, theirs, call, inputs_of(name, layout))
    if not training:
        inputs = inputs_of(name, layout, grad=False)
        with torch.no_grad():
            torch.testing.assert_close(call(ours, **inputs), call(theirs, **inputs), rtol=1e-5, atol=1e-6)


VALUES = {  # none of them a default
    "activation": "gelu", "recompute": "none", "workspace": "1MiB", "dropout": 0.25, "resid_dropout": 0.125, "norm_first": True,
    "layer_norm_eps": 0.01, "rms_norm_eps": 0.01, "rope_theta": 50.0,
}  # fmt: skip
OPTIONS = {name: [option for option in VALUES if option in arguments_of(name)] for name in DROP_INS}
BECOMES = {"layer_norm_eps": ["norm_eps"], "rms_norm_eps": ["norm_eps"], "rope_theta": ["rotary"]}
BECOMES |= {"dropout": ["dropout_p"], "resid_dropout": ["resid_dropout_p"]}
OPS = ["linear_act", "linear_stack", "mlp", "gated_mlp", "attention_block", "transformer_layer"]


def with_options(name):
    return ours_of(name, **{option: VALUES[option] for option in OPTIONS[name]})


def flat(value, prefix=""):
    """{path: value} of dicts in dicts."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: tensor for name, part in value.items() for key, tensor in flat(part, f"{prefix}.{name}").items()}


@every_module
def test_options_reach_the_op_and_are_shown(name, monkeypatch):
    """Every argument of the op that an option becomes has its value in training; in evaluation nothing is dropped."""
    calls = []

    def spy(function, *args, **kwargs):
        calls.append(flat(dict(inspect.signature(function).bind(*args, **kwargs).arguments)))
        return function(*args, **kwargs)

    for op in OPS:
        monkeypatch.setattr(ckptkern.ops, op, functools.partial(spy, getattr(ckptkern.ops, op)))
    module, inputs = with_options(name), {key: x.float() for key, x in inputs_of(name).items()}
    call(module, **inputs)
    call(module.eval(), **inputs)
    trained, evaluated = calls
    assert trained.get(".training", True)
    for option in OPTIONS[name]:
        becomes = BECOMES.get(option, [option]) + ["resid_dropout_p"] * (
            option == "dropout" and name.startswith("Transformer")
        )
        paths = {path for path in trained if path.rpartition(".")[2] in becomes}
        paths -= {".mlp_arguments.dropout_p"} if name == "LlamaDecoderLayer" else set()  # its MLP has none
        assert paths, option
        assert {path: trained[path] for path in paths} == dict.fromkeys(paths, VALUES[option])
        if "dropout" in option and evaluated.get(".training", True):
            assert {path: evaluated[path] for path in paths} == dict.fromkeys(paths, 0.0)
        if option in ("recompute", "workspace"):
            assert f"{option}={VALUES[option]!r}" in repr(module)
    assert repr(module).startswith(f"{name}(")


@every_module
def test_it_saves_its_inputs(name):
    """At "full", whatever the masks: no copies of weights or of transposed tensors. A stack also saves a bit an output."""
    module, inputs = ours_of(name, recompute="full", dtype=torch.float64), inputs_of(name)
    with saved_tensors(exclude=module.parameters()) as saved:
        y = call(module, **inputs)
    assert saved.bytes == sum(x.nbytes for x in inputs.values()) + (y.nbytes // 64 if name == "LinearStack" else 0), (
        saved.tensors
    )


# -- parts that are more than their parameters -------------------------------------------------------------------------


def doubled(y):
    return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y


def change(module, path, how):
    part, (owner, _, last) = module.get_submodule(path), path.rpartition(".")
    if how == "adapter":
        setattr(module.get_submodule(owner), last, Adapter(part))
    elif how == "hook":
        part.register_forward_hook(lambda part, args, y: doubled(y))
    elif how == "pre-hook":
        part.register_forward_pre_hook(lambda part, args: tuple(-x if isinstance(x, torch.Tensor) else x for x in args))
    elif how == "forward":
        part.forward = lambda *args, own=part.forward, **kwargs: doubled(own(*args, **kwargs))
    else:
        own = type(part).forward
        members = {"forward": lambda self, *args, **kwargs: doubled(own(self, *args, **kwargs))}
        part.__class__ = type("Own", (type(part),), members)


def parts_of(name):
    """Paths and kinds of the parts that the module calls."""
    for path, part in theirs_of(name).named_modules():
        if path and not isinstance(part, nn.ModuleList) and not path.endswith("attn.out_proj"):
            yield path, type(part)


CHANGES = [
    (name, path, how)
    for name in DROP_INS
    for path, kind in parts_of(name)
    for how in ("hook", "forward", "class", "pre-hook", "adapter")
    if how in ("hook", "forward", "class") or kind is nn.Linear
]


@pytest.mark.parametrize(("name", "path", "how"), CHANGES)
def test_what_stands_for_a_part_is_called(name, path, how):
    ours, theirs = pair_of(name, **({"qk_norm": True} if "Llama" in name else {}))
    for module in (ours, theirs):
        change(module, path, how)
    assert_drop_in(ours, theirs, call, inputs_of(name))


# -- copies, modes, dtypes ---------------------------------------------------------------------------------------------


ROUTED = torch.tensor([[0, 2]] * 4), torch.ones(4, 2)
# modules that other files test, and their inputs
OTHERS = {
    "Dropout": lambda: (ckptkern.nn.Dropout(0.25), ()),
    "Experts": lambda: (ckptkern.nn.Experts(3, E, HIDDEN, "gelu", bias=True, recompute="selective"), ROUTED),
    "LayerStack": lambda: (ckptkern.nn.LayerStack((ckptkern.nn.MLP(E) for _ in range(4)), every=3, debug=False), ()),
    "LinearCrossEntropyLoss": lambda: (
        ckptkern.nn.LinearCrossEntropyLoss(E, 7, bias=True, softcap=3.0, recompute="none", workspace="1MiB"), (torch.arange(4),)
    ),
    "Sequential": lambda: (ckptkern.nn.Sequential(*(ckptkern.nn.MLP(E) for _ in range(4)), segments="1KiB"), ()),
}  # fmt: skip


def with_inputs(name):
    """(module with options, its inputs)."""
    torch.manual_seed(3)
    if name in DROP_INS:
        return with_options(name), [x.detach().float() for x in inputs_of(name).values()]
    module, more = OTHERS[name]()
    return module, [torch.randn(4, E), *more]


@pytest.mark.parametrize("name", CLASSES)
def test_copies_have_its_settings_and_share_nothing(name):
    """What a copy made after a step computes, its gradients and what it saves for them (xformers#290)."""
    module, inputs = with_inputs(name)
    expected = step(module, *inputs, held=inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert repr(other) == repr(module)
        for m in (other, module):
            torch.testing.assert_close(step(m, *inputs, held=inputs), expected, rtol=0, atol=0)
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()


@every_module
def test_dtypes_and_devices(name):
    module = ours_of(name, dtype=torch.bfloat16, device="meta")
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}
    y = call(module, *(x.to("meta", torch.bfloat16) for x in inputs_of(name).values()))
    assert (y.device.type, y.dtype) == ("meta", torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@every_module
def test_autocast(name):
    """Results are as exact as those of what it replaces, and have their dtypes, whatever dtype comes in. Autocast does not cast
    float64: torch's error, or its result, where only some of the tensors are in it."""
    ours, theirs = pair_of(name)
    inputs = inputs_of(name)
    exact = run(theirs, call, inputs)
    ours, theirs = ours.float(), theirs.float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cast = {key: x.detach().to(dtype).requires_grad_() for key, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            mine, eager = (run(module, call, cast) for module in (ours, theirs))
        if dtype == torch.float32:
            assert_as_exact(mine, eager, exact)
        if name != "LlamaDecoderLayer":  # torch's RMSNorm has another rule
            assert {key: x.dtype for key, x in mine.items()} == {key: x.dtype for key, x in eager.items()}
    for wide in (*inputs, "parameters") if name in OF_TORCH and name != "Linear" else ():
        mixed = {key: x.to(torch.float64 if key == wide else torch.float32) for key, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            mine, eager = (
                raised(functools.partial(call, m.double() if wide == "parameters" else m, **mixed))
                for m in (ours, theirs)
            )
        assert mine == eager, wide


# -- transforms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DROP_INS, "MultiheadAttention with weights"])
def test_compiled(name):
    torch._dynamo.reset()
    name, _, weights = name.partition(" ")
    module, inputs = with_inputs(name)
    function = functools.partial(call, **{"need_weights": True} if weights else {})
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(step(module, *inputs, function=f)[0] for f in (function, compiled)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", pytest.param("LlamaAttention", marks=pytest.mark.long)])
def test_compiled_for_any_shape_and_probability(name):
    """With dynamic=True a module's numbers are symbolic too: dropout's probability and theta."""
    torch._dynamo.reset()
    module = ours_of(name, dropout=0.1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape, module.dropout in (((2, 8, E), 0.1), ((3, 12, E), 0.2)):
        x = torch.randn(shape)
        torch.testing.assert_close(step(compiled, x)[0], step(module, x)[0])


@pytest.mark.parametrize("name", CLASSES)
def test_scripting_is_refused_by_name(name):
    """Also inside another module. TorchScript's own message would be about `super().forward` or some line of ours."""
    kind = getattr(ckptkern.nn, name)
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for module in (layer, nn.ModuleList([layer])):
        with pytest.raises(NotImplementedError, match=rf"torch\.jit\.script: {name} is .* Use torch\.compile"):
            torch.jit.script(module)


# -- what is refused ---------------------------------------------------------------------------------------------------


WRONG = {
    "activation": ("tanh", ValueError, "activation must be one of 'relu', .*, not 'tanh'"),
    "recompute": ("half", ValueError, "recompute must be one of 'none', 'selective', 'full'(, 'packed')?, not 'half'"),
    "dropout": (1.5, ValueError, "dropout probability has to be a number between 0 and 1, but got 1.5"),
    "workspace": (
        "plenty",
        ValueError,
        "workspace must be a positive number of bytes or a string like '64MiB', not 'plenty'",
    ),
    "rope_theta": (0, ValueError, "rope_theta must be above 0 and finite, not 0"),
    "rms_norm_eps": ("1e-6", TypeError, "rms_norm_eps must be a number, not '1e-6'"),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in DROP_INS for option in WRONG if option in OPTIONS[name]],
)
def test_wrong_options_raise_an_error(name, option):
    """Torch's own, of an option that torch's class has."""
    value, error, message = WRONG[option]
    if name in OF_TORCH and option in ("activation", "dropout") and name != "Linear":
        ours, theirs = (raised(lambda build=build: build(name, **{option: value})) for build in (ours_of, theirs_of))
        assert ours == theirs
        return
    with pytest.raises(error, match=rf"^\w+: {message}"):
        ours_of(name, **{option: value})


WIDTHS = [
    (name, option)
    for name in DROP_INS
    for option, parameter in arguments_of(name).items()
    if parameter.annotation in ("int", "int | None") and parameter.kind != parameter.KEYWORD_ONLY
]


@pytest.mark.parametrize(("name", "option"), [*WIDTHS, ("Dropout", "p")])
def test_wrong_widths(name, option):
    """Torch's error where torch has the class, otherwise one that names the argument."""
    good = {"p": 0.5} if option == "p" else {width: 4 for owner, width in WIDTHS if owner == name}
    for wrong in ("4", -4, [4], 4.5, *([0, 5, None] if name in OF_TORCH else [])):
        ours = raised(lambda wrong=wrong: getattr(ckptkern.nn, name)(**good | {option: wrong}))
        if name in OF_TORCH:
            assert ours == raised(lambda wrong=wrong: getattr(nn, name)(**good | {option: wrong}))
        else:
            assert ours[0] is ValueError
            assert re.search(rf": {option} must be an integer of at least .*, not {re.escape(repr(wrong))}$", ours[1])


def changed_inputs(x):
    return None, "x", x[0], x[0, 0], x[1:], x[..., 1:], x.float(), x.long(), x.to_sparse()


WRONG_MASKS = [
    True, [1], torch.zeros(T, T + 1), torch.zeros(B * H, T, T), torch.zeros(T, T, dtype=torch.int64), torch.zeros(B, T),
    torch.zeros(B, T, dtype=torch.float16), torch.zeros(B, T + 1, dtype=torch.bool),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["seq_first", "unbatched"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MultiheadAttention", {}),
        *itertools.product(OF_LAYERS, ({}, {"norm_first": True})),
    ],
    ids=str,
)
def test_wrong_inputs_raise_torchs_error(name, options, layout):
    """Each input, all of them, each mask and each hint."""
    pair, inputs = pair_of(name, batch_first=False, **options), [*inputs_of(name, layout, grad=False).values()]
    calls = [({}, [x] * 3) for x in changed_inputs(inputs[0])]
    inputs *= 3 if name == "MultiheadAttention" else 1
    for i, x in enumerate(inputs):
        calls += [({}, [*inputs[:i], wrong, *inputs[i + 1 :]]) for wrong in changed_inputs(x)]
    for mask in [
        argument
        for argument in inspect.signature(type(pair[0]).forward).parameters
        if "mask" in argument or "causal" in argument
    ]:
        calls += [({mask: wrong}, inputs) for wrong in WRONG_MASKS]
    for need_weights, (masks, args) in itertools.product((True, False), calls):
        masks = masks | ({} if name in OF_LAYERS else {"need_weights": need_weights})
        ours, theirs = (raised(functools.partial(module, *args[: len(inputs)], **masks)) for module in pair)
        assert ours == theirs, (args, masks)


@pytest.mark.parametrize(
    "name", ["Dropout", "Linear", "LinearStack", "MLP", "GatedMLP", "LlamaAttention", "LlamaDecoderLayer"]
)
def test_wrong_inputs(name):
    module = ours_of(name) if name in DROP_INS else ckptkern.nn.Dropout()
    for wrong in (None, "x", [1.0], 7):
        with pytest.raises(TypeError, match=f": input must be a Tensor, not {type(wrong).__name__}"):
            module(wrong)
    if name != "Dropout":
        with pytest.raises(ValueError, match=r"input has 11 features but .*=12"):
            module(torch.ones(2, 3, E - 1))
