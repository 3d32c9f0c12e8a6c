"""`pmlf audit`: empirical lower bounds on epsilon, for the methods and for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pmlf.cli import display
from pmlf.cli.common import Command, check_plot
from pmlf.experiments.options import OwnData, PretrainedOptions, shown_default
from pmlf.experiments.spec import MethodOptions, RunSpec, Setting, comparison, flag

if TYPE_CHECKING:  # torch behind it takes seconds to import
    from pmlf.audit import AuditReport, AuditSettings, ModelReport, ModelSettings

CLAIM_WRONG = 1
_DATASET = "fashion-mnist-small"
_CANARIES = 21_000
_EPSILON, _MODEL_EPSILON = 1.0, 8.0


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model audit, which --model or --dataset selects."""

    model: Annotated[str | None, shown_default("none; with --dataset cnn5 or FacebookAI/roberta-base")] = None
    """Audit this model and its loss instead, with the worst record that a search finds. Named as in `pmlf train`.
    Images: cnn5, linear, resnet18, resnet18-narrow, vit, vit-mini, vit-tiny or vit-small.
    Texts: a name on the Hugging Face hub, or a folder."""

    dataset: Annotated[str | None, shown_default(f"none; with --model {_DATASET}, inside the package")] = None
    """Dataset whose first test records the search starts from. Named as in `pmlf train`.
    Test records are not protected: the report shows numbers computed from them without noise."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets with the layout of the Hugging Face hub."""

    examples: int = 8
    """Number of records the search starts from. No batch has more."""

    restarts: int = 8
    """Number of hill climbs, in training mode and in eval mode each."""

    tries: int = 60
    """Number of moves tried in each climb. A move scales, perturbs, copies or flips values or changes labels or tokens,
    of the record or of others. It is kept if the clipped sum changes by as much as before, or more."""

    runs: int = 400
    """Number of runs for the bounds on epsilon, half of them with the record. 0: the search alone."""

    clip_norm: float = 1.0
    """Clip norm C. The search reports multiples of it."""

    own: OwnData = field(default_factory=OwnData)

    pretrained: PretrainedOptions = field(default_factory=PretrainedOptions)

    @property
    def asked_for(self) -> bool:
        return self.model is not None or self.dataset is not None

    def setting(self, seed: int | None, options: MethodOptions) -> Setting:
        return Setting(
            dataset=self.dataset or _DATASET,
            model=self.model,
            seed=seed,
            options=options,
            own=self.own,
            pretrained=self.pretrained,
        )


@dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """Attack the implementation of a method and print lower bounds on the epsilon it really spends.

    The audit sends canaries through the private step: records whose gradient is the record itself. From the released
    gradients it guesses which canaries took part. This gives three lower bounds on epsilon: by Gaussian DP (only at a
    sample rate of 1), by the definition of DP with Clopper-Pearson intervals, and by the one-run audit of Steinke et
    al. (2023), which is compared with the claim at delta/1000. A bound above the claim refutes it. A claim that is not
    refuted is not proven.

    With --model, the audit searches for the record that moves the clipped sum of that model's gradients furthest. The
    change must be at most the clip norm. It then bounds epsilon from short runs with and without that record.
    `pmlf audit --model cnn5` needs no other option; `pmlf audit --model linear --runs 0` takes seconds.

    Exit code 1: a claim is refuted, or with --controls a broken variant is not.
    """

    method: tuple[str, ...] = ("dp-pmlf",)
    """One or more of dp-pmlf, lp-dpsgd, dpsgd, inner-outer, disk, dp-pmlf-without-pm, dp-pmlf-without-lf,
    dp-pmlf-shaped, lp-dpsgd-shaped. One with shaped noise of b bands takes b times as many steps."""

    controls: bool = False
    """Audit deliberately broken variants instead; each must be refuted. They have their own steps and sample rate.
    Clipping per point, half the noise, records claimed as units, reused noise, division by the drawn batch size,
    skipping empty batches, BatchNorm, misuse of shaped noise. With --model, variants of that model: inputs centred over
    the batch, class weights from the batch, clipping per point."""

    epsilon: Annotated[float | None, shown_default(f"{_EPSILON:g}; with --model {_MODEL_EPSILON:g}")] = None
    """The claim to test; the accountant chooses the noise for it. A few hundred runs cannot show a small epsilon."""

    delta: float = 1e-5
    """Delta of the claim."""

    steps: int = 4
    """Steps of one run."""

    sample_rate: float = 1.0
    """Probability that a step draws a record. The attack is strongest at 1."""

    canaries: int = _CANARIES
    """Number of canaries. A fair coin decides for each whether it takes part; the others are the control group.
    Not with --model, which has --runs."""

    guesses: Annotated[int | None, shown_default("one canary in twenty")] = None
    """Number of canaries that the one-run bound guesses."""

    confidence: float = 0.9999
    """Each bound holds with this probability."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise")] = None
    """Makes the audit reproducible."""

    secure_noise: bool = False
    """Audit the noise of `pmlf train --secure-noise`. Not with --model."""

    records_per_unit: int = 1
    """Number of records of each canary. Above 1, it audits `pmlf train --unit-column`: the claim is about units.
    Not with --model."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Write a histogram of the scores with and without the record: a .png, .pdf or .svg file."""

    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = field(default_factory=MethodOptions)

    of_model: Annotated[ModelOptions, tyro.conf.arg(name="model")] = field(default_factory=ModelOptions)

    def execute(self) -> int:
        check_plot(self.plot)
        self._refuse_options_of_the_other_mode()
        return self._audit_model() if self.of_model.asked_for else self._audit_methods()

    def _audit_methods(self) -> int:
        from pmlf import audit

        settings = self._settings()
        reports: list[AuditReport] = []
        if self.controls:
            for control in audit.CONTROLS:
                with _bar(control.name) as progress:
                    reports.append(audit.audit_control(control, settings, progress))
        else:
            for spec in comparison(Setting(options=self.options), self.method):
                with _bar(spec.method) as progress:
                    reports.append(audit.audit_method(spec.build_method(), settings, progress))
        if self.plot is not None:
            audit.plot(reports, self.plot)
        return self._conclude({}, reports, display.audit_table(reports))

    def _audit_model(self) -> int:
        from pmlf import audit

        given, settings = self.of_model, self._model_settings()
        setting = given.setting(self.seed, self.options)
        reports: list[ModelReport] = []
        for spec in comparison(setting, self.method):
            for name, attack in _attacks(spec, given, self.controls):
                with _bar(name) as progress:
                    reports.append(attack(settings=settings, progress=progress))
        privacy = [report.privacy for report in reports if report.privacy is not None]
        if self.plot is not None:
            audit.plot(privacy, self.plot)
        return self._conclude(
            {"model": setting.model_name, "dataset": setting.dataset, "examples": given.examples},
            reports,
            display.sensitivity_table(reports),
            display.worst_records(reports),
            *([display.audit_table(privacy)] if privacy else []),
        )

    def _settings(self) -> AuditSettings:
        from pmlf import audit

        return audit.AuditSettings(
            epsilon=_EPSILON if self.epsilon is None else self.epsilon,
            delta=self.delta,
            steps=self.steps,
            sample_rate=self.sample_rate,
            canaries=self.canaries,
            guesses=self.guesses,
            confidence=self.confidence,
            seed=self.seed,
            secure_noise=self.secure_noise,
            records_per_unit=self.records_per_unit,
        )

    def _model_settings(self) -> ModelSettings:
        from pmlf import audit

        return audit.ModelSettings(
            epsilon=_MODEL_EPSILON if self.epsilon is None else self.epsilon,
            delta=self.delta,
            steps=self.steps,
            sample_rate=self.sample_rate,
            clip_norm=self.of_model.clip_norm,
            restarts=self.of_model.restarts,
            tries=self.of_model.tries,
            runs=self.of_model.runs,
            confidence=self.confidence,
            seed=self.seed,
        )

    def _refuse_options_of_the_other_mode(self) -> None:
        if not self.of_model.asked_for:
            for name, value in vars(ModelOptions()).items():
                if getattr(self.of_model, name) != value:
                    raise ValueError(f"{flag(name)} needs --model: add it, as in --model cnn5")
            return
        for name, value in (
            ("canaries", _CANARIES),
            ("guesses", None),
            ("secure_noise", False),
            ("records_per_unit", 1),
        ):
            if getattr(self, name) != value:
                raise ValueError(
                    f"{flag(name)} cannot be used with --model: leave it out; --runs sets the size of the audit"
                )
        if self.of_model.own.unit_column is not None:
            raise ValueError("--unit-column cannot be used with --model, which audits records: leave it out")
        if self.plot is not None and not self.of_model.runs:
            raise ValueError(
                "--plot draws the scores of runs, and --runs 0 has none: give --runs 400, or leave --plot out"
            )

    def _conclude(
        self, about: Mapping[str, Any], reports: Sequence[AuditReport | ModelReport], *tables: RenderableType
    ) -> int:
        right = [report.refuted == self.controls for report in reports]
        self.show(
            {"ok": all(right), "controls": self.controls, **about, "audits": [each.to_json() for each in reports]},
            *tables,
            self._verdict([report.subject for report, fine in zip(reports, right, strict=True) if not fine]),
        )
        return 0 if all(right) else CLAIM_WRONG

    def _too_few(self) -> str:
        """What to give if the audit is smaller than the one that is known to refute every broken variant."""
        given, enough = (
            (self.of_model.runs, ModelOptions().runs)
            if self.of_model.asked_for
            else (
                self.canaries,
                _CANARIES,
            )
        )
        name = "--runs" if self.of_model.asked_for else "--canaries"
        return f" {given} are too few to show it: give {name} {enough} or more." if given < enough else ""

    def _verdict(self, wrong: Sequence[str]) -> str:
        subjects, confidence = ", ".join(wrong), f"each bound at {100 * self.confidence:g} % confidence"
        if self.controls:
            refuted = f"Every broken variant is refuted, {confidence}."
            return f"NOT refuted: {subjects} ({confidence}).{self._too_few()}" if wrong else refuted
        if wrong:
            return f"REFUTED: {subjects} spends more epsilon than claimed ({confidence})."
        if not self.of_model.asked_for:
            return f"No bound is above its claim, {confidence}."
        found = "The search found no record that moves the sum by more than the clip norm"
        return f"{found}; no bound is above its claim, {confidence}." if self.of_model.runs else f"{found}."


def _attacks(spec: RunSpec, given: ModelOptions, controls: bool) -> Iterator[tuple[str, Callable[..., ModelReport]]]:
    """(name, audit function without its settings) for the model, or for each of its broken variants."""
    from pmlf import audit
    from pmlf.experiments import tasks

    task = tasks.prepare(spec, given.data_dir)
    subject = (task.model, task.losses, task.unprotected(given.examples))
    method = spec.build_method()
    if not controls:
        yield spec.method, partial(audit.audit_model, *subject, method=method)
        return
    for control in audit.MODEL_CONTROLS:
        yield control.name, partial(audit.audit_model_control, control, *subject, method=method)


@contextmanager
def _bar(subject: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(subject, total=1.0)
        yield lambda share: progress.advance(task, share)
