"""Scores of a model on records: of classes, several labels, numbers, texts. The noise does not protect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pmlf import data
from pmlf.basics.batches import to_device
from pmlf.data.targets import IGNORED, token_losses
from pmlf.experiments.form import ModelForm
from pmlf.run.evaluation import (
    AnyScore,
    confusion_matrix,
    score,
    score_of_labels,
    score_of_texts,
    score_of_values,
)

BATCH_SIZE = 500
_TEXTS_AT_ONCE = 8  # each token has as many logits as there are words


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
    if isinstance(target, data.NextToken):
        return _scored_texts(form, model, records, collate_fn)
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
    found = [(outputs.cpu(), truth.cpu()) for outputs, truth in _passed(form, model, records, collate_fn, BATCH_SIZE)]
    outputs, truth = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(truth)


def _scored_texts(
    form: ModelForm, model: nn.Module, records: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> AnyScore:
    """The perplexity of texts. Logits are not kept."""
    losses, counts = [], []
    for logits, tokens in _passed(form, model, records, collate_fn, _TEXTS_AT_ONCE):
        losses.append(token_losses(logits[:, :-1].float(), tokens[:, 1:]).sum(1).cpu())
        counts.append(tokens[:, 1:].ne(IGNORED).sum(1).cpu())
    return score_of_texts(torch.cat(losses), torch.cat(counts))


def _passed(
    form: ModelForm,
    model: nn.Module,
    records: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and labels batch by batch, in eval mode and without gradients. The model's mode is restored."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        for batch in DataLoader(records, batch_size=batch_size, collate_fn=collate_fn, generator=torch.Generator()):
            moved = to_device(batch, device)
            with torch.inference_mode():
                outputs = form.outputs(model, moved)
            yield outputs, form.truth(moved)
    finally:
        model.train(was_training)
