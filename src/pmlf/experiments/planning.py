"""Plan a run before any training, from public numbers alone: privacy, noise, time, and a setting to start with."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmlf import methods, shapes
from pmlf.basics.arguments import require_count, require_positive, steps_of_epochs
from pmlf.mechanism import accounting
from pmlf.mechanism.noise import SeededRandomness
from pmlf.step import PrivateStep

ENOUGH = 0.9  # of the best ratio of path to noise in the sweep: what more batches or epochs would add is small
LEAST_STEPS = 250  # the recorded recipes have 300 and 500: with fewer, the optimizer has no time
SAFE_NOISE = 0.04  # accumulated in each parameter: what the recorded recipes have (docs/recipes.md)
LONGEST_STEP = 4.0  # learning rate times clip norm: the largest that the recorded trials have
SCORE_NOISE = 0.9  # accumulated in the score of a typical input of a linear model, as `PrivateProbe` allows by default
STABLE = 76.0  # |x|^2 times the learning rate at which LP-DPSGD oscillates: 2 (1 + 0.9)/(1 - 0.9) over softmax's 1/2
METHOD = "lp-dpsgd"  # its filter costs no time, and keeps learning rates stable at which DP-SGD oscillates
TIMED = ("dpsgd", "dp-pmlf")
_TIMED_SAMPLES, _TIMED_ROUNDS = 16, 2


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """One setting of a sweep.

    Attributes:
        target_epsilon: The budget.
        epsilon: What the calibrated noise spends, as `pmlf account` computes it.
        batch_size: The expected batch size B.
        epochs: The mean number of times that each record is drawn.
        steps: The number of steps T.
        noise_multiplier: z.
        noise_in_gradient: Norm of the noise in a mean gradient, in clip norms: sqrt(d) z / B.
        path_over_noise: Longest path of the parameters over the noise accumulated in them: sqrt(T) B / (sqrt(d) z).
        learning_rate: A rate to start with, for SGD.
        noise_in_parameters: Noise accumulated in each parameter at that rate: rate * C z sqrt(T) / B.
        hours: Expected hours by method on this machine; empty if nothing was measured.
    """

    target_epsilon: float
    epsilon: float
    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    noise_in_gradient: float
    path_over_noise: float
    learning_rate: float
    noise_in_parameters: float
    hours: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A setting to start with at one epsilon, and why."""

    point: PlannedPoint
    method: str
    noise_shape: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All settings of a sweep, and a recommendation for each epsilon."""

    records: int
    parameters: int
    delta: float
    clip_norm: float
    seconds_per_sample: Mapping[str, float]
    points: tuple[PlannedPoint, ...]
    recommendations: tuple[Recommendation, ...]

    def to_json(self) -> dict[str, Any]:
        """The sweep as a document for JSON."""
        return asdict(self)


def plan(
    *,
    records: int,
    parameters: int,
    batch_sizes: Sequence[int],
    epochs: Sequence[float],
    epsilons: Sequence[float],
    delta: float,
    clip_norm: float = 1.0,
    input_norm: float | None = None,
    seconds_per_sample: Mapping[str, float] | None = None,
) -> Sweep:
    """Compute every combination of batch size, epochs and epsilon. Nothing is trained and no record is read.

    Args:
        records: The number n of training records.
        parameters: The number d of trainable parameters.
        batch_sizes: Expected batch sizes, each at most n.
        epochs: Numbers of epochs.
        epsilons: Privacy budgets.
        delta: The probability at which epsilon is stated.
        clip_norm: The clip norm C.
        input_norm: The norm |x| of a typical input of a linear model; None for a network.
        seconds_per_sample: Time of a sample by method, from `seconds_per_sample`; None: no hours.

    Returns:
        The sweep, with a recommendation for each epsilon.

    Raises:
        ValueError: If an argument is out of range or a list is empty.

    >>> sweep = plan(records=10_000, parameters=1000, batch_sizes=[500], epochs=[5], epsilons=[3.0], delta=1e-5)
    >>> sweep.points[0].steps, sweep.points[0].epsilon <= 3.0
    (100, True)
    """
    require_count("records", records, "it is the number of training records")
    require_count("parameters", parameters, "it is the number of trainable parameters")
    require_positive("clip_norm", clip_norm, "it bounds one sample's gradient")
    if input_norm is not None:
        require_positive("input_norm", input_norm, "it is the norm of a typical input")
    for name, values in (("batch_sizes", batch_sizes), ("epochs", epochs), ("epsilons", epsilons)):
        if not values:
            raise ValueError(f"`{name}` is empty: give one or more values")
    for size in batch_sizes:
        require_count("batch_sizes", size, "each is an expected number of records per step", most=records)
    seconds, step = dict(seconds_per_sample or {}), _StepSize(clip_norm=clip_norm, input_norm=input_norm)
    points = tuple(
        _point(records, parameters, size, times, epsilon, delta, step, seconds)
        for epsilon in sorted(epsilons)
        for times in sorted(epochs)
        for size in sorted(batch_sizes)
    )
    return Sweep(
        records=records,
        parameters=parameters,
        delta=delta,
        clip_norm=clip_norm,
        seconds_per_sample=seconds,
        points=points,
        recommendations=tuple(
            recommended([point for point in points if point.target_epsilon == epsilon], records, delta)
            for epsilon in sorted(epsilons)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _StepSize:
    """How large a learning rate may be: by the noise that it lets into the model, and by stability.

    In a network each parameter may take as much noise as in the recorded recipes. The score of a linear model has |x|
    times the noise of a parameter, so there the norm of an input says how much that is. Its loss has a curvature of at
    most |x|^2/2, and less by C/|x| where gradients of norm |x| are clipped to C.
    """

    clip_norm: float
    input_norm: float | None

    def rate(self, noise: float) -> float:
        """The learning rate, if a rate of 1/C lets this much noise accumulate in each parameter."""
        if self.input_norm is None:
            return _two_digits(min(LONGEST_STEP, SAFE_NOISE / noise) / self.clip_norm)
        stable = STABLE / self.input_norm * max(self.clip_norm / self.input_norm, 1.0)
        return _two_digits(min(stable, SCORE_NOISE / (self.input_norm * noise)) / self.clip_norm)


def _point(
    records: int,
    parameters: int,
    size: int,
    epochs: float,
    target: float,
    delta: float,
    step: _StepSize,
    seconds: Mapping[str, float],
) -> PlannedPoint:
    steps, rate = steps_of_epochs(epochs, records, size), size / records
    z = accounting.noise_multiplier(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    per_step = z / size  # standard deviation of the noise in each coordinate of a mean gradient, in clip norms
    lr = step.rate(per_step * math.sqrt(steps))
    return PlannedPoint(
        target_epsilon=target,
        epsilon=accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=delta),
        batch_size=size,
        epochs=epochs,
        steps=steps,
        noise_multiplier=z,
        noise_in_gradient=math.sqrt(parameters) * per_step,
        path_over_noise=math.sqrt(steps) / (math.sqrt(parameters) * per_step),
        learning_rate=lr,
        noise_in_parameters=lr * step.clip_norm * per_step * math.sqrt(steps),
        hours={method: steps * size * each / 3600 for method, each in seconds.items()},
    )


def recommended(points: Sequence[PlannedPoint], records: int, delta: float) -> Recommendation:
    """The cheapest setting of one epsilon whose ratio of path to noise is nearly the best of the sweep.

    Epochs are what costs time, so the fewest epochs come first, then the smallest batches, which take more steps. A
    setting with fewer than 250 steps is chosen only if there is no other.
    """
    best = max(point.path_over_noise for point in points)
    enough = [point for point in points if point.path_over_noise >= ENOUGH * best]
    chosen = min(enough, key=lambda point: (point.steps < LEAST_STEPS, point.epochs, point.batch_size))
    gain = best / chosen.path_over_noise - 1
    return Recommendation(
        point=chosen,
        method=METHOD,
        noise_shape="white",
        reason=(
            f"More epochs or larger batches raise the path of the parameters over their noise by at most {gain:.0%}, "
            "because the noise multiplier then grows nearly as fast as the steps gain. "
            f"The noise in a gradient is {chosen.noise_in_gradient:.2g} clip norms. A low-pass filter takes part of it "
            "out and keeps large learning rates stable, at no cost in time. " + _shape_in_words(chosen, records, delta)
        ),
    )


def _shape_in_words(point: PlannedPoint, records: int, delta: float) -> str:
    """Why the noise is white, and what shaping it would change, by calculation."""
    epsilon = point.target_epsilon
    found = shapes.best(records=records, batch_size=point.batch_size, steps=point.steps, epsilon=epsilon, delta=delta)
    if found.shape.bands == 1:
        return "Noise: white; shaping it would leave no less of it in the parameters."
    part = found.noise[found.shape.bands] / found.noise[1]
    return (
        f"Noise: white. By calculation --method lp-dpsgd-shaped --bands {found.shape.bands} leaves {part:.2g} times as "
        "much noise in the parameters."
    )


def seconds_per_sample(model: nn.Module, inputs: Tensor, classes: int) -> dict[str, float]:
    """Time of one sample in a private step, by method, measured on synthetic inputs. No record is read.

    Args:
        model: The model.
        inputs: Synthetic inputs; the first axis counts samples.
        classes: The number of the model's outputs.

    Returns:
        The best time of two for "dpsgd" and for "dp-pmlf" with k = 2.
    """
    labels = torch.zeros(len(inputs), dtype=torch.int64)

    def losses(network: nn.Module, batch: Any) -> Tensor:
        outputs = network(batch[0])
        return outputs.squeeze(-1) ** 2 if classes == 1 else F.cross_entropy(outputs, batch[1], reduction="none")

    return {name: _best_seconds(model, losses, (inputs, labels), name) / len(inputs) for name in TIMED}


def _best_seconds(model: nn.Module, losses: Any, batch: Any, method: str) -> float:
    generator = torch.Generator().manual_seed(SeededRandomness(0).stream("planning").seed())
    step = PrivateStep(
        model,
        losses,
        method=methods.resolve(method),
        clip_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=len(batch[1]),
        generator=generator,
    )
    step.accumulate(batch)  # warm-up, and the first of the iterates that per-sample momentum needs
    step.release()
    best = math.inf
    for _ in range(_TIMED_ROUNDS):
        begin = time.perf_counter()
        step.accumulate(batch)
        best = min(best, time.perf_counter() - begin)
        step.release()
    return best


def synthetic_images(channels: int, size: int) -> Tensor:
    """Random images for timing."""
    return torch.rand(_TIMED_SAMPLES, channels, size, size, generator=torch.Generator().manual_seed(0))


def synthetic_rows(features: int) -> Tensor:
    """Random rows for timing."""
    return torch.rand(8 * _TIMED_SAMPLES, features, generator=torch.Generator().manual_seed(0))


def _two_digits(value: float) -> float:
    """Rounded to two significant digits.

    >>> _two_digits(1.2345), _two_digits(0.0987)
    (1.2, 0.099)
    """
    return float(f"{value:.2g}")
