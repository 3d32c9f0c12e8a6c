"""A small `PrivateTrainer` that several tests start from, and the plain loop that takes the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import pmlf
from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer

LENGTH = 6
SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
PRIVACY: dict[str, Any] = {"noise_multiplier": 0.8, "target_delta": 1e-3, "noise_seed": 5, "method": "dp-pmlf"}


def bert(**changed: Any) -> BertConfig:
    return BertConfig(**SMALL, max_position_embeddings=16, **changed)


def records(number: int = 48) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 20, (number, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": row, "attention_mask": mask, "labels": row.sum() % 2} for row in ids]


def classifier(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(bert(num_labels=2))


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.7,
        "adam_beta1": 0.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **(given | changed))


def trainer(folder: Path, model: nn.Module | None = None, **changed: Any) -> PrivateTrainer:
    return PrivateTrainer(
        classifier() if model is None else model,
        arguments(folder, **changed),
        train_dataset=records(),
        privacy=PrivacyArguments(**PRIVACY),
    )


def plain_loop(decayed: list[str], dataset: Any, batch_size: int, together: int) -> pmlf.PrivateRun:
    """Train `classifier()` as a trainer does with `warmup_steps=2, optim="adamw_torch", weight_decay=0.1`.

    Args:
        decayed: The names of the parameters that decay.
        dataset: The records.
        batch_size: The expected batch size.
        together: The size of a micro-batch.
    """
    model = classifier().train()
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.0, 0.999))
    run = pmlf.make_private(
        model=model,
        optimizer=optimizer,
        scheduler=get_linear_schedule_with_warmup(optimizer, 2, 4),
        dataset=dataset,
        loss_fn=lambda model, batch: F.cross_entropy(
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
            batch["labels"],
            reduction="none",
        ),
        method="dp-pmlf",
        noise_multiplier=0.8,
        target_delta=1e-3,
        batch_size=batch_size,
        steps=4,
        clip_norm=0.7,
        max_physical_batch_size=together,
        seed=5,
        assume_independent_samples=True,  # the proof takes seconds
    )
    for batch in run.batches():
        run.step(batch)
    return run
