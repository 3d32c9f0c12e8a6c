"""Low-pass filters on the noisy mean gradient: checked coefficients, common designs, and the running state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg, signal
from torch import Tensor

from pmlf.basics.arguments import is_number, require_count

Floats = NDArray[np.float64]

_STABILITY_MARGIN = 1e-9
_DC_GAIN_TOLERANCE = 1e-9
_CORRECTION_FLOOR = 1e-8  # on c_t^2 / sum_{s<=t} kappa_s^2: the correction multiplies no step's noise by more than 1e4
_CHECKED_STEPS = 1000  # after these, c_t only converges geometrically
_CONVEX_HORIZON = 10_000
_LOWEST_CUTOFF = 1e-6  # averages over about a million steps
_MOST_STEPS = 10**7  # in one array
_LARGEST_COEFFICIENT = 1e100  # its square is finite too


@final
@dataclass(frozen=True)
class LowPass:
    """m_t = -sum_{r=1..na} a_r m_{t-r} + sum_{r=0..nb} b_r vbar_{t-r}, mhat_t = m_t / c_t (Algorithm 1, lines 9-11).

    c_t is the same recursion on an input of ones; an uncorrected filter does not divide by it.

    Guarantees: every filter is stable. A corrected filter has DC gain 1, the paper's constraint -sum(a) + sum(b) = 1,
    and no c_t is so small that dividing by it blows up the noise.

    Attributes:
        a: Feedback coefficients a_1, a_2, ...
        b: Feedforward coefficients b_0, b_1, ...
        corrected: Whether to divide by c_t. Without the correction any DC gain is allowed.

    Raises:
        ValueError: The filter breaks a guarantee, or a coefficient is not a finite number.

    >>> round(LowPass(a=(-0.9,), b=(0.1,)).noise_gain, 4)
    0.0526
    """

    a: Sequence[float] = ()
    b: Sequence[float] = (1.0,)
    corrected: bool = True

    def __post_init__(self) -> None:
        # The dataclass is frozen, so set through object. The stored values are tuples of float.
        object.__setattr__(self, "a", _coefficients("a", self.a))
        object.__setattr__(self, "b", _coefficients("b", self.b))
        if not any(self.b):
            raise ValueError(f"b={self.b} lets nothing through: give at least one nonzero coefficient")
        if np.any(np.abs(self.poles) >= 1 - _STABILITY_MARGIN):
            poles = ", ".join(f"{pole:.4g}" for pole in self.poles)
            raise ValueError(
                f"a={self.a} makes an unstable filter with poles {poles}: every root of z^na + a_1 z^(na-1) + ... must "
                "lie inside the unit circle, give a=(-0.9,) for example"
            )
        if self.corrected:
            self._check_correction()

    def _check_correction(self) -> None:
        if self.b[0] == 0:
            raise ValueError(
                f"b={self.b} has b_0 = 0, so the bias correction divides by c_0 = 0: remove the leading zeros of b "
                "or set corrected=False"
            )
        if abs(self.dc_gain - 1) > _DC_GAIN_TOLERANCE:
            raise ValueError(
                f"a={self.a}, b={self.b} has DC gain {self.dc_gain:.6g}, but a gain of 1 is needed, -sum(a) + sum(b) = "
                "1: divide b by the gain or set corrected=False"
            )
        weights = self.impulse_response(_CHECKED_STEPS)
        corrections = np.cumsum(weights)
        tiny = np.flatnonzero(corrections**2 < _CORRECTION_FLOOR * np.cumsum(weights**2))
        if tiny.size:
            raise ValueError(
                f"a={self.a}, b={self.b} has c_{tiny[0]} = {corrections[tiny[0]]:.3g}, and dividing by it would "
                "blow up the noise of that step: give other coefficients or set corrected=False"
            )

    @property
    def order(self) -> int:
        """max(na, nb): the number of memory tensors per parameter."""
        return max(len(self.a), len(self.b) - 1)

    @property
    def identity(self) -> bool:
        """Whether the filter changes nothing, mhat_t = vbar_t, as in DPSGD."""
        return self.order == 0 and self.b[0] == 1

    @property
    def poles(self) -> NDArray[Any]:
        """Roots of z^na + a_1 z^(na-1) + ... + a_na."""
        return np.roots((1.0, *self.a))

    @property
    def zeros(self) -> NDArray[Any]:
        """Roots of b_0 z^nb + b_1 z^(nb-1) + ... + b_nb."""
        return np.roots(self.b)

    @property
    def dc_gain(self) -> float:
        """H(1) = sum(b) / (1 + sum(a)) = sum_r kappa_r: the gain of a constant input at steady state."""
        return math.fsum(self.b) / math.fsum((1.0, *self.a))

    @property
    def noise_gain(self) -> float:
        """sum_r kappa_r^2: the gain of the variance of white noise, at steady state."""
        # Exact, without a horizon: the variance P of the memory satisfies P = A P A' + B B'.
        size = max(self.order, 1)
        feedback = np.array(_padded(self.a, size))
        transition = np.eye(size, k=1)
        transition[:, 0] = -feedback
        drive = np.array(_padded(self.b[1:], size)) - feedback * self.b[0]
        variance = linalg.solve_discrete_lyapunov(transition, np.outer(drive, drive))
        return float(self.b[0] ** 2 + variance[0, 0])

    @property
    def mean_delay(self) -> float:
        """sum_r r kappa_r / sum_r kappa_r: the mean age of the output, in steps.

        Raises:
            ValueError: The coefficients b sum to 0.
        """
        if math.fsum(self.b) == 0:
            raise ValueError(f"b={self.b} sums to 0, so the filter has no mean delay: give b with a nonzero sum")
        feedforward = math.fsum(r * value for r, value in enumerate(self.b)) / math.fsum(self.b)
        feedback = math.fsum(r * value for r, value in enumerate(self.a, start=1)) / math.fsum((1.0, *self.a))
        return feedforward - feedback

    @property
    def is_convex(self) -> bool:
        """Whether all kappa_r >= 0. Only then is mhat_t a convex combination of the inputs (Lemma 1)."""
        weights = self.impulse_response(_CONVEX_HORIZON)
        return bool(np.min(weights) >= -1e-12 * np.max(np.abs(weights)))

    def impulse_response(self, length: int) -> Floats:
        """kappa_0, ..., kappa_{length-1} of m_t = sum_r kappa_r vbar_{t-r} (Lemma 1), by the recursion.

        Args:
            length: How many weights to return, 0 to 10^7.

        >>> LowPass(a=(-0.9,), b=(0.15, -0.05)).impulse_response(3)
        array([0.15  , 0.085 , 0.0765])
        """
        require_count("length", length, "it is the number of weights", least=0, most=_MOST_STEPS)
        return self._respond(np.arange(length) == 0)

    def corrections(self, steps: int) -> Floats:
        """c_0, ..., c_{steps-1}, the divisors of m_t: c_t = sum_{r<=t} kappa_r, or 1 for an uncorrected filter.

        Args:
            steps: How many divisors to return, 0 to 10^7.

        >>> LowPass(a=(-0.9,), b=(0.1,)).corrections(3)
        array([0.1  , 0.19 , 0.271])
        """
        require_count("steps", steps, "there is one correction per step", least=0, most=_MOST_STEPS)
        return self._respond(np.ones(steps)) if self.corrected else np.ones(steps)

    def frequency_response(self, points: int = 512) -> tuple[Floats, NDArray[np.complex128]]:
        """The frequency response H(e^{2 pi i f}).

        Args:
            points: How many frequencies, 2 to 10^7.

        Returns:
            Frequencies f in cycles per step, from 0 to 1/2 inclusive, and the complex response at each.

        >>> frequencies, response = LowPass(a=(-0.5,), b=(0.5,)).frequency_response(2)
        >>> frequencies.tolist(), np.abs(response).round(3).tolist()
        ([0.0, 0.5], [1.0, 0.333])
        """
        require_count("points", points, "it is the number of frequencies", least=2, most=_MOST_STEPS)
        frequencies, response = signal.freqz(self.b, (1.0, *self.a), worN=points, fs=1.0, include_nyquist=True)
        return frequencies, response

    def _respond(self, inputs: NDArray[Any]) -> Floats:
        return np.asarray(signal.lfilter(self.b, (1.0, *self.a), inputs.astype(np.float64)))


def butterworth(order: int, cutoff: float) -> LowPass:
    """A Butterworth filter, which halves the power at the cutoff frequency.

    Args:
        order: The filter's order, 1 to 50.
        cutoff: The cutoff frequency as a fraction of the Nyquist frequency (1/2 cycle per step), in (0, 1).

    Returns:
        The filter, of DC gain 1.

    Raises:
        ValueError: An argument is out of range, or rounding makes the filter unstable (a high order at a low cutoff).

    >>> round(butterworth(2, 0.1).mean_delay, 2)
    4.46
    """
    require_count("order", order, "it is the order of the filter, 2 for example", most=50)
    if not (is_number(cutoff) and _LOWEST_CUTOFF <= cutoff < 1):
        raise ValueError(
            f"cutoff={cutoff} is outside [{_LOWEST_CUTOFF:g}, 1): give a fraction of the Nyquist frequency, 0.1 for "
            "example"
        )
    b, a = signal.butter(order, cutoff)
    scale = math.fsum(a) / math.fsum(b)  # at a low cutoff rounding moves the DC gain away from 1
    return LowPass(tuple(a[1:]), tuple(b * scale))


def moving_average(length: int) -> LowPass:
    """The mean of the last `length` values: a = {}, b = {1/length, ...}.

    Args:
        length: How many values, 1 to 10,000.

    Returns:
        The filter.

    Raises:
        ValueError: length is out of range.

    >>> moving_average(4).noise_gain
    0.25
    """
    require_count("length", length, "it is the number of values in the mean", most=10_000)
    return LowPass((), (1 / length,) * length)


def exponential(decay: float) -> LowPass:
    """An exponential moving average, m_t = decay m_{t-1} + (1 - decay) vbar_t: a = {-decay}, b = {1 - decay}.

    Args:
        decay: The weight of the past, in (0, 1).

    Returns:
        The filter.

    Raises:
        ValueError: decay is out of range.

    >>> round(exponential(0.9).mean_delay, 9)
    9.0
    """
    if not (is_number(decay) and 0 < decay < 1):
        raise ValueError(f"decay={decay} is outside (0, 1): give the weight of the past, 0.9 for example")
    return LowPass((-decay,), (1 - decay,))


@final
class FilterMemory:
    """The running state of a `LowPass` over a list of tensors, in direct form II transposed.

    It holds `low_pass.order` tensors per parameter, of the values' dtype and device, and the state of c_t as Python
    floats. A deep copy is independent.

    >>> memory = FilterMemory(LowPass(a=(-0.9,), b=(0.1,)))
    >>> memory.apply([torch.ones(2)])  # with the bias correction a constant passes unchanged
    [tensor([1., 1.])]
    """

    def __init__(self, low_pass: LowPass) -> None:
        self.low_pass = low_pass
        self.step = 0
        # Padded to one length, so that index r is a_r and b_r and the recursion needs no special cases.
        self._a = (1.0, *_padded(low_pass.a, low_pass.order))
        self._b = _padded(low_pass.b, low_pass.order + 1)
        self._correction_memory = [0.0] * low_pass.order
        self._memory: list[list[Tensor]] | None = None  # one list of `order` tensors per parameter

    @torch.no_grad()
    def apply(self, values: list[Tensor], *, scale: float = 1.0) -> list[Tensor]:
        """Filter vbar_t = scale * values and return mhat_t.

        The filter takes over the memory of `values`, and the result uses memory that was the filter's. So nothing is
        allocated, and `values` must not be used afterwards.

        Args:
            values: One tensor per parameter.
            scale: A factor on the values, 1/B for example.

        Returns:
            One tensor per parameter, which the filter does not use again.

        Raises:
            ValueError: The shapes differ from those of the step before.
        """
        if self.low_pass.identity:
            self.step += 1
            return [value.mul_(scale) for value in values]
        memory = self._memory_for(values)
        correction = self._advance_correction()
        results = []
        for value, tensors in zip(values, memory, strict=True):
            if tensors:
                output = tensors.pop(0).add_(value, alpha=self._b[0] * scale)
                for r, tensor in enumerate(tensors, start=1):
                    tensor.add_(value, alpha=self._b[r] * scale).add_(output, alpha=-self._a[r])
                if self._b[-1] == 0.0:
                    tensors.append(torch.mul(output, -self._a[-1], out=value))
                else:
                    tensors.append(value.mul_(self._b[-1] * scale).add_(output, alpha=-self._a[-1]))
            else:
                output = value.mul_(self._b[0] * scale)
            results.append(output.div_(correction))
        self.step += 1
        return results

    def _advance_correction(self) -> float:
        """c_t, by the same recursion on an input of ones; 1 for an uncorrected filter."""
        if not self.low_pass.corrected:
            return 1.0
        previous = [*self._correction_memory, 0.0]
        correction = previous[0] + self._b[0]
        self._correction_memory = [
            previous[r] + self._b[r] - self._a[r] * correction for r in range(1, self.low_pass.order + 1)
        ]
        return correction

    def _memory_for(self, values: list[Tensor]) -> list[list[Tensor]]:
        if self._memory is None:
            self._memory = [[torch.zeros_like(value) for _ in range(self.low_pass.order)] for value in values]
        given = [[tuple(value.shape)] * self.low_pass.order for value in values]
        expected = [_shapes(tensors) for tensors in self._memory]
        if given != expected:
            raise ValueError(
                f"the filter was given tensors of shapes {_shapes(values)}, but its memory has {expected}: pass the "
                "same parameters in the same order at every step"
            )
        for value, tensors in zip(values, self._memory, strict=True):
            tensors[:] = [tensor.to(value) for tensor in tensors]  # a loaded state may be on another device
        return self._memory

    def state_dict(self) -> dict[str, Any]:
        """Plain data and copies of the tensors, which later steps do not change."""
        return {
            "a": list(self.low_pass.a),
            "b": list(self.low_pass.b),
            "corrected": self.low_pass.corrected,
            "step": self.step,
            "correction_memory": list(self._correction_memory),
            "memory": _cloned(self._memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a saved state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state is of another filter or model.
        """
        if (entries := set(state)) != (names := set(self.state_dict())):
            raise ValueError(f"the state has {sorted(entries)}, not {sorted(names)}: pass what state_dict() returned")
        saved = LowPass(state["a"], state["b"], state["corrected"])
        if saved != self.low_pass:
            raise ValueError(f"the state is of {saved}, this memory of {self.low_pass}: build that filter first")
        loaded: list[list[Tensor]] | None = state["memory"]
        if loaded is not None and self._memory is not None:
            theirs, ours = ([_shapes(tensors) for tensors in memory] for memory in (loaded, self._memory))
            if theirs != ours:
                raise ValueError(f"the state has shapes {theirs}, this memory has {ours}: load it into the same model")
        self.step = int(state["step"])
        self._correction_memory = [float(value) for value in state["correction_memory"]]
        self._memory = _cloned(loaded)


def _coefficients(name: str, values: Any) -> tuple[float, ...]:
    """A tuple of finite floats, from any ordered sequence of numbers."""
    problem = f"{name}={values!r} is not a sequence of finite numbers: give a tuple such as {name}=(0.1,)"
    if isinstance(values, (set, frozenset, Mapping, str, bytes)):
        raise ValueError(problem)  # a set, the paper's notation, loses order and duplicates
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a meta tensor
        raise ValueError(problem) from error
    if not all(abs(number) <= _LARGEST_COEFFICIENT for number in numbers):  # False for NaN
        raise ValueError(problem)
    return numbers


def _padded(values: Sequence[float], length: int) -> tuple[float, ...]:
    return (*values, *(0.0,) * (length - len(values)))


def _cloned(memory: list[list[Tensor]] | None) -> list[list[Tensor]] | None:
    return None if memory is None else [[tensor.clone() for tensor in tensors] for tensors in memory]


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
