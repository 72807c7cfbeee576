"""The two passes of DPO and GRPO through one converted model: the policy with gradients, the reference without, for which
peft's adapters are switched off."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from conversion.steps import calls_of
from conversion.test_language_models import model_of as llama_of

import ckptkern
from ckptkern.conversion import binding, fuse
from ckptkern.memory import peak_memory, saved_tensors

peft = pytest.importorskip("peft")
LAYERS, WORKSPACE = 2, 2**18


def model_of(dropout=0.0):
    lora = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        lora_dropout=dropout,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = llama_of(intermediate_size=512, vocab_size=200, use_cache=False)
    return peft.get_peft_model(model, lora).train()


def ids(length=64):
    return torch.randint(200, (4, length), generator=torch.Generator().manual_seed(1))


def converted(model):
    conversion = ckptkern.convert(model, input_ids=ids()[:1], workspace=WORKSPACE)
    assert [row.replaced_by for row in conversion.rows if "layers" in row.name] == ["transformer_layer"] * LAYERS
    return model


def log_probs(model, tokens):
    """As a trainer writes them, of the hidden states."""
    decoder = model.get_base_model()
    hidden = decoder.model(input_ids=tokens).last_hidden_state[:, :-1]
    return ckptkern.selected_log_probs(hidden, decoder.lm_head.weight, tokens[:, 1:], workspace=WORKSPACE)


@contextlib.contextmanager
def as_reference(model):
    with torch.no_grad(), model.disable_adapter():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_both_passes_of_one_model(training):
    """Each step's two passes are the unconverted model's; the reference saves nothing, samples nothing, and stays fused however
    often the adapters are switched: no trace, no checkpoint, no pattern that is new."""
    plain = model_of()
    model = converted(copy.deepcopy(plain)).train(training)
    plain.train(training)
    tokens, layers = ids(), [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), binding.Fused)]
    before, patterns = calls_of(model), set()
    with mock.patch.object(fuse, "trace", side_effect=AssertionError("a layer was traced again")):
        for _ in range(3):
            policy = log_probs(model, tokens)
            state = torch.get_rng_state()
            with as_reference(model), saved_tensors() as saved:
                reference = log_probs(model, tokens)
            assert saved.bytes == 0
            assert torch.equal(state, torch.get_rng_state())
            patterns.add(tuple(len(layer.segments) for layer in layers))
    assert len(patterns) == 1
    passes = 6 if training else 3  # of a pass without gradients in evaluation nothing is counted
    assert calls_of(model) == before | {"fused": before["fused"] + passes * LAYERS}
    with as_reference(plain):
        torch.testing.assert_close(reference, log_probs(plain, tokens))
    assert (policy - reference).abs().max() > 0.1
    results = []
    for m in (model, plain):
        y, weights = log_probs(m, tokens), [p for p in m.parameters() if p.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.sum(), weights)])
    assert len(weights) == 8 * LAYERS
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_reference_pass_takes_no_more_than_the_workspace(training):
    """Beside what has the size of hidden states: those between layers, rotary tables, o of attention."""
    plain, tokens = model_of().train(training), ids(512)
    model = converted(copy.deepcopy(plain)).train(training)

    def peak(m):
        with as_reference(m):
            log_probs(m, tokens)
            with peak_memory("cpu") as peaks:
                log_probs(m, tokens)
        return peaks.bytes

    most = WORKSPACE + 8 * 4 * tokens.numel() * 32
    assert peak(model) <= most
    assert peak(plain) > 4 * most


def test_a_dropout_of_adapters_that_are_off_samples_nothing():
    model, tokens = converted(model_of(dropout=0.5)), ids()
    with as_reference(model):
        first, state = log_probs(model, tokens), torch.get_rng_state()
        assert torch.equal(first, log_probs(model, tokens))
        assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(log_probs(model, tokens), log_probs(model, tokens))


def test_adapters_that_were_merged_are_taken_out_by_their_layer():
    """Switching a merged adapter off changes the weights; the layer's own forward does that."""
    plain, tokens = model_of(), ids()
    model = converted(copy.deepcopy(plain))
    with as_reference(plain):
        want = log_probs(plain, tokens)
    model.merge_adapter()
    with as_reference(model):
        torch.testing.assert_close(log_probs(model, tokens), want)


def test_a_model_converted_while_adapters_are_off():
    """The fused layers have no adapters; with them, layers are activation checkpoints, and right."""
    plain, tokens = model_of(), ids()
    model = copy.deepcopy(plain)
    with model.disable_adapter():
        converted(model)
        fused = calls_of(model)["fused"]
        with torch.no_grad():
            reference = log_probs(model, tokens)
        assert calls_of(model)["fused"] == fused + LAYERS
    with as_reference(plain):
        torch.testing.assert_close(reference, log_probs(plain, tokens))
    torch.testing.assert_close(log_probs(model, tokens), log_probs(plain, tokens))
    assert calls_of(model)["checkpointed"] >= LAYERS


def traced(layer, x):
    return torch.jit.trace(layer, (x,))(x)


def tangent(layer, x):
    return torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("transformed", [traced, tangent])
def test_an_evaluation_is_traced_and_differentiated_forward_as_before(transformed):
    """A fused op is none that torch.jit stores or forward-mode AD takes: the layers' own forward runs."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).eval()
    model, x = copy.deepcopy(plain), torch.randn(2, 8)
    assert {row.replaced_by for row in ckptkern.convert(model, x).rows} == {"mlp_block"}
    with torch.no_grad():
        torch.testing.assert_close(transformed(model, x), transformed(plain, x))
