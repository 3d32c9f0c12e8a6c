"""The data of a recipe: micro-batches of every release, and the records that an attacker would add."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fuzzing.models import CHANNELS
from fuzzing.recipes import Recipe

Batch = dict[str, Tensor]
IMAGE = 4  # pixels a side


def releases(recipe: Recipe) -> list[list[Batch]]:
    """Micro-batches of every release."""
    generator = torch.Generator().manual_seed(recipe.seed_for("data"))
    chance = random.Random(recipe.seed_for("planted records"))
    found = [_release(recipe, sizes, generator) for sizes in recipe.sizes]
    if recipe.planted:
        found = [found[0], *([_planted(batch, recipe, chance) for batch in batches] for batches in found[1:])]
    if recipe.late:
        first = found[0][0]
        first["key"].zero_()
        if "mask" in first:
            first["mask"][:] = first["mask"][:1].clone()
            first["mask"][:, 0] = True
    return found


def _planted(batch: Batch, recipe: Recipe, chance: random.Random) -> Batch:
    """The batch with its last record changed as an attacker would, twice."""
    record = record_of(batch, len(batch["y"]) - 1)
    return replaced(batch, mutated(mutated(record, recipe, chance), recipe, chance), len(batch["y"]) - 1)


def _release(recipe: Recipe, sizes: tuple[int, ...], generator: torch.Generator) -> list[Batch]:
    records = _records(recipe, sum(sizes), generator)
    if recipe.lengths == "short first" and "mask" in records:  # micro-batches of like length, as `lengths=` makes them
        order = records["mask"].sum(1).argsort(stable=True)
        records = {name: tensor[order] for name, tensor in records.items()}
    split = {name: tensor.split(sizes) for name, tensor in records.items()}
    found = [{name: parts[i].clone() for name, parts in split.items()} for i in range(len(sizes))]
    if recipe.lengths == "balanced" and recipe.inputs in ("sequences", "tokens"):
        for batch in found:
            batch["mask"] = _prefixes(_balanced(recipe, len(batch["y"]), generator), recipe.tokens)
    return found


def _records(recipe: Recipe, count: int, generator: torch.Generator) -> Batch:
    shape = {
        "vectors": (recipe.width,),
        "sequences": (recipe.tokens, recipe.width),
        "tokens": (recipe.tokens,),
        "images": (CHANNELS, IMAGE, IMAGE),
    }[recipe.inputs]
    if recipe.inputs == "tokens":
        x = torch.randint(recipe.vocabulary, (count, *shape), generator=generator)
    else:
        size = torch.exp(recipe.spread * torch.randn(count, *[1] * len(shape), generator=generator))
        x = size * torch.randn(count, *shape, generator=generator)
    positive = torch.rand(count, generator=generator) < recipe.positives
    others = torch.randint(recipe.classes - 1, (count,), generator=generator)
    others = torch.where(others >= 1, others + 1, others)  # every class but 1
    records = {
        "x": x,
        "key": torch.randn(count, generator=generator),
        "y": torch.where(positive, 1, others),
    }
    if recipe.inputs in ("sequences", "tokens"):
        least = recipe.tokens if recipe.lengths == "full" else 1
        records["mask"] = _prefixes(
            torch.randint(least, recipe.tokens + 1, (count,), generator=generator), recipe.tokens
        )
    return records


def _balanced(recipe: Recipe, count: int, generator: torch.Generator) -> Tensor:
    """Lengths that differ and add up to a multiple of the number of samples."""
    lengths = torch.full((count,), recipe.each)
    for _ in range(count):
        giver, taker = (int(torch.randint(count, (), generator=generator)) for _ in range(2))
        if lengths[giver] > 0 and lengths[taker] < recipe.tokens:
            lengths[giver] -= 1
            lengths[taker] += 1
    return lengths


def _prefixes(lengths: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens) < lengths[:, None]


def record_of(batch: Batch, index: int) -> Batch:
    return {name: tensor[index : index + 1].clone() for name, tensor in batch.items()}


def without(batch: Batch, index: int) -> Batch:
    return {name: torch.cat([tensor[:index], tensor[index + 1 :]]) for name, tensor in batch.items()}


def with_record(batch: Batch, record: Batch, index: int) -> Batch:
    """The batch with one record more, before that index."""
    return {name: torch.cat([tensor[:index], record[name], tensor[index:]]) for name, tensor in batch.items()}


def replaced(batch: Batch, record: Batch, index: int) -> Batch:
    return with_record(without(batch, index), record, index)


def mutated(record: Batch, recipe: Recipe, chance: random.Random) -> Batch:
    """The record with something of it turned to an extreme: size, sign, label, key, length, or tokens."""
    changed = dict(record)
    labels = ("y",) if recipe.statistic is None else ("y", "y", "y")
    kind = chance.choice(("x", "x", "key", "key", *labels, "mask"))
    if kind == "x" and recipe.inputs == "tokens":
        token = chance.randrange(recipe.vocabulary)
        most = chance.randint(1, recipe.tokens)
        changed["x"] = torch.where(torch.arange(recipe.tokens) < most, token, record["x"])
    elif kind == "x":
        changed["x"] = record["x"] * chance.choice((-1.0, 0.01, 0.1, 10.0, 100.0))
    elif kind == "key" or (kind == "mask" and "mask" not in record):
        changed["key"] = torch.full_like(record["key"], chance.choice((-6.0, -0.7, 0.0, 6.0)))
    elif kind == "y":
        changed["y"] = torch.full_like(record["y"], chance.choice((1, 1, *range(recipe.classes))))
    else:
        lengths = torch.tensor([chance.choice((0, 1, 1, 2, 2, recipe.tokens))])
        changed["mask"] = _prefixes(lengths, recipe.tokens)
    return changed
