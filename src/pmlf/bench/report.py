"""Ratios to the plain gradient, targets, tables and a chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from pmlf.bench.contenders import OPACUS, PLAIN, STEP
from pmlf.bench.measure import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISAGREEMENT = 0.01  # largest relative difference of the norms of clipped sums
Results = Mapping[str, Mapping[str, Any]]  # by contender
Value = Callable[[Results], float | None]


def case_document(case: str, batch: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results of a case: raw times, their best and median, and ratios to the plain gradient."""
    plain = {o.job.contender: o for o in outcomes if o.job.contender in PLAIN}
    floor = min((o.best for o in plain.values() if o.best is not None), default=None)
    memory = plain["plain"].peak_bytes if "plain" in plain else None
    norms = [o.clipped_sum_norm for o in outcomes if o.clipped_sum_norm is not None]
    agreed = statistics.median(norms) if norms else None
    return {
        "case": case,
        "batch": batch,
        "contenders": [
            {
                **outcome.to_json(),
                "time_ratio": None if outcome.job.contender == STEP else _ratio(outcome.best, floor),
                "memory_ratio": _ratio(outcome.peak_bytes, memory),
                "agrees": _agrees(outcome.clipped_sum_norm, agreed),
            }
            for outcome in outcomes
        ],
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _agrees(norm: float | None, agreed: float | None) -> bool | None:
    return None if norm is None or agreed is None else abs(norm - agreed) <= _DISAGREEMENT * agreed


# --- targets


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target: the value of a case is at most, or at least, a limit."""

    case: str
    name: str
    value: Value
    limit: float
    at_least: bool = False

    def check(self, results: Results) -> dict[str, Any]:
        """Whether the target holds; None if it was not measured."""
        value = self.value(results)
        holds = None if value is None else value >= self.limit if self.at_least else value <= self.limit
        promised = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return {"case": self.case, "target": self.name, "promised": promised, "value": value, "holds": holds}


def _field(contender: str, name: str) -> Value:
    return lambda results: results[contender][name] if contender in results else None


def _times_faster_than_opacus(results: Results) -> float | None:
    """Time of the faster mode of Opacus, among those with the correct gradient, over the time at k=1."""
    right = [results[name] for name in OPACUS if name in results and results[name]["agrees"]]
    best = min((each["best_seconds"] for each in right), default=None)
    return _ratio(best, _field("pmlf-k1", "best_seconds")(results))


def _memory_of_hooks(results: Results) -> float | None:
    return _ratio(_field("pmlf-k2", "peak_bytes")(results), _field("opacus", "peak_bytes")(results))


def _release_share(results: Results) -> float | None:
    accumulate, release = (_field(STEP, name)(results) for name in ("best_seconds", "best_release_seconds"))
    return None if accumulate is None or release is None else release / (accumulate + release)


def _time(k: int, case: str, limit: float) -> Target:
    return Target(case=case, name=f"time at k={k} / plain", value=_field(f"pmlf-k{k}", "time_ratio"), limit=limit)


def _memory(case: str, limit: float) -> Target:
    return Target(case=case, name="memory at k=2 / plain", value=_field("pmlf-k2", "memory_ratio"), limit=limit)


def _opacus(case: str, limit: float) -> Target:
    return Target(case=case, name="Opacus' best / k=1", value=_times_faster_than_opacus, limit=limit, at_least=True)


TARGETS = (
    *(_time(1, "cnn5", 1.2), _time(2, "cnn5", 2.3), _memory("cnn5", 3.0), _opacus("cnn5", 2.3)),
    Target(case="cnn5", name="release / step of 4 batches", value=_release_share, limit=0.02),
    *(_time(1, "resnet18", 1.1), _time(2, "resnet18", 2.15), _memory("resnet18", 3.0), _opacus("resnet18", 2.0)),
    *(_time(1, "vit", 1.2), _time(2, "vit", 2.25), _memory("vit", 2.5), _opacus("vit", 1.5)),
    *(_time(1, "roberta", 1.08), _time(2, "roberta", 2.1), _memory("roberta", 2.5), _opacus("roberta", 1.5)),
    Target(case="roberta", name="memory at k=2 / Opacus' hooks", value=_memory_of_hooks, limit=0.5),
    Target(case="roberta", name="release / step", value=_release_share, limit=0.15),
    *(_time(1, "linear", 1.6), _time(2, "linear", 2.4)),
    *(
        target
        for case, once, twice in (
            ("llama", 1.5, 2.9),
            ("t5", 1.5, 2.9),
            ("convnext", 1.5, 2.9),
            ("lstm", 2.5, 5.0),
            ("unet", 1.5, 2.9),
            ("llama-lora", 1.5, 2.9),
        )
        for target in (_time(1, case, once), _time(2, case, twice), _memory(case, 3.0))
    ),
)


def check_targets(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check all targets of the measured cases."""
    measured = {case["case"]: {each["contender"]: each for each in case["contenders"]} for case in cases}
    return [target.check(measured[target.case]) for target in TARGETS if target.case in measured]


# --- tables


def case_results(case: Mapping[str, Any]) -> list[RenderableType]:
    """A table with one row per contender, and a line for each that failed or disagrees."""
    title = f"{case['case']}, batch {case['batch']}: ms, MiB"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    for heading in ("best", "median", "/plain", "release", "peak", "/plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    remarks: list[RenderableType] = []
    for each in case["contenders"]:
        table.add_row(
            each["contender"],
            _milliseconds(each["best_seconds"]),
            _milliseconds(each["median_seconds"]),
            _number(each["time_ratio"]),
            _milliseconds(each["best_release_seconds"]),
            "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**20:.0f}",
            _number(each["memory_ratio"]),
        )
        if each["error"] is not None:
            remarks.append(f"{each['contender']} failed: {each['error']}")
        elif each["agrees"] is False:
            remarks.append(f"{each['contender']} computes another gradient: norm {each['clipped_sum_norm']:.6g}")
    return [table, *remarks]


def targets_table(targets: Sequence[Mapping[str, Any]]) -> Table:
    """One row per target."""
    table = Table("case", "value", box=SIMPLE_HEAD)
    for heading in ("measured", "target", "holds"):
        table.add_column(heading, justify="right")
    for each in targets:
        holds = {True: "yes", False: "NO", None: "not measured"}[each["holds"]]
        table.add_row(each["case"], each["target"], _number(each["value"], 3), each["promised"], holds)
    return table


def machine_line(document: Mapping[str, Any]) -> str:
    """One line about the machine and the settings."""
    machine, settings = document["machine"], document["settings"]
    scaled = "" if settings["batch_scale"] == 1.0 else f", batches scaled by {settings['batch_scale']:g}"
    clock = ", processor time" if settings["clock"] == "cpu" else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"opacus {machine['opacus']}, rounds {settings['rounds']}{scaled}{clock}, freed memory "
        f"{settings['freed_memory']}"
    )


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.2f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw time and memory relative to the plain gradient, one group of bars per case, into the image file `path`."""
    # Figure instead of pyplot: no display needed, no global state
    from matplotlib.figure import Figure

    cases = document["cases"]
    figure = Figure(figsize=(max(7.0, 2.0 + 2.2 * len(cases)), 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _bars(above, cases, "time_ratio", "time of one gradient / fastest plain gradient")
    _bars(below, cases, "memory_ratio", "peak memory / plain gradient")
    below.set_xticks(range(len(cases)), [f"{case['case']}\nbatch {case['batch']}" for case in cases])
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    figure.supxlabel(machine_line(document), fontsize=7)
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, cases: Sequence[Mapping[str, Any]], field: str, title: str) -> None:
    """One group of bars per case, without the whole step."""
    entered = dict.fromkeys(each["contender"] for case in cases for each in case["contenders"])
    names = [name for name in entered if name != STEP]
    axes.set_yscale("log", base=2)
    for offset, name in enumerate(names):
        shift = 0.85 * ((offset + 0.5) / len(names) - 0.5)
        found = [(i + shift, each) for i, case in enumerate(cases) for each in case["contenders"]]
        found = [(place, each) for place, each in found if each["contender"] == name]
        ratios = [(place, each[field]) for place, each in found if each[field] is not None]
        if ratios:
            places, heights = zip(*ratios, strict=True)
            bars = axes.bar(places, heights, width=0.8 / len(names), label=name, color=f"C{offset}")
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
        for place, each in found:
            if each["error"] is not None:
                axes.text(place, 1.05, "failed", color=f"C{offset}", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0.5)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
