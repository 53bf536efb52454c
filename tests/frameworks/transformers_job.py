"""The Trainer of Transformers over a kvstore, in one worker of a job, or without one in a process alone; see `jobs`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations.transformers import KVStoreTrainer, join
from tests.frameworks.jobs import BATCH, EPOCHS, EXAMPLES, fail_at_third, numbers, rank_of_process, run_cases

ALONE = sys.argv[2:] == ["alone"]
WORDS, LENGTH = 20, 5
EVALUATED = ("eval_loss", "eval_accuracy", "eval_examples")


class Sentences(Dataset):  # type: ignore[type-arg]
    """Sentences of which different numbers of words count, so that a mean over words is none over workers."""

    def __init__(self, count: int = EXAMPLES) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=drawn)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, at: int) -> dict[str, Any]:
        self.seen.append(int(at))
        words = self.words[at]
        return {"input_ids": words, "labels": torch.where(torch.arange(LENGTH) < 2 + at % 4, words, -100)}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(rank_of_process())
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def accuracy(prediction: Any) -> dict[str, float]:
    found = np.argmax(prediction.predictions, -1) == prediction.label_ids
    return {"accuracy": float(found.mean()), "examples": len(found)}


def trainer_in(folder: Path, data: Sentences, **options: Any) -> transformers.Trainer:
    given = {"num_train_epochs": EPOCHS, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    given |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, **options}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH * (2 if ALONE else 1), use_cpu=True, **given
    )
    parts = {"train_dataset": data, "eval_dataset": Sentences(16), "compute_metrics": accuracy}
    if ALONE:
        return transformers.Trainer(make_model(), args, **parts)
    return KVStoreTrainer(make_model(), args, workers=WORKERS, **parts)


def trained(
    folder: Path, change: Callable[[transformers.Trainer], object] = lambda trainer: None, **options: Any
) -> dict[str, Any]:
    data = Sentences()
    trainer = trainer_in(folder, data, **options)
    change(trainer)
    trainer.train()
    scaler = trainer.accelerator.scaler
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    return {
        "weights": numbers(trainer.model),
        "seen": data.seen,
        "losses": [row["loss"] for row in logs],
        "norms": [row["grad_norm"] for row in logs],
        "rates": [row["learning_rate"] for row in logs],
        "evaluated": {n: v for n, v in trainer.evaluate().items() if n in EVALUATED},
        "predicted": trainer.predict(Sentences(13)).predictions.tolist(),
        "scale": None if scaler is None else scaler.get_scale(),
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
    }


def whole_run(folder: Path) -> dict[str, Any]:
    return trained(folder, save_strategy="epoch")


def resumed(folder: Path) -> list[float]:
    """The second epoch again, from what `whole_run` has saved of the first."""
    trainer = trainer_in(folder, Sentences())
    trainer.train(resume_from_checkpoint=str(folder.parent / "whole_run" / "checkpoint-4"))
    return numbers(trainer.model)


def accumulated(folder: Path) -> dict[str, Any]:
    return trained(folder, gradient_accumulation_steps=2)


def without_a_limit(folder: Path) -> dict[str, Any]:
    return trained(folder, max_grad_norm=0.0)


def in_bfloat16(folder: Path) -> dict[str, Any]:
    return trained(folder, bf16=True)


def in_float16(folder: Path) -> dict[str, Any]:
    """What fp16 does on a GPU, here on a CPU; in the first step the loss of one worker overflows."""
    factors = itertools.chain([1e38], itertools.repeat(1.0))
    kinds = set()

    def change(trainer: transformers.Trainer) -> None:
        accelerator, compute = trainer.accelerator, trainer.compute_loss
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**8)
        if not ALONE:
            accelerator.follow(WORKERS, {})

        def overflowing(*args: Any, **options: Any) -> Any:
            found = compute(*args, **options)
            is_chosen = trainer.model.training and (ALONE or rank_of_process() == 1)
            return found * next(factors) if is_chosen else found

        trainer.compute_loss = overflowing
        attention = trainer.model.transformer.h[0].attn.c_attn
        attention.register_forward_hook(lambda net, given, found: kinds.add(str(found.dtype)))

    # In one process a fused AdamW would hide from accelerate, and so from schedules, that its step was skipped.
    found = trained(folder, change, fp16=True, optim="adamw_torch")
    return {**found, "kinds": sorted(kinds)}


def from_the_best_on(folder: Path) -> list[list[float]]:
    """The weights after two epochs of which the first was the best, after two more, and again from the first on."""
    saving = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    trainer = trainer_in(folder, Sentences(), metric_for_best_model="good", **saving)
    falling = itertools.count(0, -1)
    trainer.compute_metrics = lambda _: {"good": next(falling)}
    trainer.train()
    found = [numbers(trainer.model)]
    for checkpoint in (None, str(folder / "checkpoint-4")):
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append(numbers(trainer.model))
    return found


def with_a_buffer(folder: Path) -> list[float]:
    """A buffer that each worker has written to, in an evaluation."""
    trainer = trainer_in(folder, Sentences())
    trainer.model.register_buffer("mine", torch.tensor([float(rank_of_process())]))
    trainer.evaluate()
    found: list[float] = trainer.model.mine.tolist()
    return found


def fails(folder: Path) -> None:
    """Train while a worker raises an error after two batches."""
    trainer = trainer_in(folder, Sentences())
    fail_at_third(trainer.model)
    trainer.train()


CASES = (
    whole_run,
    resumed,
    accumulated,
    without_a_limit,
    in_bfloat16,
    in_float16,
    with_a_buffer,
    from_the_best_on,
)

if __name__ == "__main__":
    if sys.argv[2:] == ["late"]:
        early = TrainingArguments(sys.argv[1], use_cpu=True)
        try:
            KVStoreTrainer(make_model(), early, workers=join("dist_sync"))
        except ConfigurationError as error:
            print(f"refused: {error}")
    else:
        WORKERS = None if ALONE else join("dist_sync")
        if sys.argv[2:] == ["fails"]:
            fails(Path(sys.argv[1]))
        else:
            run_cases(CASES)
