"""Measure the assumptions of the theory during a run. Sensitive: it uses gradients without noise.

A probe computes gradients of a fixed set of training records before every step, outside the private step. It stores
gradients as count sketches: each coordinate is added, with a random sign, to one of m sums. Sketches preserve inner
products approximately and commute with filters. Models with at most m parameters are stored exactly.
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
from pmlf.engine.clipper import Clipper
from pmlf.engine.passes import Pass
from pmlf.engine.plan import Plan
from pmlf.experiments.results import SENSITIVE_NOTE
from pmlf.experiments.spec import GROUPS, RunSpec, flag
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

GradientSeries = NDArray[np.float64]  # (steps, coordinates of the sketch)


class Probe:
    """Measures a run whose method computes gradients at past iterates: any except DiSK.

    Raises:
        ValueError: If the method looks ahead, or the run has no seed.
    """

    def __init__(self, private: PrivateRun, task: Task, spec: RunSpec) -> None:
        points = private.private_step.settings.method.points
        if any(sum(c != 0.0 for c in point.coefficients) != 1 for point in points.points):
            raise ValueError(
                f"`diagnostics` needs a method that computes gradients at past iterates, and {spec.method} looks "
                "ahead: choose another method"
            )
        if spec.seed is None:
            raise ValueError("`diagnostics` needs to know the noise: give `seed`")
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
        self._squares: list[tuple[float, float]] = []  # mean squared norms of per-sample gradients, of momenta
        self._clipped: list[tuple[float, float]] = []  # fractions of samples clipped, without and with momentum

    def measure(self) -> None:
        """Measure at the current weights. Call it before each step."""
        step = self._private.private_step
        points = step.settings.method.points.at(step.releases)
        here = Point(coefficients=(1.0,), weight=1.0)
        losses = self._losses(step.model, self._batch)
        self._gradients.append(self._sketch.of(torch.autograd.grad(losses.mean(), step.trained)))
        plain, plain_norms = self._clipped_mean([here])
        signal, norms = (plain, plain_norms) if points == (here,) else self._clipped_mean(points)
        self._plain.append(plain)
        self._signals.append(signal)
        self._noise.append(self._sketch.of(self._drawn_noise()))
        self._squares.append((float(plain_norms.square().mean()), float(norms.square().mean())))
        limit = step.settings.clip_norm
        self._clipped.append((float((plain_norms > limit).double().mean()), float((norms > limit).double().mean())))
        self._history.remember(step.trained)

    def document(self) -> dict[str, Any]:
        """The measurements and the values that the theory predicts for them; JSON-ready."""
        low_pass, weights = self._private.private_step.settings.method.low_pass, self._point_weights
        gradients, signal, noise = (_array(each) for each in (self._gradients, self._signals, self._noise))
        correlations = theory.autocorrelation(list(gradients))
        half = slice(len(noise) // 2, None)
        filtered_noise, filtered_signal = _filtered(low_pass, noise), _filtered(low_pass, signal)
        return {
            "note": SENSITIVE_NOTE,
            "command": _command(self._spec),
            "run": self._run_document(),
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
                "theory": low_pass.noise_gain,
                "measured": float(_energy(filtered_noise)[half].sum() / _energy(noise)[half].sum()),
            },
            "signal_to_noise": {
                "before": float(_energy(signal)[half].sum() / _energy(noise)[half].sum()),
                "after": float(_energy(filtered_signal)[half].sum() / _energy(filtered_noise)[half].sum()),
            },
            "variance_reduction": self._variance_reduction(gradients),
            "clipping": {
                "bias_without_momentum": _bias(_array(self._plain), gradients),
                "bias_with_momentum": _bias(signal, gradients),
                "clipped_without_momentum": float(np.mean([pair[0] for pair in self._clipped])),
                "clipped_with_momentum": float(np.mean([pair[1] for pair in self._clipped])),
            },
            # longer lags are means of few pairs
            "gamma": _gammas(low_pass, weights, correlations[: max(1, len(correlations) // 2)]),
        }

    @property
    def _point_weights(self) -> list[float]:
        return [abs(point.weight) for point in self._private.private_step.settings.method.points.points]

    def _run_document(self) -> dict[str, Any]:
        """The settings of the run."""
        low_pass, weights = self._private.private_step.settings.method.low_pass, self._point_weights
        return {
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
            "a": list(low_pass.a),
            "b": list(low_pass.b),
        }

    def _variance_reduction(self, gradients: GradientSeries) -> dict[str, float]:
        """Variance of per-sample gradients over that of per-sample momenta, rho^2."""
        points, weights = self._private.private_step.settings.method.points, self._point_weights
        momentum = _momenta(gradients, [point.weight for point in points.at(len(weights))])
        late = slice(len(weights) - 1, None)  # from where all points exist
        squares = np.array(self._squares)[late]
        spread = squares[:, 0] - _energy(gradients)[late], squares[:, 1] - _energy(momentum)[late]
        return {
            "theory": sum(weights) ** 2 / sum(weight**2 for weight in weights),
            "measured": float(spread[0].sum() / spread[1].sum()),
        }

    def _clipped_mean(self, points: Sequence[Point]) -> tuple[Tensor, Tensor]:
        """The sketched mean of the clipped per-sample momenta, and their norms before clipping."""
        step = self._private.private_step
        clipper = Clipper(self._plan.parameters, clip_norm=step.settings.clip_norm, clipping=step.settings.clipping)
        momentum = clipper.momentum(self._count, len(points))
        for point in points:
            values = self._history.evaluate(point, step.trained)
            named = dict(zip(self._plan.parameters, values, strict=True))
            momentum.add_pass(
                Pass(Anatomy(step.model), self._plan, self._losses, named, self._batch, self._count, point.weight)
            )
        like = dict(zip(self._plan.parameters, step.trained, strict=True))
        total, norms = clipper.add([momentum], None, like)
        return self._sketch.of([total.values[name] for name in self._plan.parameters]) / self._count, norms[0]

    def _drawn_noise(self) -> list[Tensor]:
        """The noise that the next step adds to the mean, recomputed from the seed and the step."""
        step = self._private.private_step
        settings, stream = step.settings, step.randomness.stream("noise", step.releases)
        drawn = [torch.zeros_like(parameter) for parameter in step.trained]
        for value in drawn:
            stream.add_gaussian_(value, settings.noise_multiplier * settings.clip_norm, hardened=settings.secure_noise)
            value.div_(settings.expected_batch_size)
        return drawn


class _Sketch:
    """Count sketch of d coordinates in m: each has a random bucket and sign. Linear; preserves <x, y> on average."""

    def __init__(self, dimension: int) -> None:
        self.exact = dimension <= SKETCH
        if not self.exact:
            generator = torch.Generator().manual_seed(_SKETCH_SEED)
            self._bucket = torch.randint(SKETCH, (dimension,), generator=generator)
            self._sign = torch.randint(2, (dimension,), generator=generator).mul_(2).sub_(1).to(torch.float32)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sketch of the concatenated tensors."""
        flat = torch.cat([tensor.detach().flatten().cpu().float() for tensor in tensors])
        if self.exact:
            return flat.double()
        return torch.zeros(SKETCH, dtype=torch.float64).index_add_(0, self._bucket, (flat * self._sign).double())


def _array(series: Sequence[Tensor]) -> GradientSeries:
    return torch.stack(list(series)).numpy()


def _energy(series: GradientSeries) -> NDArray[np.float64]:
    return np.square(series).sum(1)


def _momenta(gradients: GradientSeries, weights: Sequence[float]) -> GradientSeries:
    """sum_j w_j g_{t-j}: the mean momentum of the probed samples, valid once all points exist."""
    total = np.zeros_like(gradients)
    for age, weight in enumerate(weights):
        total[age:] += weight * gradients[: len(gradients) - age]
    return total


def _filtered(low_pass: LowPass, series: GradientSeries) -> GradientSeries:
    out = lfilter(low_pass.b, (1.0, *low_pass.a), series, axis=0)
    return np.asarray(out / low_pass.corrections(len(series))[:, None] if low_pass.corrected else out)


def _spectrum(series: GradientSeries) -> list[list[float]]:
    """[cycles per step, power] in frequency bands, without the constant part."""
    power = np.square(np.abs(np.fft.rfft(series, axis=0))).sum(1) / len(series)
    frequencies = np.fft.rfftfreq(len(series))
    bands = np.array_split(np.arange(1, len(power)), min(_SHOWN_FREQUENCIES, len(power) - 1))
    return [[float(frequencies[band].mean()), float(power[band].mean())] for band in bands]


def _bias(means: GradientSeries, gradients: GradientSeries) -> float:
    """|clipped mean - gradient| / |gradient|, over all steps."""
    return float(np.sqrt(_energy(means - gradients).sum() / _energy(gradients).sum()))


def _command(spec: RunSpec) -> str:
    """The command that repeats the measurement: the main options and those that are not at their default."""
    always = ("method", "dataset", "model", "epsilon", "lr", "seed")
    usual = RunSpec()
    changed = {
        name: value
        for name, value in vars(spec).items()
        if name not in GROUPS and value is not None and (name in always or value != getattr(usual, name))
    }
    for group in GROUPS:
        changed |= {name: value for name, value in vars(getattr(spec, group)).items() if value not in (None, False)}
    return f"pmlf train --diagnostics {' '.join(_option(name, value) for name, value in changed.items())}"


def _option(name: str, value: Any) -> str:
    if value is True:
        return flag(name)
    return f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _gammas(low_pass: LowPass, weights: Sequence[float], correlations: NDArray[np.float64]) -> dict[str, Any]:
    """The two ratios of Theorem 1 from the measured c_r. Gamma_SGD is None if it is undefined."""
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
