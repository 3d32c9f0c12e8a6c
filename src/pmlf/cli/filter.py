"""`pmlf filter`: properties of a low-pass filter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pmlf.cli import display
from pmlf.cli.common import Command, check_plot
from pmlf.experiments.spec import shown_default

if TYPE_CHECKING:  # torch behind it takes seconds to import
    from pmlf.mechanism.filters import LowPass

_SHOWN_FREQUENCIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # cycles per step
_PAPER_FILTER = ((-0.9,), (0.1,))


@dataclass(frozen=True, kw_only=True)
class Filter(Command):
    """Analyse a low-pass filter for private gradients: m_t = -sum_r a_r m_(t-r) + sum_r b_r v_(t-r).

    The noise gain is the variance of unit white noise after the filter. The mean delay is the mean age, in steps, of
    the gradients in the output. Give coefficients, or one of --butterworth, --moving-average, --exponential.
    """

    a: Annotated[tuple[float, ...] | None, shown_default("-0.9", "[FLOAT ...]")] = None
    """Feedback coefficients a_1 a_2 ..., as in `--a -0.9`. Without numbers, as in `--a --b 0.5 0.5`: no feedback."""

    b: Annotated[tuple[float, ...] | None, shown_default("0.1", "FLOAT [FLOAT ...]")] = None
    """Feed-forward coefficients b_0 b_1 ..., as in `--b 0.15 -0.05`."""

    butterworth: Annotated[tuple[int, float] | None, shown_default("none", "ORDER CUTOFF")] = None
    """Butterworth filter. CUTOFF is the half-power frequency as a fraction of the Nyquist frequency."""

    moving_average: Annotated[int | None, shown_default("none", "STEPS")] = None
    """Mean of the last STEPS gradients."""

    exponential: Annotated[float | None, shown_default("none", "DECAY")] = None
    """Exponential average: DECAY, in (0, 1), is the weight of the previous output."""

    uncorrected: bool = False
    """No bias correction. Allows any DC gain, as in the filter of inner-outer: `--a -0.9 --b 1`."""

    bands: int = 1
    """Also shape the noise with this many bands, fitted to the filter, which then has no bias correction.
    Prints what is left of the noise in the parameters after 500 steps, and --plot draws the spectra."""

    weights: int = 8
    """Number of impulse response weights to print."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Write a chart to a .png, .pdf or .svg file: the frequency response and the impulse response; with --bands the
    spectra of the noise before and after the filter."""

    def execute(self) -> int:
        from pmlf.mechanism import filter_report

        check_plot(self.plot)
        if self.weights < 1:
            raise ValueError(f"weights={self.weights} is not a number of weights to print: give 1 or more")
        low_pass = self._low_pass()
        if self.bands != 1:
            return self._with_shape(replace(low_pass, corrected=False))
        report = filter_report.analyse(low_pass, self.weights)
        # 51 points from 0 to 1/2, both included, are 1/100 of a cycle apart
        _, response = low_pass.frequency_response(51)
        gains = {frequency: abs(complex(response[round(100 * frequency)])) for frequency in _SHOWN_FREQUENCIES}
        if self.plot:
            from pmlf.cli.filter_pictures import plot_filter

            plot_filter(low_pass, self.plot)
        document = {
            **asdict(report),
            "frequency_response": [{"frequency": f, "gain": gain} for f, gain in gains.items()],
        }
        self.show(document, display.filter_summary(report), display.response_table(gains))
        return 0

    def _with_shape(self, low_pass: LowPass) -> int:
        from pmlf.mechanism import filter_report, shape_report
        from pmlf.mechanism.shape_fit import banded, usual_workload

        workload = usual_workload(low_pass)
        shape = banded(self.bands, workload=workload)
        found = shape_report.analyse_shape(low_pass, shape, workload.steps)
        if self.plot:
            from pmlf.cli.filter_pictures import plot_shape

            plot_shape(low_pass, shape, self.plot)
        report = filter_report.analyse(low_pass, self.weights)
        document = {**asdict(report), "noise_shape": asdict(found)}
        self.show(document, display.filter_summary(report), display.shape_summary(found))
        return 0

    def _low_pass(self) -> LowPass:
        from pmlf.mechanism import filters

        designs = {
            "coefficients": self.a is not None or self.b is not None,
            "--butterworth": self.butterworth is not None,
            "--moving-average": self.moving_average is not None,
            "--exponential": self.exponential is not None,
        }
        if sum(designs.values()) > 1:
            given = " and ".join(name for name, there in designs.items() if there)
            raise ValueError(f"{given} are given, and each defines a filter: give one")
        if self.butterworth is not None:
            return filters.butterworth(*self.butterworth)
        if self.moving_average is not None:
            return filters.moving_average(self.moving_average)
        if self.exponential is not None:
            return filters.exponential(self.exponential)
        a, b = _PAPER_FILTER
        return filters.LowPass(
            a if self.a is None else self.a, b if self.b is None else self.b, corrected=not self.uncorrected
        )
