"""What the benchmark of convert on other libraries' models says of a model, on models that need no library."""

from __future__ import annotations

import functools

import pytest
import torch
from support.architectures import ARCHITECTURES, ids
from torch import nn

from benchmarks.conversion import families, measure, peaks, sweep


def test_a_sound_conversion():
    model, result = ARCHITECTURES["llama"].model(), measure.Result("llama")
    inputs = {"ids": ids()}
    result.saved_checkpoint = measure.saved(measure.checkpointed(model), inputs)
    measure.convert_and_compare(result, model, inputs)
    assert (result.verdict, result.replaced, result.whole, result.layers) == ("whole", {"transformer_layer": 2}, 2, 2)
    assert result.saved_checkpoint < result.saved_converted < result.saved_eager
    assert max(result.loss_error, result.gradient_error) < 1e-5
    curves = [measure.curve(module, inputs, 3) for module in (model, model)]
    assert curves[0][-1] > curves[1][-1], "it trains"


def test_a_wrong_one_shows():
    model = ARCHITECTURES["gpt"].model()
    right = measure.step(model, {"ids": ids()})
    model.layers[1].c_attn.weight.data[0] *= 1.01
    assert measure.error(measure.step(model, {"ids": ids()}), right) > 1e-4
    assert measure.error({"": right[""]}, right) == float("inf"), "a gradient that is missing"
    nan = {name: g * float("nan") for name, g in right.items()}
    assert measure.error(nan, right) == float("inf")


def test_layers_that_are_not_called_do_not_count():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = ARCHITECTURES["llama"].model(), ARCHITECTURES["llama"].model()

        def forward(self, ids):
            return self.used(ids)

    model, result = Half(), measure.Result("half")
    assert len(measure.blocks(model)) == 4
    measure.convert_and_compare(result, model, {"ids": ids()})
    assert (result.verdict, result.layers) == ("whole", 2)


def test_the_figure(tmp_path):
    row = measure.Result("a", "whole", saved_eager=100, saved_checkpoint=10, saved_converted=20).row()
    families.draw([{name: str(value) for name, value in row.items()}], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3_5", "Gemma4", "Mamba2", "GraniteMoeHybrid"])
def test_layers_that_nothing_knows_take_far_less_than_under_checkpointing(name, request):
    """Hybrids by PyTorch's delta rule and scans, and attention that no pattern reads, in parts."""
    pytest.importorskip("transformers")
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    result = peaks.compare(name, 1024)
    assert not result.wrong
    assert result.layers == result.whole + result.checkpointed
    assert result.ratio <= 0.62, peaks.line(result)


def test_the_sweep_says_what_came_out(monkeypatch):
    transformers = pytest.importorskip("transformers")
    verdict, result = sweep.swept("Llama", transformers.LlamaForCausalLM, 256, "512KiB")
    assert verdict == "right"
    assert (result.layers, result.whole) == (4, 4)
    assert 0 < result.converted < result.checkpointing < result.eager
    assert sweep.swept("Linear", nn.Linear, 64, "64KiB")[0] == "does not build"
    monkeypatch.setattr(peaks, "WRONG", 0.0)
    assert sweep.swept("Llama", transformers.LlamaForCausalLM, 64, "64KiB")[0] == "WRONG"
    monkeypatch.setattr(sweep, "SECONDS", 0.01)
    assert sweep.swept("Llama", transformers.LlamaForCausalLM, 64, "64KiB")[0] == "too long"
