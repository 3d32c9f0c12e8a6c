"""`pmlf probe`: a private linear model on a file of features."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress

from pmlf.cli.common import Command, dated_folder, say
from pmlf.cli.display import facts
from pmlf.experiments.spec import shown_default

if TYPE_CHECKING:  # they import torch, which takes seconds
    from pmlf.experiments.probing import ProbeResult, ProbeSpec


@dataclass(frozen=True, kw_only=True)
class ProbeCommand(Command):
    """Train a private linear model on precomputed features, such as embeddings, and print the epsilon spent.

    A private mean and private second moments shape the features; private full-batch steps train the model. One epsilon
    covers everything. The run's folder gets model.safetensors, certificate.json, certificate.html, result.json and a
    ledger. Ctrl-C stops after the current release and keeps a checkpoint; --resume continues. Features computed from
    each record alone are fine; scaling or PCA fitted on the private records is not covered.
    """

    features: Annotated[Path | None, tyro.conf.Positional] = None
    """A .npy file of shape (n, d), a .npz file with `features` and `labels`, or a .parquet file."""

    labels: Annotated[str | None, shown_default("`labels` of a .npz file, `label` of a .parquet file")] = None
    """A .npy file with one label per record, or the name of the array or column."""

    classes: Annotated[tuple[str, ...], shown_default("none", "CLASS [CLASS ...]")] = ()
    """All possible classes, or their number if the labels are 0, 1, 2, ... They are not collected from the records,
    because a class of a single record would reveal it."""

    head: str = "softmax"
    """softmax, sigmoid (two classes) or least-squares (numbers, with --target-range)."""

    target_range: Annotated[tuple[float, float] | None, shown_default("none", "LOW HIGH")] = None
    """least-squares: the smallest and the largest possible target. Targets outside are clipped."""

    epsilon: float = 1.0
    """Privacy budget of everything that is released."""

    delta: float = 1e-5
    """Probability that the epsilon guarantee fails; well below 1/n."""

    steps: int = 30
    """Number of steps."""

    batch_size: Annotated[int | None, shown_default("none, full batches")] = None
    """Expected batch size of Poisson sampling."""

    clip_norm: float = 0.3
    """Bound on the gradient of one record."""

    lr: Annotated[float | None, shown_default("from public numbers")] = None
    """Learning rate of the first step; it falls as a cosine."""

    whitening: float = 0.9
    """How far the spectrum of the features is flattened, from 0 to 1."""

    intercept: float = 0.0
    """Share of a constant in every record's squared norm."""

    holdout: Annotated[float | None, shown_default("none")] = None
    """Evaluate on this share of the records. They are not protected; epsilon is for the others."""

    out: Annotated[Path | None, shown_default("runs/<date>-<time>-probe")] = None
    """New folder for the results."""

    resume: Annotated[Path | None, shown_default("none, a new run", "RUN_DIR")] = None
    """Continue the interrupted run in this folder, with its own settings and files."""

    ledger: Annotated[Path | None, shown_default("ledger.jsonl in the run's folder", "FILE")] = None
    """Ledger that several runs on the same records share; --epsilon then limits all of them together."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise")] = None
    """Reproducible noise for experiments. Do not release such a model."""

    def execute(self) -> int:
        from pmlf.experiments import probing

        if self.resume is not None:
            if self.features is not None or self.out is not None:
                raise ValueError(
                    f"--resume {self.resume} has its own features and folder: leave FEATURES and --out out"
                )
            spec, out = probing.read_spec(self.resume), self.resume
        else:
            spec = self.spec()
            out = self.out or dated_folder("probe")
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task("private probe", total=None)
            result = probing.run_probe(
                spec,
                out,
                resume=self.resume is not None,
                ledger=self.ledger,
                progress=lambda training: bar.update(
                    task, total=training.total, completed=training.done, description=training.stage
                ),
            )
        self.show(result.to_json(), _summary(result))
        if result.interrupted_by is None:
            return 0
        say(f"interrupted: resume with `pmlf probe --resume {result.out}`")
        return 128 + signal.Signals[result.interrupted_by]

    def spec(self) -> ProbeSpec:
        """The run that the options describe."""
        from pmlf.experiments.probing import ProbeSpec

        if self.features is None:
            raise ValueError("FEATURES is missing: give a .npy, .npz or .parquet file, or --resume RUN_DIR")
        if self.head == "least-squares" and self.target_range is None:
            raise ValueError(
                "--target-range is missing: give the smallest and the largest possible target, as in --target-range 0 "
                "100; the range of the private targets would reveal a record"
            )
        if self.head != "least-squares" and not self.classes:
            raise ValueError(
                "--classes is missing: give all possible classes, as in --classes cat dog, or their number if the "
                "labels are 0, 1, 2, ...; a class of a single record would reveal it"
            )
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "head",
                "target_range",
                "epsilon",
                "delta",
                "steps",
                "batch_size",
                "clip_norm",
                "whitening",
                "intercept",
            )
        }
        given |= {"learning_rate": self.lr, "classes": _classes(self.classes), "random_state": self.seed}
        return ProbeSpec(
            features=str(self.features.absolute()), labels=self._labels(), holdout=self.holdout, probe=given
        )

    def _labels(self) -> str | None:
        is_file = self.labels is not None and self.labels.endswith(".npy")
        return str(Path(self.labels).absolute()) if self.labels is not None and is_file else self.labels


def _classes(typed: tuple[str, ...]) -> int | tuple[str | int, ...] | None:
    """Classes as they were typed: one number counts them, several numbers are the labels themselves."""
    if not typed:
        return None
    if len(typed) == 1 and typed[0].isdigit():
        return int(typed[0])
    return tuple(int(each) for each in typed) if all(each.isdigit() for each in typed) else typed


def _summary(result: ProbeResult) -> str:
    rows = [
        ("epsilon", "none" if result.epsilon is None else f"{result.epsilon:.5g} at delta {result.delta:.3g}"),
        ("steps", f"{result.steps} of {result.planned_steps}"),
        ("records", f"{result.records:,}"),
    ]
    if result.accuracy is not None:
        rows.append(("score on held-out records", f"{result.accuracy:.4f}"))
    return facts([*rows, ("written to", str(result.out))])
