"""The loops in which people train: Trainer, Lightning, accelerate and one's own. In each, an event of `events` happens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import accelerate
import pytorch_lightning as lightning
import torch
import transformers
from pytorch_lightning.callbacks import ModelCheckpoint
from support.events import EVENTS, EVERY, MODELS, B, Batch, Training, accuracy, tokenizer
from torch import Tensor, nn

import ckptkern


def own(training: Training) -> None:
    """A loop as it is written without a library."""
    event, model, file = training.event, training.model, training.folder / "checkpoint.pt"
    done = 0
    if training.resumes:
        state = torch.load(file)
        done = state["done"]
        model.load_state_dict(state["model"], assign=True)
    optimizer = training.optimizer()
    if training.resumes:
        optimizer.load_state_dict(state["optimizer"])
    batches = itertools.islice(training.loader(), done * event.micros, None)
    while done < training.stop:
        with training.step():
            for batch in itertools.islice(batches, event.micros):
                loss = training.losses_of(model, batch) / event.micros
                loss.backward()
                training.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        training.event.between(training, done)
        if event.evaluates and done % EVERY == 0:
            training.evaluate()
        if event.saves and done % EVERY == 0:
            model.save_pretrained(training.folder)
        if event.resumes:
            torch.save({"done": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def accelerated(training: Training) -> None:
    """A loop around accelerate's objects."""
    event, folder = training.event, training.folder / "state"
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=event.micros)
    model, optimizer, loader = accelerator.prepare(training.model, training.optimizer(), training.loader())
    done = 0
    if training.resumes:
        accelerator.load_state(folder)
        done = EVERY
        loader = accelerator.skip_first_batches(loader, done)
    for batch in loader:
        training.begin()
        with accelerator.accumulate(model):
            loss = training.losses_of(model, batch)
            accelerator.backward(loss)
            training.losses.append(loss.item())
            if accelerator.sync_gradients:
                training.end()
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        done += 1
        training.event.between(training, done)
        if event.evaluates and done % EVERY == 0:
            training.evaluate()
        if done % EVERY == 0 and (event.saves or event.resumes):
            accelerator.save_state(folder)
            accelerator.unwrap_model(model).save_pretrained(training.folder / "model", save_function=accelerator.save)
        if done == training.stop:
            break


class Module(lightning.LightningModule):
    """Trains a model in Lightning."""

    def __init__(self, training: Training):
        super().__init__()
        self.model, self.training_of = training.model, training

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.training_of.begin()
        loss = self.training_of.losses_of(self.model, batch)
        self.training_of.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.training_of.end()

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        if (index + 1) % self.training_of.event.micros == 0:
            self.zero_grad()  # Lightning does it after the next forward, whose peak would be that of the first step no more
            self.training_of.event.between(self.training_of, self.global_step)

    def validation_step(self, batch: Batch, index: int) -> None:
        output = self.model(**batch)
        self.training_of.metrics += [output.loss, accuracy(output.logits, batch["labels"])]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.model.save_pretrained(self.training_of.folder / "model")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.training_of.optimizer()


def lightnings(training: Training) -> None:
    event, folder = training.event, training.folder / "lightning"
    saves = event.saves or event.resumes
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=training.stop,
        accumulate_grad_batches=event.micros,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=saves,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1)] if saves else None,
        val_check_interval=EVERY if event.evaluates else None,
        limit_val_batches=1 if event.evaluates else 0,
    )
    checkpoint = next(folder.glob(f"*step={EVERY}.ckpt")) if training.resumes else None
    trainer.fit(Module(training), training.loader(), training.loader(), ckpt_path=checkpoint)


class Trainer(transformers.Trainer):
    """transformers' Trainer, which notes its losses."""

    def __init__(self, training: Training, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.training_of = training

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        loss = super().training_step(*args, **options)
        self.training_of.losses.append(loss.item())
        return loss

    def compute_loss(self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **options: Any) -> Any:
        outcome = super().compute_loss(model, dict(inputs), return_outputs, **options)
        return self.training_of.with_others(outcome, model, inputs) if model.training else outcome


class Steps(transformers.TrainerCallback):
    """Tells a training where Trainer's steps begin and end."""

    def __init__(self, training: Training):
        self.training_of = training

    def on_step_begin(self, args, state, control, **options):
        self.training_of.begin()

    def on_pre_optimizer_step(self, args, state, control, **options):
        self.training_of.end()

    def on_step_end(self, args, state, control, **options):
        self.training_of.event.between(self.training_of, state.global_step)


def transformers_trainer(training: Training) -> None:
    event, model = training.event, training.model
    saves = "steps" if event.saves or event.resumes else "no"
    arguments = transformers.TrainingArguments(
        str(training.folder),
        use_cpu=True,
        max_steps=training.stop,
        per_device_train_batch_size=B,
        report_to=[],
        per_device_eval_batch_size=B,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=event.micros,
        label_smoothing_factor=event.smoothing,
        save_strategy=saves,
        save_steps=EVERY,
        disable_tqdm=True,
        eval_strategy="steps" if event.evaluates else "no",
        eval_steps=EVERY,
        logging_strategy="no",
        gradient_checkpointing=event.gradient_checkpointing,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    optimizer = training.optimizer()
    trainer = Trainer(
        training,
        model,
        arguments,
        training.collate,
        training.dataset,
        training.dataset[:B],
        callbacks=[Steps(training)],
        processing_class=tokenizer() if event.tokenizer else None,
        compute_metrics=_accuracy if event.evaluates else None,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=training.resumes)
    training.metrics += [line[key] for line in trainer.state.log_history for key in line if key in METRICS]


METRICS = ("eval_loss", "eval_accuracy")


def _accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {"accuracy": accuracy(torch.from_numpy(logits), torch.from_numpy(predicted.label_ids))}


LOOPS = {"Trainer": transformers_trainer, "Lightning": lightnings, "accelerate": accelerated, "own": own}


def built(loop: str, event: str, name: str, folder: Path, converts: bool) -> Training:
    """Returns a training of a model that is built anew and, if `converts`, converted."""
    torch.manual_seed(0)
    happens = EVENTS[event]
    model = happens.prepare(MODELS[name]()).train()
    training = Training(name, happens, folder, model)
    folder.mkdir(exist_ok=True)
    training.before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if converts:
        training.conversion = ckptkern.convert(model, **training.small())
        training.measure()
    if happens.gradient_checkpointing and loop != "Trainer":
        model.gradient_checkpointing_enable()
    if happens.tokenizer and loop != "Trainer":
        special = tokenizer()
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(model.config, key, getattr(special, key))
    return training


def trained(loop: str, event: str, name: str, folder: Path, converts: bool) -> list[Training]:
    """Returns the trainings of a run: one or, of a run that resumes, one that stops early and one that goes on."""
    runs = [built(loop, event, name, folder, converts)]
    if EVENTS[event].resumes:
        runs[0].stop = EVERY
        LOOPS[loop](runs[0])
        runs.append(built(loop, event, name, folder, converts))
        runs[1].resumes = True
    LOOPS[loop](runs[-1])
    return runs
