"""`pmlf audit`."""

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
from pmlf.experiments.spec import MethodOptions, RunSpec, Setting, TextOptions, comparison, flag, shown_default

if TYPE_CHECKING:  # torch behind it takes seconds to import
    from pmlf.audit import ModelReport, ModelSettings, Report, Settings

CLAIM_WRONG = 1
_DATASET = "fashion-mnist-small"
_CANARIES = 21_000
_EPSILON, _MODEL_EPSILON = 1.0, 8.0


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model mode, which --model or --dataset asks for."""

    model: Annotated[str | None, shown_default("none; with --dataset cnn5 or FacebookAI/roberta-base")] = None
    """Instead: send the worst record that a search finds through this model and its loss, as `pmlf train` names them.
    Images: cnn5, linear, resnet18, vit, vit-tiny or vit-small. Texts: a name on the Hugging Face hub, or a folder."""

    dataset: Annotated[str | None, shown_default(f"none; with --model {_DATASET}, inside the package")] = None
    """Whose first test records the search begins with, as `pmlf train` names datasets. Test records are not protected:
    the report shows what is computed from them without noise."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets laid out as the hub lays them out."""

    examples: int = 8
    """Records that the search begins with, and the most that are in a batch together."""

    restarts: int = 8
    """Climbs of the search, in each mode of the model."""

    tries: int = 60
    """Moves tried in a climb: scaling, perturbing, copying, flipping, other labels or tokens, of the record and others.
    What moves the clipped sum as far or further is kept."""

    runs: int = 400
    """Runs of the mechanism for the bounds on epsilon, half of them with the record; 0 for the search alone."""

    clip_norm: float = 1.0
    """Largest norm C of what one record adds to a step: the search reports multiples of it."""

    text: TextOptions = field(default_factory=TextOptions)

    @property
    def asked_for(self) -> bool:
        return self.model is not None or self.dataset is not None

    def setting(self, seed: int | None, options: MethodOptions) -> Setting:
        return Setting(dataset=self.dataset or _DATASET, model=self.model, seed=seed, options=options, text=self.text)


@dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """Attack a method as it is implemented, and say how much epsilon the attack proves to be spent, at the least.

    Canaries, records that are their own gradient, go through the private step; from what it releases the audit tells
    which took part. What it can tell gives lower bounds on epsilon: by Gaussian DP (at a sample rate of 1), by the
    definition with Clopper-Pearson bounds, and from one run with guesses fixed beforehand (Steinke et al. 2023), this
    one at a thousandth of delta, beside what is claimed there. A bound above the claim refutes it; a claim that stands
    is not proven.

    With --model: a search by hill climbing for the record that moves the clipped sum of that model's gradients
    furthest, as a multiple of the clip norm, which must be at most 1; then bounds on epsilon from short runs with and
    without that record. `pmlf audit --model cnn5` works as it stands; `--model linear --runs 0` takes seconds.

    Exit code 1: a claim was refuted, or with --controls a broken variant was not.
    """

    method: tuple[str, ...] = ("dp-pmlf",)
    """Some of dp-pmlf, lp-dpsgd, dpsgd, inner-outer, disk, dp-pmlf-without-pm, dp-pmlf-without-lf."""

    controls: bool = False
    """Instead: deliberately broken variants, each of which must be refuted, with steps and sampling of their own.
    Clipping per point, half the noise, noise reused, division by the batch drawn, empty batches skipped, BatchNorm.
    With --model, variants of it: inputs centred over the batch, class weights of the batch, clipping per point."""

    epsilon: Annotated[float | None, shown_default(f"{_EPSILON:g}; with --model {_MODEL_EPSILON:g}")] = None
    """The claim; the noise is what the accountant gives for it. A few hundred runs show little of a small one."""

    delta: float = 1e-5
    """Of the claim."""

    steps: int = 4
    """Releases of a run."""

    sample_rate: float = 1.0
    """Chance of a record to be drawn at a step; at 1 the attack is strongest."""

    canaries: int = _CANARIES
    """Canaries, of which each takes part by a fair coin: a half are the records, a half the control group.
    Not for --model, which has --runs."""

    guesses: Annotated[int | None, shown_default("one canary in twenty")] = None
    """How many canaries the one-run bound guesses."""

    confidence: float = 0.9999
    """Each bound holds with this probability."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise")] = None
    """Makes the audit reproducible."""

    secure_noise: bool = False
    """Audit the noise of --secure-noise. Not for --model."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Picture of the scores with and without the record: a .png, .pdf or .svg file."""

    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = field(default_factory=MethodOptions)

    of_model: Annotated[ModelOptions, tyro.conf.arg(name="model")] = field(default_factory=ModelOptions)

    def execute(self) -> int:
        check_plot(self.plot)
        self._refuse_options_of_the_other_mode()
        return self._audit_model() if self.of_model.asked_for else self._audit_methods()

    def _audit_methods(self) -> int:
        from pmlf import audit

        settings = self._settings()
        reports: list[Report] = []
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

    def _settings(self) -> Settings:
        from pmlf import audit

        return audit.Settings(
            epsilon=_EPSILON if self.epsilon is None else self.epsilon,
            delta=self.delta,
            steps=self.steps,
            sample_rate=self.sample_rate,
            canaries=self.canaries,
            guesses=self.guesses,
            confidence=self.confidence,
            seed=self.seed,
            secure_noise=self.secure_noise,
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
                    raise ValueError(f"{flag(name)} is for the audit of a model: give --model too, cnn5 for example")
            return
        for name, value in (("canaries", _CANARIES), ("guesses", None), ("secure_noise", False)):
            if getattr(self, name) != value:
                raise ValueError(f"{flag(name)} is not for the audit of a model: leave it out, --runs says how many")
        if self.plot is not None and not self.of_model.runs:
            raise ValueError("--plot draws the scores of runs, and --runs 0 makes none: give --runs 400, or no --plot")

    def _conclude(
        self, about: Mapping[str, Any], reports: Sequence[Report | ModelReport], *tables: RenderableType
    ) -> int:
        right = [report.refuted == self.controls for report in reports]
        self.show(
            {"ok": all(right), "controls": self.controls, **about, "audits": [each.to_json() for each in reports]},
            *tables,
            self._verdict([report.subject for report, fine in zip(reports, right, strict=True) if not fine]),
        )
        return 0 if all(right) else CLAIM_WRONG

    def _verdict(self, wrong: Sequence[str]) -> str:
        subjects, confidence = ", ".join(wrong), f"each bound at {100 * self.confidence:g} % confidence"
        if self.controls:
            return (
                f"Not caught: {subjects} ({confidence})." if wrong else f"Every broken variant is caught, {confidence}."
            )
        if wrong:
            return f"REFUTED: {subjects} spends more than is claimed ({confidence})."
        if not self.of_model.asked_for:
            return f"No bound is above its claim, {confidence}."
        found = "No record was found that moves the sum by more than the clip norm"
        return f"{found}; no bound is above its claim, {confidence}." if self.of_model.runs else f"{found}."


def _attacks(spec: RunSpec, given: ModelOptions, controls: bool) -> Iterator[tuple[str, Callable[..., ModelReport]]]:
    """What to audit by name, with all that is audited but the settings: the model, or its broken variants."""
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
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(subject, total=1.0)
        yield lambda share: progress.advance(task, share)
