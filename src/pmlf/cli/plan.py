"""`pmlf plan`: what a budget can afford, before any training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pmlf.basics.files import write_atomically
from pmlf.cli.common import Command, check_plot
from pmlf.cli.display import facts
from pmlf.experiments.options import shown_default
from pmlf.experiments.spec import DEFAULT_MODELS, default_delta

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pmlf.experiments.planning import Recommendation, Sweep

_SHARES = (0.005, 0.01, 0.02, 0.04, 0.08)  # default batch sizes, as shares of the records
_DIGITS = 2


@dataclass(frozen=True, kw_only=True)
class Planning(Command):
    """Show what a privacy budget can afford, before any training: a table, a picture, and a setting to start with.

    Every number comes from public values: records, model size, batch sizes, epochs, epsilons, and the time of a sample
    on synthetic inputs. No record is read and nothing is spent. `pmlf account` answers one point, this a whole sweep.
    """

    records: int = 50_000
    """Number n of training records."""

    model: Annotated[str | None, shown_default("cnn5; mlp with --features")] = None
    """Images: cnn5, linear, resnet18, resnet18-narrow, vit, vit-mini, vit-tiny or vit-small. Tables, with --features:
    mlp or linear."""

    image_size: int = 32
    """Height and width of the images."""

    channels: int = 3
    """Channels of the images: 3 for colour, 1 for grey."""

    features: Annotated[int | None, shown_default("none, images")] = None
    """Tables: number of the model's inputs."""

    classes: int = 10
    """Number of the model's outputs."""

    parameters: Annotated[int | None, shown_default("those of --model")] = None
    """Number of trainable parameters of another model. Nothing is timed then."""

    batch_sizes: Annotated[
        tuple[int, ...] | None, shown_default("0.5, 1, 2, 4 and 8 % of the records", "INT [INT ...]")
    ] = None
    """Expected batch sizes to compare."""

    epochs: tuple[float, ...] = (5, 15, 45)
    """Numbers of epochs to compare."""

    epsilons: tuple[float, ...] = (1, 3, 8)
    """Privacy budgets to compare."""

    delta: Annotated[float | None, shown_default("1e-5 if that is below 1/n, else n^-1.1")] = None
    """Probability that the epsilon guarantee fails."""

    input_norm: Annotated[float | None, shown_default("square root of the number of inputs")] = None
    """linear: norm of a typical input, which the learning rate to start with depends on."""

    clip_norm: float = 1.0
    """Clip norm C. The learning rate to start with is inversely proportional to it."""

    no_timing: bool = False
    """Do not measure the time of a sample, and show no hours."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Picture of the sweep: a .png, .pdf or .svg file."""

    html: Annotated[Path | None, shown_default("none", "FILE.html")] = None
    """One page with sliders that shows the sweep, for a browser without a network."""

    def execute(self) -> int:
        from pmlf.experiments import planning

        check_plot(self.plot)
        sizes = self.batch_sizes or tuple(sorted({max(1, _round(self.records * share)) for share in _SHARES}))
        if self.features is None and self.model == DEFAULT_MODELS["table"]:
            raise ValueError(f"--model {self.model} is for tables: give --features, the number of the model's inputs")
        if self.input_norm is not None and (self.model != "linear" or self.parameters is not None):
            raise ValueError("--input-norm is only for --model linear: leave it out")
        parameters, seconds, inputs = self._model()
        sweep = planning.plan(
            records=self.records,
            parameters=parameters,
            batch_sizes=sizes,
            epochs=self.epochs,
            epsilons=self.epsilons,
            delta=default_delta(self.records) if self.delta is None else self.delta,
            clip_norm=self.clip_norm,
            input_norm=self._input_norm(inputs),
            seconds_per_sample=seconds,
        )
        if self.plot is not None:
            draw(sweep, self.plot)
        if self.html is not None:
            write_atomically(self.html, page(sweep).encode(), released=True)
        written = [("chart", str(self.plot))] * bool(self.plot) + [("page", str(self.html))] * bool(self.html)
        self.show(
            sweep.to_json(),
            table(sweep),
            *[in_words(sweep, each) for each in sweep.recommendations],
            *([facts(written)] if written else []),
        )
        return 0

    def _input_norm(self, inputs: int | None) -> float | None:
        """The norm of an input of a linear model: as given, or for inputs of size one. None for a network."""
        if self.model != "linear" or inputs is None:
            return None
        return math.sqrt(inputs) if self.input_norm is None else self.input_norm

    def _model(self) -> tuple[int, dict[str, float], int | None]:
        """The number of parameters, the time of a sample by method, and the number of inputs, if they are known."""
        if self.parameters is not None:
            return self.parameters, {}, None
        from pmlf import models
        from pmlf.experiments import planning

        if self.features is not None:
            name = self.model or DEFAULT_MODELS["table"]
            network = models.build_for_table(name, features=self.features, outputs=self.classes, seed=0)
            inputs = planning.synthetic_rows(self.features)
        else:
            name = self.model or DEFAULT_MODELS["image"]
            network = models.build(
                name, in_channels=self.channels, image_size=self.image_size, classes=self.classes, seed=0
            )
            inputs = planning.synthetic_images(self.channels, self.image_size)
        count = sum(parameter.numel() for parameter in network.parameters())
        seconds = {} if self.no_timing else planning.seconds_per_sample(network, inputs, self.classes)
        return count, seconds, inputs[0].numel()


def table(sweep: Sweep) -> Table:
    """One row per setting; those recommended are bold."""
    chosen = {id(each.point) for each in sweep.recommendations}
    shown = Table(box=SIMPLE_HEAD)
    headings = ["epsilon", "epochs", "batch", "steps", "noise mult.", "in gradient", "path/noise", "lr", "in params"]
    for heading in [*headings, *(["hours"] if sweep.seconds_per_sample else [])]:
        shown.add_column(heading, justify="right")
    for point in sweep.points:
        cells = [
            f"{point.epsilon:.4g}",
            f"{point.epochs:g}",
            f"{point.batch_size:,}",
            f"{point.steps:,}",
            f"{point.noise_multiplier:.3f}",
            f"{point.noise_in_gradient:.2g} C",
            f"{point.path_over_noise:.3g}",
            f"{point.learning_rate:g}",
            f"{point.noise_in_parameters:.2g}",
            *([f"{point.hours['dpsgd']:.2g}"] if point.hours else []),
        ]
        shown.add_row(*cells, style="bold" if id(point) in chosen else None)
    return shown


def in_words(sweep: Sweep, recommendation: Recommendation) -> str:
    """A recommendation as a paragraph."""
    point = recommendation.point
    hours = f", {_duration(point.hours['dpsgd'])} here" if point.hours else ""
    return (
        f"epsilon {point.target_epsilon:g}: --method {recommendation.method} --batch-size {point.batch_size} --epochs "
        f"{point.epochs:g} --clip-norm {sweep.clip_norm:g} --lr {point.learning_rate:g} "
        f"({point.steps:,} steps{hours}). " + recommendation.reason
    )


def page(sweep: Sweep) -> str:
    """The sweep as one HTML page that recomputes in the browser. It loads nothing else."""
    import jinja2

    assets = resources.files("pmlf") / "assets"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    document = json.dumps(sweep.to_json()).replace("<", "\\u003c")  # no text in it can end the script
    return environment.from_string((assets / "plan.html.j2").read_text(encoding="utf-8")).render(
        document=document,
        script=(assets / "plan.js").read_text(encoding="utf-8"),
        sweep=sweep,
        words=[in_words(sweep, each) for each in sweep.recommendations],
    )


def draw(sweep: Sweep, path: Path) -> None:
    """Draw noise multiplier and path over noise against the batch size, one panel per epsilon."""
    from matplotlib.figure import Figure

    epsilons = sorted({point.target_epsilon for point in sweep.points})
    figure = Figure(figsize=(4.2 * len(epsilons), 6), layout="constrained")
    axes: Any = figure.subplots(2, len(epsilons), squeeze=False, sharex=True)
    for column, epsilon in enumerate(epsilons):
        points = [point for point in sweep.points if point.target_epsilon == epsilon]
        for epochs in sorted({point.epochs for point in points}):
            line = [point for point in points if point.epochs == epochs]
            sizes = [point.batch_size for point in line]
            axes[0, column].plot(sizes, [p.noise_multiplier for p in line], marker="o", label=f"{epochs:g} epochs")
            axes[1, column].plot(sizes, [p.path_over_noise for p in line], marker="o")
        best = next(each.point for each in sweep.recommendations if each.point.target_epsilon == epsilon)
        axes[1, column].plot(best.batch_size, best.path_over_noise, "k*", markersize=14, label="recommended")
        axes[0, column].set(title=f"epsilon {epsilon:g}, n = {sweep.records:,}", xscale="log", yscale="log")
        axes[1, column].set(xlabel="batch size", yscale="log")
        axes[1, column].legend(loc="lower right")
    axes[0, 0].set_ylabel("noise multiplier z")
    axes[1, 0].set_ylabel("path over accumulated noise")
    axes[0, 0].legend(loc="upper left")
    for each in axes.flat:
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _round(value: float) -> int:
    """A number with two significant digits."""
    return int(float(f"{value:.{_DIGITS}g}"))


def _duration(hours: float) -> str:
    return f"{hours:.2g} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"
