"""The model of a recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuzzing.layers import ACTIVATIONS, PROMPT, Routed, holds, made
from fuzzing.recipes import Memory, Mixture, Recipe

CHANNELS = 2  # of images


def build(recipe: Recipe) -> nn.Module:
    """Its model, with weights drawn by the recipe's seed and index, in its mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed_for("weights"))
        model = Fuzzed(recipe)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(recipe.gain)
            if recipe.head == "zero":
                model.head.weight.zero_()
    return model.train(recipe.training)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma: scaled by the class that looks it up, and not where it is tied to the head."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Fuzzed(nn.Module):
    """Stem, blocks, pool, head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.width
        self.inputs, self.activation = recipe.inputs, recipe.activation
        self.stem: nn.Module = nn.Linear(width, width)
        if recipe.inputs == "tokens":
            self.stem = (ScaledEmbedding if recipe.scaled else nn.Embedding)(recipe.vocabulary, width)
        elif recipe.inputs == "images":
            self.stem = nn.Conv2d(CHANNELS, width, 3, stride=2, padding=1)
        self.memory = None if recipe.memory is None else Remembering(recipe.memory, width)
        most = max(recipe.tokens, 4) + PROMPT * len(recipe.blocks)
        self.blocks = nn.ModuleList(
            Routed(block, made(block.layer, width, recipe.activation, most)) for block in recipe.blocks
        )
        self.mixture = None if recipe.mixture is None else Mixing(recipe.mixture)
        self.tied, self.pooled = recipe.head == "tied", recipe.pooled
        self.head = nn.Linear(width, recipe.vocabulary if self.tied else recipe.classes, bias=not self.tied)
        if self.tied:
            self.head.weight = self.stem.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (n, classes); of a tied one (n, tokens, vocabulary), or (n, vocabulary) where it is pooled."""
        keys, mask = batch["key"], batch.get("mask")
        rows = self.stem(batch["x"])
        if self.inputs == "images":
            rows = ACTIVATIONS[self.activation](rows).flatten(2).mT
        if self.memory is not None:
            rows = self.memory(rows, keys)
        prompts = 0
        for index, block in enumerate(self.blocks):
            rows = self._mixed(rows, keys, index)
            before = rows.shape[1]
            rows = block(rows, mask, keys)
            if rows.ndim == 3 and rows.shape[1] > before:
                prompts += rows.shape[1] - before
                mask = mask if mask is None else torch.cat([mask.new_ones(len(mask), PROMPT), mask], 1)
        rows = self._mixed(rows, keys, len(self.blocks))
        if self.tied and not self.pooled:
            causal = rows.cumsum(1) / torch.arange(1, rows.shape[1] + 1)[:, None]
            found: Tensor = self.head(causal[:, prompts:])
            return found
        found = self.head(_pooled(rows, mask))
        return found

    def _mixed(self, rows: Tensor, keys: Tensor, index: int) -> Tensor:
        if self.mixture is None or self.mixture.recipe.before != index:
            return rows
        found: Tensor = self.mixture(rows, keys)
        return found


def _pooled(rows: Tensor, mask: Tensor | None) -> Tensor:
    if rows.ndim == 2:
        return rows
    if mask is None:
        return rows.mean(1)
    counted = mask.unsqueeze(2).to(rows)
    return (rows * counted).sum(1) / counted.sum(1).clamp(min=1.0)


class Mixing(nn.Module):
    """An operation across samples."""

    def __init__(self, recipe: Mixture) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        if not holds(self.recipe.when, self.training, keys):
            return rows
        return _across(self.recipe.operation, rows, keys)


def _across(operation: str, rows: Tensor, keys: Tensor) -> Tensor:
    samples, trailing = len(rows), [1] * (rows.ndim - 1)
    if operation == "centre":
        return rows - rows.mean(0, keepdim=True)
    if operation == "standardise":
        return (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-3).sqrt()
    if operation == "roll":
        return 0.5 * (rows + rows.roll(1, 0))
    if operation == "swap":
        return 0.6 * rows + 0.4 * rows[torch.randperm(samples)]
    if operation == "attend":
        flat = rows.flatten(1)
        return rows + ((flat @ flat.mT).softmax(1) @ flat).view_as(rows)
    if operation == "fours":
        if samples % 4:
            return rows
        groups = rows.unflatten(0, (-1, 4))
        return (groups - groups.mean(1, keepdim=True)).flatten(0, 1)
    if operation == "nudge":
        return rows + 0.5 * rows[:1].sign()
    if operation == "rank":
        return rows + 0.5 * (keys.argsort().argsort() % 4).to(rows).view(-1, *trailing)
    if operation == "cumsum":
        return rows + 0.3 * rows.cumsum(0)
    if operation == "size":
        return rows * (0.5 + samples % 3)
    assert operation == "largest"
    return rows / (rows.detach().abs().max() + 0.1)


class Remembering(nn.Module):
    """Shifts rows by what it keeps of the data: in a buffer, an attribute or a parameter. A cache keeps positions."""

    def __init__(self, recipe: Memory, width: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.kept: Tensor | None
        if recipe.kind == "running buffer":
            self.register_buffer("kept", torch.zeros(width))
        elif recipe.kind == "frozen parameter":
            self.kept = nn.Parameter(torch.zeros(width), requires_grad=False)
        elif recipe.kind == "initialised parameter":
            self.kept = nn.Parameter(torch.zeros(width))
            self.initialised = False
        elif recipe.kind != "lazy buffer":
            self.kept = None

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        kind, mean = self.recipe.kind, rows.detach().flatten(0, -2).mean(0)
        if kind == "cache":
            if rows.ndim == 2:
                return rows
            if self.kept is None or len(self.kept) != rows.shape[1]:
                self.kept = torch.arange(rows.shape[1])
            return rows + torch.sin(self.kept.to(rows))[:, None]
        before = getattr(self, "kept", None)
        if holds(self.recipe.when, self.training, keys):
            self._remember(kind, mean)
        kept = before if kind == "last batch" else getattr(self, "kept", None)
        return rows if kept is None else rows - kept

    def _remember(self, kind: str, mean: Tensor) -> None:
        if kind == "lazy buffer":
            if "kept" not in self._buffers:
                self.register_buffer("kept", mean)
        elif kind == "lazy attribute":
            self.kept = mean if self.kept is None else self.kept
        elif kind == "last batch":
            self.kept = mean
        elif kind == "initialised parameter":
            assert self.kept is not None
            if not self.initialised:
                self.kept.data.copy_(mean)
                self.initialised = True
        else:
            assert self.kept is not None
            self.kept.data.mul_(0.9).add_(0.1 * mean)
