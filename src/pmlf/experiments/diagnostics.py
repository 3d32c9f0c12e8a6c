"""What the theory assumes, measured on a run: gradients before the noise, so sensitive, and only on demand.

A probe looks at a fixed set of training records before every step, beside the private step and not in it. Gradients are
kept as sketches (each coordinate added to one of m sums with a random sign), which keep inner products and commute with
filters; a model of at most m parameters is kept as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from torch import Tensor

from pmlf.basics.batches import to_device
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.gradients import Workspace
from pmlf.engine.momentum import SampleMomentum
from pmlf.engine.plan import Plan
from pmlf.experiments.results import SENSITIVE_NOTE
from pmlf.experiments.spec import RunSpec, flag
from pmlf.experiments.tasks import Task
from pmlf.mechanism import theory
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.points import History, Point
from pmlf.run.private_run import PrivateRun

PROBED_RECORDS = 256
SKETCH = 8192
_SHOWN_LAGS = 100
_SHOWN_FREQUENCIES = 64
_SKETCH_SEED = 0

Series = NDArray[np.float64]  # (steps, coordinates of the sketch)


class Probe:
    """Measures a run whose method takes gradients at past iterates: any but DiSK."""

    def __init__(self, private: PrivateRun, task: Task, spec: RunSpec) -> None:
        points = private.private_step.method.points
        if any(sum(c != 0.0 for c in point.coefficients) != 1 for point in points.points):
            raise ValueError(
                f"--diagnostics is for methods that take gradients at past iterates, and {spec.method} looks ahead: "
                "choose another method"
            )
        if spec.seed is None:
            raise ValueError("--diagnostics takes the noise out again, so that it needs to be known: give --seed")
        self._private, self._spec, self._losses = private, spec, task.losses
        self._plan = Plan.of(private.model)
        self._history = History(points.depth)
        count = min(PROBED_RECORDS, task.records)
        collate = task.collate_fn or torch.utils.data.default_collate
        records = collate([task.train[index] for index in range(count)])
        self._batch, self._count = to_device(records, private.private_step.trained[0].device), count
        self._sketch = _Sketch(sum(p.numel() for p in private.private_step.trained))
        self._gradients: list[Tensor] = []  # of the mean loss, sketched
        self._signals: list[Tensor] = []  # means of clipped momenta
        self._plain: list[Tensor] = []  # means of clipped gradients, without momentum
        self._noise: list[Tensor] = []
        self._squares: list[tuple[float, float]] = []  # mean squared norm of a sample's gradient, and of its momentum
        self._clipped: list[
            tuple[float, float]
        ] = []  # parts of the samples that are clipped, without and with momentum

    def look(self) -> None:
        """Before a step: at the weights it will start from."""
        step = self._private.private_step
        points = step.method.points.at(step.releases)
        here = Point(coefficients=(1.0,), weight=1.0)
        losses = self._losses(step.model, self._batch)
        self._gradients.append(self._sketch.of(torch.autograd.grad(losses.mean(), step.trained)))
        plain, plain_norms = self._clipped_mean([here])
        signal, norms = (plain, plain_norms) if points == (here,) else self._clipped_mean(points)
        self._plain.append(plain)
        self._signals.append(signal)
        self._noise.append(self._sketch.of(self._drawn_noise()))
        self._squares.append((float(plain_norms.square().mean()), float(norms.square().mean())))
        limit = step.clip_norm
        self._clipped.append((float((plain_norms > limit).double().mean()), float((norms > limit).double().mean())))
        self._history.remember(step.trained)

    def document(self) -> dict[str, Any]:
        """The measurements beside what the theory has for them; JSON-ready."""
        method = self._private.private_step.method
        gradients, signal, noise = (_array(each) for each in (self._gradients, self._signals, self._noise))
        plain = _array(self._plain)
        weights = [abs(point.weight) for point in method.points.points]
        momentum = _momenta(gradients, [point.weight for point in method.points.at(len(weights))])
        late = slice(len(weights) - 1, None)  # from where all points exist
        squares = np.array(self._squares)[late]
        spread = squares[:, 0] - _energy(gradients)[late], squares[:, 1] - _energy(momentum)[late]
        correlations = theory.autocorrelation(list(gradients))
        half = slice(len(noise) // 2, None)
        filtered_noise, filtered_signal = _filtered(method.low_pass, noise), _filtered(method.low_pass, signal)
        return {
            "note": SENSITIVE_NOTE,
            "command": _command(self._spec),
            "run": {
                "method": self._spec.method,
                "dataset": self._spec.dataset,
                "model": self._spec.model_name,
                "target_epsilon": self._spec.epsilon,
                "seed": self._spec.seed,
                "lr": self._spec.lr,
                "batch_size": self._spec.batch_size,
                "clip_norm": self._spec.clip_norm,
                "k": len(weights),
                "beta": weights[1] / weights[0] if len(weights) > 1 else 1.0,
                "a": list(method.low_pass.a),
                "b": list(method.low_pass.b),
            },
            "steps": len(gradients),
            "probed_records": self._count,
            "sketch": None if self._sketch.exact else SKETCH,
            "autocorrelation": correlations[: _SHOWN_LAGS + 1].tolist(),
            "spectra": {
                "signal": _spectrum(signal),
                "signal_filtered": _spectrum(filtered_signal),
                "noise": _spectrum(noise),
                "noise_filtered": _spectrum(filtered_noise),
            },
            "noise_gain": {
                "theory": method.low_pass.noise_gain,
                "measured": float(_energy(filtered_noise)[half].sum() / _energy(noise)[half].sum()),
            },
            "signal_to_noise": {
                "before": float(_energy(signal)[half].sum() / _energy(noise)[half].sum()),
                "after": float(_energy(filtered_signal)[half].sum() / _energy(filtered_noise)[half].sum()),
            },
            "variance_reduction": {
                "theory": sum(weights) ** 2 / sum(weight**2 for weight in weights),
                "measured": float(spread[0].sum() / spread[1].sum()),
            },
            "clipping": {
                "bias_without_momentum": _bias(plain, gradients),
                "bias_with_momentum": _bias(signal, gradients),
                "clipped_without_momentum": float(np.mean([pair[0] for pair in self._clipped])),
                "clipped_with_momentum": float(np.mean([pair[1] for pair in self._clipped])),
            },
            # lags that at least half of the steps have: the rest are means of a few pairs
            "gamma": _gammas(method.low_pass, weights, correlations[: max(1, len(correlations) // 2)]),
        }

    def _clipped_mean(self, points: Sequence[Point]) -> tuple[Tensor, Tensor]:
        """The sketched mean of the probed samples' clipped momenta, and the norms before clipping."""
        step = self._private.private_step
        momentum = SampleMomentum(self._plan, self._count, len(points), Workspace())
        for point in points:
            values = self._history.evaluate(point, step.trained)
            named = dict(zip(self._plan.parameters, values, strict=True))
            momentum.add_point(Anatomy(step.model), named, self._losses, self._batch, point.weight, "their own")
        sums = {name: torch.zeros_like(p) for name, p in zip(self._plan.parameters, step.trained, strict=True)}
        norms = momentum.write_clipped_sum(step.clip_norm, step.clipping, None, sums)
        return self._sketch.of([sums[name] for name in self._plan.parameters]) / self._count, norms

    def _drawn_noise(self) -> list[Tensor]:
        """What the step that follows will add to the mean: its stream is a function of the seed and the step."""
        step = self._private.private_step
        stream = step.randomness.stream("noise", step.releases)
        drawn = [torch.zeros_like(parameter) for parameter in step.trained]
        for value in drawn:
            stream.add_gaussian_(value, step.noise_multiplier * step.clip_norm, hardened=step.secure_noise)
            value.div_(step.expected_batch_size)
        return drawn


class _Sketch:
    """Vectors of d coordinates in m: each coordinate has a bucket and a sign, drawn once. Linear, keeps <x, y>."""

    def __init__(self, dimension: int) -> None:
        self.exact = dimension <= SKETCH
        if not self.exact:
            chance = torch.Generator().manual_seed(_SKETCH_SEED)
            self._bucket = torch.randint(SKETCH, (dimension,), generator=chance)
            self._sign = torch.randint(2, (dimension,), generator=chance).mul_(2).sub_(1).to(torch.float32)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.detach().flatten().cpu().float() for tensor in tensors])
        if self.exact:
            return flat.double()
        return torch.zeros(SKETCH, dtype=torch.float64).index_add_(0, self._bucket, (flat * self._sign).double())


def _array(series: Sequence[Tensor]) -> Series:
    return torch.stack(list(series)).numpy()


def _energy(series: Series) -> NDArray[np.float64]:
    return np.square(series).sum(1)


def _momenta(gradients: Series, weights: Sequence[float]) -> Series:
    """sum_j w_j g_{t-j}: the mean momentum of a fixed set of samples, right from where all points exist."""
    total = np.zeros_like(gradients)
    for age, weight in enumerate(weights):
        total[age:] += weight * gradients[: len(gradients) - age]
    return total


def _filtered(low_pass: LowPass, series: Series) -> Series:
    out = lfilter(low_pass.b, (1.0, *low_pass.a), series, axis=0)
    return np.asarray(out / low_pass.corrections(len(series))[:, None] if low_pass.corrected else out)


def _spectrum(series: Series) -> list[list[float]]:
    """[cycles per step, power] in bands of frequencies, the constant part left out."""
    power = np.square(np.abs(np.fft.rfft(series, axis=0))).sum(1) / len(series)
    frequencies = np.fft.rfftfreq(len(series))
    bands = np.array_split(np.arange(1, len(power)), min(_SHOWN_FREQUENCIES, len(power) - 1))
    return [[float(frequencies[band].mean()), float(power[band].mean())] for band in bands]


def _bias(means: Series, gradients: Series) -> float:
    """|mean of what was clipped - gradient| / |gradient|, over all steps."""
    return float(np.sqrt(_energy(means - gradients).sum() / _energy(gradients).sum()))


def _command(spec: RunSpec) -> str:
    """What measures this again: all that is not at its default."""
    said = ("method", "dataset", "model", "epsilon", "lr", "seed")
    usual, groups = RunSpec(), ("options", "text")
    changed = {
        name: value
        for name, value in vars(spec).items()
        if name not in groups and value is not None and (name in said or value != getattr(usual, name))
    }
    for group in groups:
        changed |= {name: value for name, value in vars(getattr(spec, group)).items() if value is not None}
    return f"pmlf train --diagnostics {' '.join(_option(name, value) for name, value in changed.items())}"


def _option(name: str, value: Any) -> str:
    if value is True:
        return flag(name)
    return f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _gammas(low_pass: LowPass, weights: Sequence[float], correlations: NDArray[np.float64]) -> dict[str, Any]:
    """Theorem 1's two ratios from the measured c_r; Gamma_SGD only where it is defined."""
    k = len(weights)
    given = {
        "a": low_pass.a,
        "b": low_pass.b,
        "beta": weights[1] / weights[0] if k > 1 else 1.0,
        "k": k,
        "autocorrelation": correlations.tolist(),
        "steps": len(correlations),
    }
    try:
        sgd, undefined = theory.gamma_sgd(**given), None
    except ValueError as error:
        sgd, undefined = None, str(error)
    return {"dp": theory.gamma_dp(**given), "sgd": sgd, "sgd_undefined": undefined}
