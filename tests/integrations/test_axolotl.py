"""axolotl's own loader finds the plugin by its name, its configuration has the plugin's key, and the callback converts."""

import pytest
import torch

pytest.importorskip("transformers", reason="axolotl's trainers are transformers'")
pytest.importorskip("axolotl.integrations.base", reason="needs axolotl")

from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.utils.dict import DictDefault
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptkern


@pytest.fixture
def plugins():
    manager = PluginManager.get_instance()
    manager.register("ckptkern.integrations.AxolotlPlugin")
    yield manager
    manager.plugins.clear()


def test_the_plugin_converts(plugins, tmp_path):
    assert [type(plugin) for plugin in plugins.plugins.values()] == [ckptkern.integrations.AxolotlPlugin]
    assert all("ckptkern" in kind.model_fields for kind in merge_input_args())
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    config = DictDefault({"ckptkern": {"recompute": "full", "workspace": "1MiB", "include": ["model.layers.*"]}})
    (callback,) = plugins.add_callbacks_pre_trainer(config, model)
    rows = [dict(input_ids=ids, labels=ids) for ids in torch.randint(64, (8, 16))]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert [row.replaced_by for row in callback.conversion.converted] == 2 * ["transformer_layer"]
    assert callback.conversion.calls["fused"] == 4


def test_without_options(plugins):
    (callback,) = plugins.add_callbacks_pre_trainer(DictDefault({}), None)
    assert callback.options == {}
