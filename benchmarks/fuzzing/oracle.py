"""The library under test on a recipe, held to what it promises, in float64 and by the records an attacker would add.

Noise is off, B is 1 and the filter is the identity, so that `p.grad` is the sum before noise. Promised are:
- one record moves that sum by at most C. Where randomness enters it is the last one, so that the others' draws are the
  same; where they cannot be, a record is exchanged, which moves the sum by at most 2 C.
- where samples do not influence each other the sum is that of clipped gradients, taken one sample at a time in float64.
- `accumulate` leaves the model as it was, names and bits, also where it refuses.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import pmlf
from fuzzing import data, models, reference
from fuzzing.data import Batch
from fuzzing.losses import Loss
from fuzzing.recipes import Recipe

ROUNDING = 1e-3  # of the clip norm
ATTACKS, ATTACKS_ON_OTHERS = 12, 2  # neighbours of a release tried; of the first, or of an honest recipe
ENOUGH = 3.0  # times what one record may do: no worse one is looked for
FAR = 1e9  # stands for a sum that is not finite
_PACKAGE = str(Path(pmlf.__file__).parent)


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A promise that does not hold."""

    kind: Literal["moved", "wrong", "kept", "kept after a refusal", "kept by check"]
    release: int
    multiple: float | None = None  # of what one record may move the sum by; of C where the sum is wrong
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a recipe."""

    outcome: Literal["accepted", "refused", "bug"]
    said: str = ""  # the refusal, or the bug
    holes: tuple[Hole, ...] = ()
    moved: float = 0.0  # the most that one record moved the sum, as a multiple of what it may


class _Refused(Exception):
    """The library has said no, by a sentence of its own."""


class _Broken(Exception):
    """An error that is no sentence of the library's."""


def judged(recipe: Recipe) -> Verdict:
    """Run the library on a recipe and measure what it promises."""
    trial = _Trial(recipe)
    try:
        trial.run()
    except _Refused as refusal:
        return Verdict(outcome="refused", said=str(refusal), holes=tuple(trial.holes), moved=trial.moved)
    except _Broken as broken:
        return Verdict(outcome="bug", said=str(broken), holes=tuple(trial.holes), moved=trial.moved)
    return Verdict(outcome="accepted", holes=tuple(trial.holes), moved=trial.moved)


class _Trial:
    """One run of the library on a recipe, release by release."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = models.build(recipe)
        self.loss = Loss(recipe)
        self.chance = random.Random(recipe.seed_for("attacks"))
        self.iterates: list[list[Tensor]] = []  # newest first, in float64
        self.holes: list[Hole] = []
        self.moved = 0.0

    def run(self) -> None:
        recipe = self.recipe
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if recipe.memory is not None:
                self._check()
            step = self._guarded(0, self._make_step)
            for _ in range(recipe.warm_up):
                self._iterate()
                step.release()
                self._wander()
            for number, batches in enumerate(data.releases(recipe)):
                self._iterate()
                before = copy.deepcopy(step)
                self._accumulate(step, batches, number)
                self._guarded(number, step.release)
                summed = _gradients(step)
                if not (recipe.mixes or recipe.random):
                    self._compare(summed, batches, number)
                self._attack(before, batches, summed, number)
                with torch.no_grad():
                    samples = sum(recipe.sizes[number])
                    for parameter in step.trained:
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=recipe.learning_rate / samples)

    def _check(self) -> None:
        """`pmlf.check` changes nothing, whatever it says; on a copy, so that the step has the model as it was."""
        model, batch = copy.deepcopy(self.model), data.releases(self.recipe)[0][0]
        with contextlib.suppress(_Refused):
            _said(partial(pmlf.check, model, self.loss, batch, clip_norm=self.recipe.clip_norm))
        changed = _differences(dict(self.model.state_dict()), dict(model.state_dict()))
        if changed:
            self.holes.append(Hole(kind="kept by check", release=0, detail=", ".join(changed)))

    def _make_step(self) -> pmlf.PrivateStep:
        return pmlf.PrivateStep(
            self.model,
            self.loss,
            method=reference.method(self.recipe.window),
            clip_norm=self.recipe.clip_norm,
            noise_multiplier=0.0,
            expected_batch_size=1.0,
            generator=torch.Generator().manual_seed(self.recipe.seed_for("step")),
            gradients=self.recipe.gradients,
        )

    def _accumulate(self, step: pmlf.PrivateStep, batches: Sequence[Batch], number: int) -> None:
        for batch in batches:
            self._guarded(number, partial(step.accumulate, batch))

    def _guarded(self, number: int, action: Callable[[], Any]) -> Any:
        """Do it; the model must be as it was, names and bits, whether that is refused or not."""
        saved = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        refusal: _Refused | None = None
        found = None
        try:
            found = _said(action)
        except _Refused as error:
            refusal = error
        changed = _differences(saved, self.model.state_dict())
        if changed:
            kind: Literal["kept", "kept after a refusal"] = "kept after a refusal" if refusal else "kept"
            self.holes.append(Hole(kind=kind, release=number, detail=", ".join(changed)))
        if refusal is not None:
            raise refusal
        return found

    def _iterate(self) -> None:
        self.iterates.insert(0, [p.detach().double() for p in self._trained()])

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _wander(self) -> None:
        """Another iterate, by chance; zeros stay zeros."""
        generator = torch.Generator().manual_seed(len(self.iterates))
        with torch.no_grad():
            for parameter in self._trained():
                parameter.mul_(1.0 + 0.1 * torch.randn(parameter.shape, generator=generator))

    def _compare(self, summed: Tensor, batches: Sequence[Batch], number: int) -> None:
        """The sum must be that of one sample at a time in float64."""
        clip_norm = self.recipe.clip_norm
        expected, terms = reference.clipped_sum(
            self.model, self.loss, self.iterates, self.recipe.window, clip_norm, batches
        )
        wrong = float((summed - expected).norm()) / clip_norm
        if not wrong <= ROUNDING * max(1.0, 0.1 * terms / clip_norm):
            self.holes.append(Hole(kind="wrong", release=number, multiple=wrong))

    def _attack(self, before: pmlf.PrivateStep, batches: Sequence[Batch], summed: Tensor, number: int) -> None:
        """Look for a record that moves the sum too far: some at random, then others from the best one on."""
        recipe, best, first = self.recipe, _Attempt(), number == 0
        if recipe.honest and first and not self.holes:  # every copy would look at its first samples, which takes long
            return
        remembers = recipe.memory is not None
        which = self.chance.randrange(1 if first and len(batches) > 1 and not remembers else 0, len(batches))
        # other micro-batches add the same to both sums, but for what the model remembers
        context = batches if first or remembers else batches[which : which + 1]
        base = _summed(before, context) if len(context) < len(batches) else summed
        if base is None:  # alone it is refused
            return
        place = which if context is batches else 0
        tries = ATTACKS if self.holes or not (first or recipe.honest) else ATTACKS_ON_OTHERS * (1 + remembers)
        for attempt in range(tries):
            start = best if attempt >= tries // 2 else _Attempt()
            found = self._attempt(start, context[place], attempt == 0)
            neighbour = _summed(before, [*context[:place], found.batch, *context[place + 1 :]])
            distance = 0.0 if neighbour is None else float((neighbour - base).norm().nan_to_num(FAR, FAR))
            found = replace(found, moved=distance / (recipe.clip_norm * (2.0 if recipe.permuted else 1.0)))
            best = max(best, found, key=lambda one: one.moved)
            if best.moved > ENOUGH:
                break
        self.moved = max(self.moved, best.moved)
        if best.moved > 1.0 + ROUNDING:
            self.holes.append(Hole(kind="moved", release=number, multiple=best.moved))

    def _attempt(self, start: _Attempt, batch: Batch, first: bool) -> _Attempt:
        """A neighbour of a micro-batch: without a sample, or with the record to start from changed a little more."""
        recipe, samples = self.recipe, len(batch["y"])
        last = recipe.random and not recipe.permuted
        if first and samples > 1 and not recipe.permuted:
            return _Attempt(batch=data.without(batch, samples - 1 if last else self.chance.randrange(samples)))
        place = start.place if start.record is not None else self.chance.randrange(samples)
        record = data.mutated(start.record or data.record_of(batch, place), recipe, self.chance)
        if recipe.permuted:
            return _Attempt(batch=data.replaced(batch, record, place), record=record, place=place)
        joined = data.with_record(batch, record, samples if last else place)
        return _Attempt(batch=joined, record=record, place=place)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A micro-batch's neighbour, by which record and where, and how far it moves the sum."""

    batch: Batch = field(default_factory=dict)
    record: Batch | None = None
    place: int = 0
    moved: float = 0.0


def _summed(before: pmlf.PrivateStep, batches: Sequence[Batch]) -> Tensor | None:
    """The sum of these micro-batches by a copy of the step; None where they are refused."""
    step = copy.deepcopy(before)
    try:
        for batch in batches:
            _said(partial(step.accumulate, batch))
        _said(step.release)
    except _Refused:
        return None
    return _gradients(step)


def _said(action: Callable[[], Any]) -> Any:
    """Do it; a refusal in the library's own words is one, any other error is a bug."""
    try:
        return action()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raised = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise ")
        if isinstance(error, (ValueError, RuntimeError)) and frame.filename.startswith(_PACKAGE) and raised:
            raise _Refused(str(error)) from error
        where = f"{Path(frame.filename).name}, {frame.name}"
        raise _Broken(f"{type(error).__name__}: {error} ({where})") from error


def _gradients(step: pmlf.PrivateStep) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in step.trained if p.grad is not None])


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names that are not in both, or hold other bits."""
    names = set(one) ^ set(other)
    names |= {name for name in set(one) & set(other) if not torch.equal(one[name], other[name])}
    return sorted(names)
