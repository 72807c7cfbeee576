"""Small models of transformers, what happens while they are trained, and what is noted of a training (`loops`)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LabelSmoother

import ckptkern
from ckptkern.memory import peak_memory

B, S, V, WIDTH, CLASSES, PIXELS, IMAGE = 2, 24, 256, 32, 3, 16, 4  # IMAGE: the token in place of a patch
STEPS, EVERY = 6, 2  # steps of a training, and between what happens again and again
Batch = dict[str, Tensor]
Calls = list[dict[str, int]]  # of each row

BASE = dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TEXT = BASE | dict(vocab_size=V, num_key_value_heads=2, use_cache=False)
SMALL = dict(vocab_size=V, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, use_cache=False)
VISION = BASE | dict(image_size=PIXELS, patch_size=4)
SPARSE = TEXT | dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8)
PATCHES = (PIXELS // 4) ** 2


def _gpt2() -> nn.Module:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **dropouts, bos_token_id=1, eos_token_id=2))


def _bert() -> nn.Module:
    dropouts = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(vocab_size=V, num_labels=CLASSES, max_position_embeddings=64, **BASE, **dropouts)
    return transformers.BertForSequenceClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "GPT-2": _gpt2,
    "BERT": _bert,
    "T5": _t5,
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=CLASSES)),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SPARSE)),
    "LLaVA": _llava,
}
CAUSAL = ("Llama", "GPT-2", "Qwen3-MoE")  # to which Trainer's label smoothing shifts the labels


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of V words, whose special tokens are others than the models'."""
    words = {name: i for i, name in enumerate(("<unk>", "</s>", "<s>", "<pad>", "<image>"))}
    words |= {f"word{i}": i for i in range(len(words), V)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def sample_of(name: str, length: int, generator: torch.Generator) -> Batch:
    """Returns the inputs and labels of a model of MODELS, without a batch's dimension; tokens [length]."""
    ids = torch.randint(IMAGE + 1, V, (length,), generator=generator)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    if name in ("ViT", "LLaVA"):
        sample["pixel_values"] = torch.randn(3, PIXELS, PIXELS, generator=generator)
    if name == "LLaVA":
        sample["input_ids"][1 : 1 + PATCHES] = IMAGE
        sample["labels"][1 : 1 + PATCHES] = -100
    if name in ("BERT", "ViT"):
        sample["labels"] = torch.randint(CLASSES, (), generator=generator)
    return {key: sample[key] for key in ("pixel_values", "labels")} if name == "ViT" else sample


# -- what happens


@dataclass(frozen=True)
class Event:
    """Describes what happens in a training.

    prepare: takes the model before it is converted and returns what is trained; between: is called with the training and the
    number of steps that are done, after each; the others are what each loop does in its own way. micros: micro-batches in a
    step; lengths: tokens of the samples of each batch in turn, as (longest, shortest).
    """

    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    between: Callable[[Training, int], None] = lambda training, done: None
    micros: int = 1
    lengths: tuple[tuple[int, int], ...] = ((S, S),)
    smoothing: float = 0.0
    two_forwards: bool = False
    adapters: bool = False
    saves: bool = False
    evaluates: bool = False
    tokenizer: bool = False
    resumes: bool = False
    gradient_checkpointing: bool = False


def generate(training: Training, done: int) -> None:
    """Generates in evaluation, and the next time in training mode."""
    if done % EVERY:
        return
    model, prompt = training.model, training.example()
    inputs = {key: prompt[key] for key in ("input_ids", "attention_mask", "pixel_values") if key in prompt}
    model.train(done % (2 * EVERY) == 0)
    training.metrics.append(model.generate(**inputs, max_new_tokens=4, do_sample=False, use_cache=True))
    model.train()


def lora(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def without_adapters(training: Training, done: int) -> None:
    """Runs the model without its adapters, as a reference pass does, and with merged ones."""
    if done % EVERY:
        return
    model, batch = training.model, training.example()
    with torch.no_grad(), model.disable_adapter():
        training.metrics.append(model(**batch).loss)
    model.merge_adapter()
    with torch.no_grad():
        training.metrics.append(model.eval()(**batch).loss)
    model.train().unmerge_adapter()


def average(training: Training, done: int) -> None:
    """Averages the parameters in a copy, which is evaluated and, at last, trained for a step."""
    if training.copied is None:
        training.copied = copy.deepcopy(training.model)
    averaged, batch = training.copied, training.example()
    with torch.no_grad():
        for p, now in zip(averaged.parameters(), training.model.parameters(), strict=True):
            p.lerp_(now, 0.3)
        training.metrics.append(averaged.eval()(**batch).loss)
    if done == STEPS:
        averaged.zero_grad()
        averaged.train()(**batch).loss.backward()
        training.metrics.append(torch.stack([p.grad.norm() for p in averaged.parameters() if p.grad is not None]))


def freeze(training: Training, done: int) -> None:
    """Freezes every second parameter for some steps."""
    if done in (EVERY, 2 * EVERY):
        for p in [*training.model.parameters()][::2]:
            p.requires_grad_(done != EVERY)


EVENTS = {
    "save": Event(saves=True),
    "evaluate": Event(evaluates=True),
    "tokenizer": Event(tokenizer=True),
    "resume": Event(resumes=True),
    "generate": Event(between=generate),
    "gradient checkpointing": Event(gradient_checkpointing=True),
    "adapters": Event(prepare=lora, between=without_adapters, adapters=True),
    "EMA": Event(between=average),
    "two forwards": Event(two_forwards=True),
    "accumulation": Event(micros=2),
    "label smoothing": Event(smoothing=0.1),
    "lengths": Event(lengths=((S, S), (S - 3, S - 5), (S, S - 4))),
    "freezing": Event(between=freeze),
}


# -- a training


@dataclass
class Training:
    """A model of MODELS, trained in a loop.

    losses: of each micro-batch; metrics: what is computed between the steps. Of a converted model peaks, in bytes, and ran, the
    calls of each row, are those of forward and backward of each step, alone and usual those of a step without the loop, right
    after convert. copied: a deepcopy of the model. folder: for checkpoints. stop: the number of steps after which it ends;
    resumes: whether it goes on from the folder's checkpoint. before: the parameters that are trained, as they begin.
    """

    name: str
    event: Event
    folder: Path
    model: nn.Module
    conversion: ckptkern.Conversion | None = None
    losses: list[float] = field(default_factory=list)
    alone: int = 0
    usual: Calls = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    ran: list[Calls] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    copied: nn.Module | None = None
    stop: int = STEPS
    resumes: bool = False
    before: Batch = field(default_factory=dict)
    _step: contextlib.AbstractContextManager | None = None

    @property
    def dataset(self) -> list[Batch]:
        generator, count = torch.Generator().manual_seed(1), STEPS * self.event.micros
        lengths = (self.event.lengths * count)[:count]
        return [sample_of(self.name, length, generator) for pair in lengths for length in pair]

    def collate(self, samples: list[Batch]) -> Batch:
        """Pads the samples [length] to a batch [B, the longest]."""
        fill = {"attention_mask": 0, "labels": -100}
        batch = {
            key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], True, fill.get(key, 3))
            if samples[0][key].dim() == 1
            else torch.stack([sample[key] for sample in samples])
            for key in samples[0]
        }
        if self.name == "T5":
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    def loader(self) -> DataLoader:
        return DataLoader(self.dataset, B, collate_fn=self.collate)

    def example(self) -> Batch:
        return self.collate(self.dataset[:B])

    def small(self) -> Batch:
        """Returns what convert is given: fewer tokens than in training."""
        length = PATCHES + 4 if self.name == "LLaVA" else S // 2
        return self.collate([sample_of(self.name, length, torch.Generator().manual_seed(i)) for i in range(B)])

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a batch, as a loop writes it that is not Trainer's."""
        if not self.event.smoothing:
            return model(**batch).loss
        labels = batch["labels"]
        output = model(**{key: value for key, value in batch.items() if key != "labels"})
        return LabelSmoother(self.event.smoothing)(output, labels, shift_labels=self.name in CAUSAL)

    def losses_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns what is differentiated."""
        return self.with_others(self.loss(model, batch), model, batch)

    def with_others(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        """Adds the loss of a second forward, with other parameters, or compares with a pass without adapters."""
        if self.event.two_forwards:
            own = {name: p * 0.9 for name, p in model.named_parameters()}
            return loss + functional_call(model, own, (), other(batch)).loss
        if self.event.adapters:
            with torch.no_grad(), self.model.disable_adapter():
                reference = model(**batch).loss
            return loss + (loss - reference) ** 2
        return loss

    def calls(self) -> Calls:
        return [dict(row.calls) for row in self.conversion.converted]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures forward and backward of a step of a converted model."""
        if self.conversion is None:
            yield
            return
        before = self.calls()
        with peak_memory("cpu") as peak:
            yield
        self.peaks.append(peak.bytes)
        self.ran.append(since(before, self.calls()))

    def measure(self) -> None:
        """Measures steps without the loop, of the model's own loss."""
        batch = self.example()
        for _ in range(3):  # the first one sets up what stays
            before = self.calls()
            with peak_memory("cpu") as peak:
                for _ in range(self.event.micros):
                    self.with_others(self.model(**batch).loss, self.model, batch).backward()
            self.alone, self.usual = max(self.alone, peak.bytes), since(before, self.calls())
            self.model.zero_grad()

    def begin(self) -> None:
        """Begins `step` where a loop calls back, unless it has begun."""
        if self._step is None:
            self._step = self.step()
            self._step.__enter__()

    def end(self) -> None:
        self._step.__exit__(None, None, None)
        self._step = None

    def evaluate(self) -> None:
        """Evaluates loss and accuracy on the first samples, and goes on in training mode."""
        self.model.eval()
        with torch.no_grad():
            output = self.model(**self.example())
        self.metrics += [output.loss, accuracy(output.logits, self.example()["labels"])]
        self.model.train()


def since(before: Calls, now: Calls) -> Calls:
    return [{how: row[how] - was[how] for how in row} for row, was in zip(now, before, strict=True)]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).float().mean().item()


def other(batch: Batch) -> Batch:
    """Returns another batch of the same shapes."""
    return {key: value.roll(1, -1) if value.dim() > 1 else value.flip(0) for key, value in batch.items()}
