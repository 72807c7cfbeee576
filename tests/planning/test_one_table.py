"""The peak of a step is one number: report, plan, frontier, the estimate and convert's table say the same of a model."""

import pytest
import torch

import ckptkern
from ckptkern.conversion.recorder import set_gradients
from ckptkern.memory import format_size, peak_memory
from ckptkern.state import LOADED

pytest.importorskip("scipy")
pytest.importorskip("transformers")

from ckptkern.benchmarks import estimate_model as models
from ckptkern.benchmarks import estimate_variants as variants

TOKENS, WORKSPACE = 256, 2**20


@pytest.fixture(scope="module")
def config():
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2000,
    )


def call(tokens, device):
    ids = torch.arange(tokens, device=device)[None]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def with_gradients(model):
    """Its gradients are there when a step begins, as a trainer's that zeroes them."""
    set_gradients(model.parameters(), set(map(id, model.parameters())))
    return model


def peaks_of(model, device):
    """What report, plan and frontier say of a step with all regions at "full"."""
    report = ckptkern.report(model, **call(TOKENS, device))
    plan = ckptkern.plan(model, **call(TOKENS, device), budget="1GiB")
    frontier = ckptkern.frontier(model, lambda n: call(n, device), "1GiB", multiple=TOKENS, limit=TOKENS)
    assert f"peak {format_size(report.peaks['full'])}" in str(report)
    return report.peaks["full"], plan.table.measured(plan.table.uniform("full")), frontier.tried[TOKENS]


def test_they_say_what_a_step_takes(config, one_thread):
    model = with_gradients(models.built(config, torch.float32, "cpu"))
    with ckptkern.workspace(WORKSPACE):
        conversion = ckptkern.convert(model, **call(TOKENS, "cpu"), recompute="full")
        with peak_memory("cpu") as peak:
            model.train()(**call(TOKENS, "cpu")).loss.backward()
        said = conversion.peak_after
        assert f"a step peaks at {format_size(said)} instead of {format_size(conversion.peak_before)}" in str(
            conversion
        )
        # a profiler also sees the random state that Python's state module holds
        unseen = 0 if LOADED.module else torch.get_rng_state().nbytes
        assert peaks_of(model, "cpu") == (said + unseen,) * 3
    assert said == pytest.approx(peak.bytes, rel=0.05)
    assert said < 0.5 * conversion.peak_before


def test_a_profiler_of_the_user_s_goes_on():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)), torch.randn(4, 8)
    with peak_memory("cpu") as peak:
        conversion = ckptkern.convert(model, x)
        assert torch.zeros(2**20).numel()
    assert conversion.peak_before > conversion.saved_before > 0
    assert peak.bytes >= 4 * 2**20


def test_what_is_counted_without_memory_is_the_same(config):
    """On the meta device the estimate is one of them. It has no kernels' own memory, and is within 5 % of a step."""
    meta = models.built(config, torch.float32, "meta")
    models.convert_like_narrow(meta)
    estimated = variants.count(meta, variants.VARIANTS["ckptkern-full"], 1, TOKENS, WORKSPACE).peak
    with ckptkern.workspace(WORKSPACE), variants.Answers(), variants.fused_attention():
        assert peaks_of(with_gradients(meta), "meta") == (estimated, estimated, estimated)
    model = with_gradients(models.built(config, torch.float32, "cpu"))
    with ckptkern.workspace(WORKSPACE):
        assert estimated == pytest.approx(
            ckptkern.convert(model, **call(TOKENS, "cpu"), recompute="full").peak_after, rel=0.05
        )


@pytest.mark.slow
def test_a_cache_that_the_model_fills_by_default_is_left_out(config):
    """Without use_cache=False, transformers passes each layer a cache, whose keys have the first pass's graph."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)
    ids = torch.arange(32)[None]
    alone = ckptkern.report(model, input_ids=ids, labels=ids, use_cache=False)
    report = ckptkern.report(model, input_ids=ids, labels=ids)
    assert [line.saved for line in report.lines] == [line.saved for line in alone.lines]
