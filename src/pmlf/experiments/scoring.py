"""Scores of a model on records: of classes, of several labels, of numbers. The noise does not protect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pmlf import data
from pmlf.basics.batches import to_device
from pmlf.experiments.form import ModelForm
from pmlf.run.evaluation import Score, ValueScore, confusion_matrix, score, score_of_labels, score_of_values

AnyScore = Score | ValueScore
BATCH_SIZE = 500


def scored(
    form: ModelForm, model: nn.Module, records: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> AnyScore:
    """Evaluate a model on records, in eval mode: by the kind of its target."""
    target = form.target
    if isinstance(target, data.Classes):
        confusion = confusion_matrix(
            model, records, logits=form.outputs, labels=form.truth, batch_size=BATCH_SIZE, collate_fn=collate_fn
        )
        return score(confusion, with_f1="f1" in form.metrics)
    outputs, truth = predicted(form, model, records, collate_fn)
    if isinstance(target, data.LabelSet):
        return score_of_labels(outputs > 0, truth > 0.5)
    scaled = torch.stack([outputs.squeeze(-1), truth], dim=1)  # both in the scaled range
    prediction, value = target.activated(scaled).unbind(1)
    return score_of_values(prediction, value)


def predicted(
    form: ModelForm, model: nn.Module, records: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> tuple[Tensor, Tensor]:
    """Outputs and labels of all records, in eval mode and without gradients. The model's mode is restored."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    found: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.inference_mode():
            for batch in DataLoader(records, batch_size=BATCH_SIZE, collate_fn=collate_fn, generator=torch.Generator()):
                moved = to_device(batch, device)
                found.append((form.outputs(model, moved).cpu(), form.truth(moved).cpu()))
    finally:
        model.train(was_training)
    outputs, truth = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(truth)
