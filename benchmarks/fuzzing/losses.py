"""The loss of a recipe: one number a sample, some with statistics of the batch in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzzing.layers import holds
from fuzzing.recipes import Data, Recipe


@dataclass(frozen=True)
class Loss(Data):
    """A function of (model, batch)."""

    recipe: Recipe

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        recipe, statistic = self.recipe, self.recipe.statistic
        logits: Tensor = model(batch)
        inside = statistic is not None and holds(statistic.when, model.training, batch["key"])
        if statistic is not None and inside and statistic.kind == "centred logits":
            logits = logits - logits.mean(0, keepdim=True)
        loss = _of_tokens(logits, batch) if recipe.head == "tied" else _of_classes(recipe, logits, batch["y"])
        if statistic is None or not inside:
            return loss
        return _with_statistic(statistic.kind, loss, logits, batch["y"], recipe.classes)


def _of_classes(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    if recipe.loss == "squares":
        return (logits - F.one_hot(labels, recipe.classes).to(logits)).square().sum(1)
    weights = torch.linspace(0.5, 2.0, recipe.classes).to(logits) if recipe.loss == "weighted" else None
    return F.cross_entropy(logits, labels, weight=weights, reduction="none")


def _of_tokens(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    if logits.ndim == 2:
        return F.cross_entropy(logits, batch["x"][:, 0], reduction="none")
    losses = F.cross_entropy(logits[:, :-1].mT, batch["x"][:, 1:], reduction="none")
    counted = batch["mask"][:, 1:].to(losses)
    return (losses * counted).sum(1) / counted.sum(1).clamp(min=1.0)


def _with_statistic(kind: str, loss: Tensor, logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    samples, positive = len(loss), labels == 1
    if kind == "class weights":
        counts = torch.bincount(labels, minlength=classes).clamp(min=1)
        return loss * (samples / (classes * counts)).to(loss)[labels]
    if kind == "inverse frequencies":  # scaled to add up to the number of classes
        weights = 1.0 / torch.bincount(labels, minlength=classes).clamp(min=1).to(loss)
        return loss * (classes * weights / weights.sum())[labels]
    if kind == "positives":
        return loss / positive.sum().clamp(min=1)
    if kind == "positives read":
        return loss / max(1, int(positive.sum().item()))
    if kind == "contrastive":
        codes = F.normalize(logits.flatten(1) + 0.1, dim=1)
        return loss + F.cross_entropy(3.0 * codes @ codes.mT, torch.arange(samples), reduction="none")
    if kind == "batch size":
        return loss / samples
    if kind == "hardest":
        return loss * (loss.detach() >= loss.detach().median())
    if kind == "largest":
        return loss / (loss.detach().max() + 0.1)
    assert kind == "centred logits"
    return loss
