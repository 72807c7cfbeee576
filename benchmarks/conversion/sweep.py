"""Measures a training step's peak memory for every class of transformers that builds small.

Run: `python -m benchmarks.conversion.sweep`. As in peaks.py: eager; with each layer an activation checkpoint, also with a
language model's loss in checkpointed chunks of tokens; and converted by `convert(model, recompute="full", workspace=...)`,
whose loss and gradients are compared with eager's. A class that does not build small, does not run on the inputs of small.py,
takes too long, is random in training or has no layers is counted as such.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptkern.benchmarks.baselines import checkpointed, chunked_loss
from ckptkern.conversion.report import write_rows
from ckptkern.extras import missing

from . import measure, peaks
from .families import disturbed
from .small import built, calls, sizes

MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING")
SIZES = sizes(width=128, hidden=352, layers=4, classes=512, image=384, positions=2050)  # 48 x 48 patches
SECONDS = 180  # CPU seconds, at most, for a class
SAMPLES = 80000  # of a waveform: five seconds
BYTES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=352, vocab_size=512)
MIXED = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=128)
# Settings over the sizes, of classes that do not build or run without any.
SETTINGS: dict[str, dict[str, Any]] = {
    f"{name}ForCausalLM": peaks.FAMILIES[name]
    for name in ("FalconH1", "Gemma3n", "GraniteMoeHybrid", "Mamba2", "Zamba2")
} | {
    f"Gemma4{kind}{end}": settings  # else its global heads would have 512 channels
    for settings, ends in (
        (peaks.FAMILIES["Gemma4"], ("ForCausalLM", "TextModel")),
        (dict(text_config=peaks.FAMILIES["Gemma4"]), ("ForConditionalGeneration", "Model")),
    )
    for kind in ("", "Unified")
    for end in ends
} | {
    "BltForCausalLM": dict(
        encoder_hash_byte_group_vocab=512, patching_threshold=5.765,  # patches of four bytes
        encoder_config=BYTES | dict(num_hidden_layers=1, hidden_size_global=128),
        decoder_config=BYTES | dict(hidden_size_global=128), patcher_config=BYTES, global_config=BYTES,
    ),
    "CohereCompassForCausalLM": MIXED | {
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}
    },
    "DbrxForCausalLM": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "Dots3NoteForCausalLM": dict(
        swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=32, swa_kv_lora_rank=32, swa_head_dim=48,
        swa_qk_nope_head_dim=32, swa_v_head_dim=32, index_n_heads=4, index_head_dim=32, index_topk=512,
    ),
    "Dots1ForCausalLM": dict(n_shared_experts=1),
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 2]]),
    "Lfm2MoeForCausalLM": peaks.FAMILIES["Lfm2"],
    "LongcatFlashForCausalLM": dict(ffn_hidden_size=352, expert_ffn_hidden_size=64, zero_expert_num=2),
    "Qwen4ExpForCausalLM": dict(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=512, indexer_compress_ratio=4, hc_lowrank=16
    ),
    "ReformerModelWithLMHead": dict(
        is_decoder=True, axial_pos_shape=(32, 64), axial_pos_embds_dim=(64, 64), attention_head_size=32, hash_seed=0,
        attn_layers=["local", "lsh"] * 2, num_buckets=32,
    ),
    "XLMWithLMHeadModel": dict(emb_dim=128, causal=True),
    "XmodForCausalLM": dict(default_language="en_XX", is_decoder=True),
    "ZambaForCausalLM": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2, num_key_value_heads=4, attention_head_dim=64,
        mamba_d_state=8, use_mamba_kernels=False,
    ),
    "ZayaForCausalLM": dict(num_experts_per_tok=1),
}  # fmt: skip
BOUNDS = {True: 0.6, False: 0.8}  # limits of the ratio to checkpointing's peak, for decoders and other models


class TooLong(BaseException):
    """Raised when the time is over. No model raises this class itself."""


def classes(mapping: str) -> dict[str, type]:
    """Returns the classes of a mapping of transformers that can be imported here, by name."""
    from transformers.models.auto import modeling_auto

    of_configs, by_name = getattr(modeling_auto, mapping), {}
    for config in of_configs:
        try:
            of_config = of_configs[config]
        except Exception:  # a class whose own module does not import here (an optional package)
            continue
        by_name |= {
            kind.__name__: kind for kind in (of_config if isinstance(of_config, (list, tuple)) else (of_config,))
        }
    return dict(sorted(by_name.items()))


def build(model_class: type) -> nn.Module:
    """Returns a small model with gradients of zeros, the same for each call."""
    model = disturbed(built(model_class, SETTINGS.get(model_class.__name__, {}), SIZES))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def loss_of(inputs: dict[str, Any], model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    is_wide = next(model.parameters()).dtype == torch.float64
    return measure.loss_of(model(**(measure.wide(inputs) if is_wide else inputs)))


def with_checkpoints(model: nn.Module) -> nn.Module:
    """Makes activation checkpoints of the model's layers by its own method, or of the members of its lists of layers."""
    if peaks.layers_of(model) and model.supports_gradient_checkpointing:
        return checkpointed(model)
    return measure.checkpointed(model)


def chunked(model: nn.Module, inputs: dict[str, Any]) -> Callable[[nn.Module], Tensor] | None:
    """Returns the model's loss in chunks of tokens; None if it is not a language model's loss of its last hidden states."""
    loss = functools.partial(chunked_loss, ids=inputs.get("labels"))
    with contextlib.suppress(Exception), torch.no_grad():
        if torch.allclose(loss(model), loss_of(inputs, model), rtol=1e-4):
            return loss
    return None


def swept(name: str, model_class: type, tokens: int, workspace: str) -> tuple[str, peaks.Result]:
    """Returns the verdict, and the class's peaks as far as they were measured."""

    def ended(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    result, stage = peaks.Result(name, tokens), "does not build"
    try:
        model = build(model_class)
        stage = "does not run"
        candidates = calls(model, 1, tokens, SAMPLES) + calls(model, 2, tokens, SAMPLES)
        for inputs in candidates:
            try:
                first = measure.step(model, inputs)
                break
            except Exception:  # inputs that this class does not take
                if inputs is candidates[-1]:
                    raise
        stage = "CRASHED"
        if measure.error(measure.step(model, inputs, seed=1), first) > 1e-6:
            return "does not repeat", result
        if not (peaks.layers_of(model) or measure.blocks(model)):
            return "no layers", result
        remade = functools.partial(build, model_class)
        loss = functools.partial(loss_of, inputs)
        peaks.compare_peaks(result, remade, inputs, loss, chunked(model, inputs), with_checkpoints, workspace)
        return "WRONG" if result.wrong else "right", result
    except TooLong:
        return "too long", result
    except Exception as error:  # the finding; the other classes still run
        result.reasons = [f"{type(error).__name__}: {str(error)[:300]}"]
        if stage == "CRASHED":
            traceback.print_exc()
        return stage, result
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("classes", nargs="*", metavar="class", help="of transformers (default: all of the mappings)")
    mappings = f"measure the classes of this mapping: {', '.join(MAPPINGS)} (default: all)"
    parser.add_argument("--mapping", choices=MAPPINGS, metavar="NAME", help=mappings)
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence (default: 512)")
    parser.add_argument("--workspace", default="1MiB", help="workspace of the converted model (default: 1MiB)")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="the I-th of N parts of the classes (default: 1/1)"
    )
    parser.add_argument("--out", type=Path, help="write a row for each class that was measured to this file")
    args = parser.parse_args()
    if hint := missing("transformers"):
        parser.error(hint)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known: dict[str, tuple[str, type]] = {}
    for mapping in [args.mapping] if args.mapping else MAPPINGS:
        known |= {name: (mapping, kind) for name, kind in classes(mapping).items() if name not in known}
    if unknown := set(args.classes) - set(known):
        parser.error(f"no such class in {args.mapping or 'these mappings'}: {', '.join(sorted(unknown))}")
    part, parts = map(int, args.part.split("/"))
    results, verdicts = [], collections.Counter()
    print(peaks.HEADING)
    for name in (args.classes or list(known))[part - 1 :: parts]:
        verdict, result = swept(name, known[name][1], args.tokens, args.workspace)
        verdicts[verdict] += 1
        if verdict not in ("right", "WRONG"):
            print(f"{name:26} {verdict}: {' '.join(result.reasons)}"[:160], flush=True)
            continue
        print(peaks.line(result), flush=True)
        results.append(result)
        if args.out:
            write_rows(args.out, [result.row() for result in results])
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    above = {name: result for result in results if result.ratio > BOUNDS["CAUSAL" in known[name := result.name][0]]}
    print(f"{len(above)} above what they may take:")
    for result in sorted(above.values(), key=lambda result: -result.ratio):
        print(f"  {result.ratio:.2f} {result.name}: {' | '.join(result.reasons)[:300]}")
    if verdicts["WRONG"] or verdicts["CRASHED"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
