"""The kernels repository and the functions that `register` registers, against transformers' eager models."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ckptkern import hub, memory
from ckptkern.hub.functions import attention_forward

transformers = pytest.importorskip("transformers", minversion="5.20")
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0, "sliding_window": 8},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "ckptkern"},
}


ACCEPTED = """
import inspect, sys
from transformers.utils import import_utils
inspect.unwrap(import_utils.is_kernels_available).__defaults__ = "0.17", "0.19"  # 5.23 asks for 0.18.2
import_utils.is_kernels_available.cache_clear()
import pytest
sys.exit(pytest.main(["-qq", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_layers_in_models():
    """Runs kernels.py in a process in which transformers accepts the pinned release of kernels."""
    pytest.importorskip("kernels")
    program = [sys.executable, "-c", ACCEPTED, str(Path(__file__).with_name("kernels.py"))]
    result = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def test_kernels_accepts_the_repository():
    kernels = pytest.importorskip("kernels")
    from kernels.validate import AllValidator, default_metadata_validators

    (variant,) = (path.parent for path in Path(hub.PATH).glob("*/metadata.json"))
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    AllValidator(default_metadata_validators()).validate_metadata(metadata=metadata, variant=variant.name)
    repository = kernels.get_local_kernel(Path(hub.PATH))
    assert repository.layers.SwiGLUMLP.has_backward
    assert repository.causal_lm_loss is hub.causal_lm_loss


@pytest.mark.parametrize(
    ("layer", "module", "replaced"),
    [
        ("SwiGLUMLP", "llama", "LlamaMLP"),
        ("GeGLUMLP", "gemma", "GemmaMLP"),
        ("MLP", "clip", "CLIPMLP"),
        ("RMSNormMLP", None, "RMSNormMLPLayout"),
        ("Experts", "mixtral", "MixtralExperts"),
        ("ForCausalLMLoss", None, "ForCausalLMLoss"),
    ],
)
def test_a_layer_is_stateless_and_has_the_signature_of_what_it_replaces(layer, module, replaced):
    _validate_layer = pytest.importorskip("kernels.layer.layer")._validate_layer
    from ckptkern.hub import layers

    module = layers if module is None else getattr(transformers.models, module)
    module = module if module is layers else getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
    _validate_layer(check_cls=getattr(module, replaced), cls=getattr(layers, layer), repo=layer)


WIDTHS = {"hidden_size": 32, "intermediate_size": 48}
SPARSE = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "activation_sparsity_pattern": [0.9]}
MLPS = [  # a class, its configuration, its other arguments; the layer; whether it is one fused op
    ("llama", "LlamaMLP", "LlamaConfig", WIDTHS, (), "SwiGLUMLP", True),
    ("falcon_h1", "FalconH1MLP", "FalconH1Config", WIDTHS | {"mlp_multipliers": [0.7, 1.3]}, (), "SwiGLUMLP", False),
    ("t5gemma", "T5GemmaMLP", "T5GemmaModuleConfig", WIDTHS | {"dropout_rate": 0.5}, (), "GeGLUMLP", True),
    ("gemma3n", "Gemma3nTextMLP", "Gemma3nTextConfig", WIDTHS | SPARSE, (0,), "GeGLUMLP", False),
    ("phi3", "Phi3MLP", "Phi3Config", WIDTHS | {"pad_token_id": 0}, (), "SwiGLUMLP", True),
    ("clip", "CLIPMLP", "CLIPTextConfig", WIDTHS, (), "MLP", True),
]


def fresh_mlp(family, cls, config, options, arguments, layer):
    """Returns a module of transformers with a layer of ours, as `kernels.kernelize` sets it."""
    layers = importlib.import_module("ckptkern.hub.layers")
    module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), cls)
    module = module(getattr(transformers, config)(**options), *arguments)
    module.forward = MethodType(getattr(layers, layer).forward, module)
    return module, layers


@pytest.mark.parametrize("case", MLPS, ids=lambda case: case[1])
def test_a_layer_computes_what_its_module_computes(case, recwarn):
    """With multipliers, dropout, a sparse activation, or one weight for gate and up; what is not one op warns once."""
    *case, is_fused = case
    recwarn.clear()
    for _ in range(2):
        module, layers = fresh_mlp(*case)
        x, state = torch.randn(2, 5, 32, requires_grad=True), torch.get_rng_state()
        module.eval()
        with memory.saved_tensors(module) as saved:
            y = module(x)
        assert torch.equal(state, torch.get_rng_state())
        assert saved.bytes == x.nbytes
        expected = type(module).forward(module, x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.sin().sum(), (x, *module.parameters())) for out in (y, expected))
        )
        module.train()
        assert torch.equal(module(x), module(x)) == ("dropout_rate" not in case[3])
        assert bool(vars(module)[layers.FUSED]) == is_fused
    assert [case[1] in str(warning.message) for warning in recwarn] == [True] * (not is_fused)


def test_a_layer_sees_changes_after_its_first_call(recwarn):
    """A hook on the activation, another dropout, other dims, and a call before gradients are wanted."""
    module, layers = fresh_mlp(*MLPS[2][:-1])
    x = torch.randn(2, 5, 32, requires_grad=True)
    with torch.no_grad():
        module.eval()(x)
    assert layers.FUSED not in vars(module)
    module(x)

    def check(x):
        with memory.saved_tensors(module) as saved:
            y = module(x)
        assert saved.bytes == x.nbytes
        torch.testing.assert_close(y, type(module).forward(module, x))

    check(x)
    hook = module.act_fn.register_forward_hook(lambda module, args, y: 2 * y)
    check(x)
    hook.remove()
    check(torch.randn(5, 32, requires_grad=True))
    module.train().dropout.p = 0.0
    check(x)
    assert not list(recwarn)  # of convert, whose remedies are not for layers


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_is_checked_inside_a_checkpoint(use_reentrant):
    """The check saves nothing for the outer checkpoint, and dropout is the same in its forward and its recompute."""
    family, cls, config, _, *rest = MLPS[2][:-1]
    module, layers = fresh_mlp(family, cls, config, dict.fromkeys(WIDTHS, 32) | {"dropout_rate": 0.5}, *rest)
    torch.nn.init.eye_(module.down_proj.weight)
    y = checkpoint(module, torch.randn(3, 32, requires_grad=True), use_reentrant=use_reentrant)
    y.sum().backward()
    assert vars(module)[layers.FUSED]
    torch.testing.assert_close(
        module.down_proj.weight.grad, y.detach().sum(0).expand(32, 32)
    )  # of what y has not dropped


def test_attention_of_one_query_reads_all_keys():
    """As transformers' sdpa: a step of generation passes is_causal=True without a mask."""
    module, (q, k, v) = torch.nn.Module(), torch.randn(3, 2, 4, 6, 8)
    actual, _ = attention_forward(module, q[:, :, :1], k, v, None, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def step(model, **call):
    """{"loss": the loss, name: gradient}, and the bytes that forward saves."""
    model.train()
    with memory.saved_tensors(model) as saved:
        loss = model(**call, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}, saved.bytes


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_registered_attention_and_experts(kind, padded):
    """In float32, as eager attention and experts: causal, with a window and a softcap, with sinks, with padding."""
    hub.register()
    options = SIZES | MODELS[kind]
    experts = options.pop("experts_implementation", "eager")
    models = []
    for chosen in (
        dict(attn_implementation="eager"),
        dict(attn_implementation="ckptkern", experts_implementation=experts),
    ):
        config = getattr(transformers, f"{kind}Config")(**options, **chosen)
        models.append(getattr(transformers, f"{kind}ForCausalLM")(config))
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(1, 64, (2, 24))
    call = {"input_ids": ids, "labels": ids}
    if padded:
        call["attention_mask"] = (torch.arange(24) >= torch.tensor([[0], [5]])).long()
        # what follows padding is predicted from a row without keys, which implementations compute as they like
        call["labels"] = ids.masked_fill(call["attention_mask"].cumsum(-1) <= 1, -100)
    (expected, saved), (actual, less) = (step(model, **call) for model in models)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-4)
    assert less < saved
    logits = [model.eval()(input_ids=ids).logits for model in models]
    torch.testing.assert_close(*logits[::-1], atol=1e-5, rtol=1e-4)


def test_registered_attention_with_position_biases():
    """T5 passes its biases beside a mask of booleans, of floats, or none."""
    module, (q, k, v) = torch.nn.Module(), torch.randn(3, 2, 4, 6, 8)
    module.is_causal, bias = False, torch.randn(1, 4, 6, 6)
    allowed = torch.rand(2, 1, 6, 6) > 0.3
    allowed |= torch.eye(6, dtype=torch.bool)
    floats = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    for mask, added in ((allowed, floats), (floats, floats), (None, 0.0)):
        actual, weights = attention_forward(module, q, k, v, mask, scaling=1.0, position_bias=bias)
        expected = torch.softmax(q @ k.mT + bias + added, -1) @ v
        torch.testing.assert_close(actual, expected.transpose(1, 2))
        assert weights is None


@pytest.mark.parametrize(
    "options", [{}, {"num_items_in_batch": torch.tensor(9)}, {"ignore_index": 3}, {"shifted": True}]
)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_causal_lm_loss(options, softcap):
    """As transformers' loss of the head's logits, with the same arguments."""
    loss_of_logits = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    hidden, weight = torch.randn(2, 7, 16, requires_grad=True), torch.randn(11, 16, requires_grad=True)
    labels = torch.randint(11, (2, 7)).masked_fill_(torch.rand(2, 7) < 0.2, options.get("ignore_index", -100))
    passed = {"shift_labels": labels} if "shifted" in options else {"labels": labels}
    options = {"labels": None} | passed | {name: value for name, value in options.items() if name != "shifted"}
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = loss_of_logits(logits, vocab_size=11, **options)
    actual = hub.causal_lm_loss(hidden, weight, hidden_size=16, final_logit_softcapping=softcap, **options)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected)))


def test_a_version_of_kernels_that_transformers_does_not_take(monkeypatch):
    pytest.importorskip("kernels")
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match="another version of kernels"):
        hub.kernel_config({"LlamaMLP": "SwiGLUMLP"})
