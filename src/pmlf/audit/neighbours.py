"""The model under audit: what its private steps release for two batches that differ by one record.

Everything runs through `PrivateStep` on a copy of the model. The expected batch size is 1, so a release without noise
and filter is the clipped sum itself.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pmlf.basics.batches import batch_size, select, tensors_of, to_dtype
from pmlf.engine.passes import LossFunction
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.noise import SeededRandomness, Stream
from pmlf.mechanism.shapes import NoiseShape
from pmlf.methods import Method
from pmlf.step import PrivateStep

Neighbour = Literal["left out", "replaced"]

_STRIDE, _SHORTEST_STRIDE = 0.1, 0.002  # length of an update: relative to the parameters, and per parameter


@dataclass(frozen=True, kw_only=True)
class AuditedModel:
    """A model, its loss, a method and a batch of examples.

    `parts` and `checked` are for broken variants: several methods whose releases are added up, and no checks.
    """

    model: nn.Module
    loss_fn: LossFunction
    examples: Any
    method: Method
    clip_norm: float
    parts: tuple[Method, ...] = ()
    checked: bool = True

    def without_checks(self) -> AuditedModel:
        """A copy for which the library's checks are off."""
        return replace(self, checked=False)

    def in_double(self) -> AuditedModel:
        """A copy in float64."""
        wide = copy.deepcopy(self.model).double()
        return replace(self, model=wide, examples=to_dtype(self.examples, torch.float64))


class RunRandomness(SeededRandomness):
    """Separate random streams for each run. `run` is the number of the current run.

    A step that is reset for the next run draws new noise. The observer's step in the same run draws the same dropout.
    """

    run = 0

    def stream(self, purpose: str, *numbers: int) -> Stream:
        return super().stream(purpose, self.run, *numbers)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run between two releases. All of it is public."""

    releases: int
    parameters: Sequence[Tensor]
    histories: Sequence[dict[str, Any]]


class Releases:
    """Releases of an audited model, computed on a copy of it in training or eval mode."""

    def __init__(
        self,
        audited: AuditedModel,
        *,
        training: bool,
        randomness: RunRandomness,
        noise_multiplier: float = 0.0,
        filtered: bool = False,
    ) -> None:
        self.clip_norm = audited.clip_norm
        self._model = copy.deepcopy(audited.model)
        if not training:
            self._model.eval()
        # every step is looked at by itself, with all records, so the noise of the audit is white
        methods = tuple(replace(method, noise=NoiseShape.white()) for method in audited.parts or (audited.method,))
        if not filtered:
            methods = tuple(replace(method, low_pass=LowPass()) for method in methods)
        noises = [noise_multiplier, *[0.0] * (len(methods) - 1)]
        self._steps = [
            self._step(audited, method, noise, randomness) for method, noise in zip(methods, noises, strict=True)
        ]
        self._blank = [step.state_dict() for step in self._steps]

    def _step(self, audited: AuditedModel, method: Method, noise: float, randomness: RunRandomness) -> PrivateStep:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise_multiplier=0")
            return PrivateStep(
                self._model,
                _weighted(audited.loss_fn),
                method=method,
                clip_norm=audited.clip_norm,
                noise_multiplier=noise,
                expected_batch_size=1.0,
                generator=randomness,
                assume_independent_samples=not audited.checked,
            )

    def of(self, batch: Any, weights: Tensor) -> Tensor:
        """Release one batch and return the result as a vector. `weights` multiply the losses of its samples."""
        total: Tensor | None = None
        for step in self._steps:
            try:
                if len(weights):
                    step.accumulate((batch, weights))
            except BaseException:
                step.discard()
                raise
            step.release()
            found = torch.cat([p.grad.flatten() for p in step.trained if p.grad is not None]).double().cpu()
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def update(self, gradient: Tensor) -> None:
        """Move the parameters against a release, by a tenth of their norm."""
        trained = self._steps[0].trained
        count = sum(parameter.numel() for parameter in trained)
        norm = math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in trained))
        length = _STRIDE * norm + _SHORTEST_STRIDE * math.sqrt(count)
        scale = length / float(gradient.norm()) if bool(gradient.any()) else 0.0
        for parameter, part in zip(trained, gradient.split([p.numel() for p in trained]), strict=True):
            parameter.data.sub_((scale * part).reshape(parameter.shape).to(parameter))

    @property
    def now(self) -> Snapshot:
        """The current state."""
        return Snapshot(
            releases=self._steps[0].releases,
            parameters=[parameter.detach().clone() for parameter in self._steps[0].trained],
            histories=[step.state_dict()["history"] for step in self._steps],
        )

    def go_to(self, snapshot: Snapshot) -> None:
        """Restore parameters, past iterates and the number of releases. Filters restart from zero."""
        for parameter, value in zip(self._steps[0].trained, snapshot.parameters, strict=True):
            parameter.data.copy_(value)
        for step, blank, history in zip(self._steps, self._blank, snapshot.histories, strict=True):
            step.load_state_dict({**blank, "releases": snapshot.releases, "history": history})

    def without_last(self, batch: Any, snapshot: Snapshot, neighbour: Neighbour) -> Tensor:
        """The sum without the last record: "left out", or "replaced" by a copy of the first with loss weight 0."""
        self.go_to(snapshot)
        size = batch_size(batch)
        if neighbour == "left out":
            return self.of(select(batch, slice(0, size - 1)), torch.ones(size - 1))
        stand_in = copy.deepcopy(batch)
        for tensor in tensors_of(stand_in):
            tensor[-1] = tensor[0]
        weights = torch.ones(size)
        weights[-1] = 0.0
        return self.of(stand_in, weights)

    def with_last(self, batch: Any, snapshot: Snapshot) -> Tensor:
        """The sum with all records."""
        self.go_to(snapshot)
        return self.of(batch, torch.ones(batch_size(batch)))


def short_run(releases: Releases, examples: Any, steps: int) -> list[Snapshot]:
    """Snapshots of a short run on the examples. The first is the initial state."""
    snapshots = [releases.now]
    weights = torch.ones(batch_size(examples))
    for _ in range(steps - 1):
        releases.update(releases.of(examples, weights))
        snapshots.append(releases.now)
    return snapshots


def _weighted(loss_fn: LossFunction) -> LossFunction:
    """A loss of (records, weights): each sample's loss times its weight. Other values stay unchanged."""

    def weighted(model: nn.Module, batch: tuple[Any, Tensor]) -> list[Any]:
        records, weights = batch
        result = loss_fn(model, records)
        parts = result.values() if isinstance(result, Mapping) else result
        parts = list(parts) if not isinstance(parts, Tensor) and isinstance(parts, Iterable) else [parts]
        return [part * weights if isinstance(part, Tensor) and part.shape == weights.shape else part for part in parts]

    return weighted
