"""`pmlf audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pmlf.commands.common import Command, check_plot
from pmlf.experiments import display
from pmlf.experiments.spec import MethodOptions, Setting, comparison, shown_default

if TYPE_CHECKING:  # torch behind it takes seconds to import
    from pmlf.audit import Report

CLAIM_WRONG = 1


@dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """Attack a method as it is implemented, and say how much epsilon the attack proves to be spent, at the least.

    Canaries, records that are their own gradient, go through the private step; from what it releases the audit tells
    which took part. What it can tell gives lower bounds on epsilon: by Gaussian DP (at a sample rate of 1), by the
    definition with Clopper-Pearson bounds, and from one run with guesses fixed beforehand (Steinke et al. 2023), this
    one at a thousandth of delta, beside what is claimed there. A bound above the claim refutes it; a claim that stands
    is not proven. Exit code 1: a claim was refuted, or with --controls a broken variant was not.
    """

    method: tuple[str, ...] = ("dp-pmlf",)
    """Some of dp-pmlf, lp-dpsgd, dpsgd, inner-outer, disk, dp-pmlf-without-pm, dp-pmlf-without-lf."""

    controls: bool = False
    """Instead: deliberately broken variants, each of which must be refuted, with steps and sampling of their own.
    Clipping per point, half the noise, noise reused, division by the batch drawn, empty batches skipped, BatchNorm."""

    epsilon: float = 1.0
    """The claim; the noise is what the accountant gives for it."""

    delta: float = 1e-5
    """Of the claim."""

    steps: int = 4
    """Releases of a run."""

    sample_rate: float = 1.0
    """Chance of a record to be drawn at a step; at 1 the attack is strongest."""

    canaries: int = 21_000
    """Canaries, of which each takes part by a fair coin: a half are the records, a half the control group."""

    guesses: Annotated[int | None, shown_default("one canary in twenty")] = None
    """How many canaries the one-run bound guesses."""

    confidence: float = 0.9999
    """Each bound holds with this probability."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise")] = None
    """Makes the audit reproducible."""

    secure_noise: bool = False
    """Audit the noise of --secure-noise."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Picture of the scores with and without the record: a .png, .pdf or .svg file."""

    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = field(default_factory=MethodOptions)

    def execute(self) -> int:
        from pmlf import audit

        check_plot(self.plot)
        settings = audit.Settings(
            epsilon=self.epsilon,
            delta=self.delta,
            steps=self.steps,
            sample_rate=self.sample_rate,
            canaries=self.canaries,
            guesses=self.guesses,
            confidence=self.confidence,
            seed=self.seed,
            secure_noise=self.secure_noise,
        )
        reports: list[Report] = []
        if self.controls:
            for control in audit.CONTROLS:
                with _bar(control.name) as progress:
                    reports.append(audit.audit_control(control, settings, progress))
            right = [report.refuted for report in reports]
        else:
            for spec in comparison(Setting(options=self.options), self.method):
                with _bar(spec.method) as progress:
                    reports.append(audit.audit_method(spec.build_method(), settings, progress))
            right = [not report.refuted for report in reports]
        if self.plot is not None:
            audit.plot(reports, self.plot)
        self.show(
            {"ok": all(right), "controls": self.controls, "audits": [report.to_json() for report in reports]},
            display.audit_table(reports),
            self._verdict(reports, right),
        )
        return 0 if all(right) else CLAIM_WRONG

    def _verdict(self, reports: list[Report], right: list[bool]) -> str:
        wrong = ", ".join(report.subject for report, as_hoped in zip(reports, right, strict=True) if not as_hoped)
        confidence = f"each bound at {100 * self.confidence:g} % confidence"
        if self.controls:
            return f"Not caught: {wrong} ({confidence})." if wrong else f"Every broken variant is caught, {confidence}."
        if wrong:
            return f"REFUTED: {wrong} spends more than is claimed ({confidence})."
        return f"No bound is above its claim, {confidence}."


@contextmanager
def _bar(subject: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(subject, total=1.0)
        yield lambda share: progress.advance(task, share)
