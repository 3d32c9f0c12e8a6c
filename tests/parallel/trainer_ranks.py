"""What every process of `test_huggingface_processes.py` does: a private training, then that of the plain loop.

Each process writes what it found to a file of its own, and the test process compares.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import EvalPrediction, TrainerCallback

from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer
from small_trainers import PRIVACY, arguments, classifier, plain_loop, records

RECORDS, EACH = 160, 12  # B = 72: above 64, a single process adds up in float64 too
STEPS_OF_THE_LOOP = {"warmup_steps": 2, "optim": "adamw_torch", "weight_decay": 0.1}


class Asked:
    """Records that note which of them are loaded."""

    def __init__(self) -> None:
        self._rows = records(RECORDS)
        self.indices: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        self.indices.append(index)
        return self._rows[index]


class Loaded(TrainerCallback):
    """The records that were loaded in each step."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.steps: list[list[int]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._asked.indices.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(sorted(self._asked.indices))


def counted(made: EvalPrediction) -> dict[str, float]:
    return {"records": len(made.label_ids)}


def private(folder: Path, *, processes: int, seed: int, resume: Path | None = None) -> tuple[PrivateTrainer, Loaded]:
    """Train on some processes: the expected batch size and the micro-batches do not depend on their number."""
    asked = Asked()
    loaded = Loaded(asked)
    accumulation = 6 // processes
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, **STEPS_OF_THE_LOOP}
    trainer = PrivateTrainer(
        classifier(seed),
        arguments(folder, per_device_train_batch_size=EACH, gradient_accumulation_steps=accumulation, **options),
        train_dataset=asked,
        eval_dataset=records(19),  # an odd number
        compute_metrics=counted,
        callbacks=[loaded],
        privacy=PrivacyArguments(**PRIVACY, assume_independent_samples=True),  # the proof takes seconds
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, loaded


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer, loaded = private(folder / "out", processes=2, seed=rank)  # rank 0's weights count
    decayed = trainer.get_decay_parameter_names(trainer.model)
    found = {
        "trained": trainer.model.state_dict(),
        "loop": plain_loop(decayed, records(RECORDS), 6 * EACH, EACH).model.state_dict(),
        "loaded": loaded.steps,
        "wrapped": type(trainer.model_wrapped).__name__,
        "certificate": trainer.certificate(),
        "history": trainer.state.log_history,
    }
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
