"""Results on stdout: facts in two columns, tables, a chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pmlf.experiments.comparing import MethodResults
from pmlf.experiments.results import RunResult
from pmlf.experiments.spec import RunSpec

if TYPE_CHECKING:  # they import torch, which takes seconds
    from pmlf.audit import AuditReport, ModelReport
    from pmlf.evidence.certificate import Claim
    from pmlf.mechanism.filter_report import FilterReport
    from pmlf.mechanism.shape_report import ShapeReport

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_MOVES_NAMED = 3


def duration(seconds: float) -> str:
    """Seconds as text, with minutes from 60 s on.

    >>> duration(75.3), duration(9.04)
    ('1 min 15 s', '9.0 s')
    """
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def sparkline(fractions: Sequence[float]) -> str:
    """Values from 0 to 1 as block characters.

    >>> sparkline([0.1, 0.6, 1.0])
    '▁▅█'
    """
    return "".join(_BLOCKS[min(int(value * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in fractions)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns. Unlike a table, it does not wrap long paths.

    >>> print(facts([("epsilon", "3"), ("steps", "10")]))
    epsilon  3
    steps    10
    """
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def run_summary(result: RunResult) -> str:
    """The result of a run in a few lines."""
    spec = result.spec
    noise = "cryptographic" if spec.seed is None else f"seed {spec.seed}: reproducible, so do not release this model"
    return facts(
        [
            ("run", f"{spec.method}, {spec.model_name} on {spec.dataset}"),
            *_scores(result),
            ("epsilon", _epsilon(result)),
            ("steps", f"{result.steps} of {result.planned_steps}, {duration(result.seconds)}{_why_fewer(result)}"),
            ("noise multiplier", f"{result.noise_multiplier:.4g}"),
            ("noise", noise),
            ("written to", str(result.out)),
        ]
    )


def _epsilon(result: RunResult) -> str:
    """The certified epsilon, and the epsilon spent if that is less."""
    spent, unit = f"{result.epsilon:.4g}", _protected(result.spec)
    if result.certified_epsilon is None:
        return f"{spent} spent at delta {result.spec.delta:.3g}; no epsilon is certified"
    certified = f"{result.certified_epsilon:.4g}"
    rest = "" if certified == spent else f"; {spent} spent so far"
    return f"{certified} at delta {result.spec.delta:.3g}, {unit}{rest}"


def _protected(spec: RunSpec) -> str:
    """Whom epsilon is for."""
    unit = spec.own.unit_column
    what = "one training record" if unit is None else f"one {unit} with all records"
    return f"for adding or removing {what}" if spec.largest_batch is None else f"for zeroing out {what}"


def _why_fewer(result: RunResult) -> str:
    return "; stopped early: lost steps or other runs in the ledger used up its epsilon" if result.budget_spent else ""


def _scores(result: RunResult) -> list[tuple[str, str]]:
    """One line per split: accuracy with its confidence interval, and F1 and the EMA's accuracy if there are any."""
    if not result.evaluations:
        return [("test accuracy", "-")]
    last = result.evaluations[-1]
    lines = []
    for split, score in last.scores.items():
        line = score.in_words()
        if last.ema_scores is not None:
            line += f", EMA {last.ema_scores[split].brief()}"
        lines.append((f"{split} {score.metric}", line))
    return lines


def comparison_table(methods: Sequence[MethodResults]) -> Table:
    """One row per method; the best accuracy is bold."""
    several = len(methods[0].runs) > 1
    table = Table(box=SIMPLE_HEAD)
    table.add_column("method")
    gain = [f"gain over {methods[0].method}"] if several else []
    for heading in ("epsilon", f"test {methods[0].runs[0].metric}", *gain, "time"):
        table.add_column(heading, justify="right")
    best = max((each.accuracy or 0.0 for each in methods), default=0.0)
    for each in methods:
        table.add_row(
            each.method,
            f"{each.epsilon:.4g}",
            _with_interval(each),
            *([_gain(each.gain_over(methods[0])) if each is not methods[0] else ""] if several else []),
            duration(each.seconds),
            style="bold" if each.accuracy == best else None,
        )
    return table


def _with_interval(each: MethodResults) -> str:
    """The mean over seeds with half the width of its interval; one seed's score alone."""
    if len(each.runs) == 1 or each.accuracy is None or each.interval is None:
        return each.brief
    low, high = each.interval
    return f"{100 * each.accuracy:.1f} ± {50 * (high - low):.1f} %"


def _gain(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{100 * found[0]:+.1f} ± {100 * found[1]:.1f}"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Each epsilon of a certificate, as stated and as recomputed from its numbers."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("claim")
    for heading in ("stated", "recomputed"):
        table.add_column(heading, justify="right")
    table.add_column("holds")
    for claim in claims:
        row = (claim.name.replace("_", " "), f"{claim.stated:.6g}", f"{claim.recomputed:.6g}")
        table.add_row(*row, "yes" if claim.holds else "NO")
    return table


def ledger_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run in a ledger, after one for each of its queries. Events of shaped noise are those of a group."""
    shaped = any(run["bands"] > 1 for run in runs)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("run")
    for heading in ("steps", "planned", *("bands", "events") * shaped, "noise multiplier", "sample rate"):
        table.add_column(heading, justify="right")
    for run in runs:
        queries = [(f"{run['run']}, {query['name']}", query, query["planned"]) for query in run.get("queries", ())]
        for name, part, planned in [*queries, (run["run"], run, run["planned_steps"])]:
            counts = (part.get("steps", part["events"]), planned)
            of_groups = (part.get("bands", 1), part["events"]) if shaped else ()
            noise, rate = f"{part['noise_multiplier']:.4g}", f"{part['sample_rate']:.4g}"
            table.add_row(name, *map(str, (*counts, *of_groups)), noise, rate)
    return table


def filter_summary(report: FilterReport) -> str:
    """The properties of a filter."""

    def listed(values: Sequence[float]) -> str:
        return "  ".join(f"{value:.4g}" for value in values) or "none"

    poles = [f"{real:.4g}" + (f"{imaginary:+.4g}i" if imaginary else "") for real, imaginary in report.poles]
    return facts(
        [
            ("a", listed(report.a)),
            ("b", listed(report.b)),
            ("bias correction", "yes" if report.corrected else "no"),
            ("poles", "  ".join(poles) or "none"),
            ("DC gain", f"{report.dc_gain:.4g}"),
            ("noise gain", f"{report.noise_gain:.4g}"),
            ("mean delay", "none" if report.mean_delay is None else f"{report.mean_delay:.4g} steps"),
            ("weights", listed(report.weights)),
            ("all weights >= 0", "yes" if report.convex else "no"),
        ]
    )


def shape_summary(report: ShapeReport) -> str:
    """What a noise shape does with a filter, at equal noise multipliers."""

    def ratios(left: Mapping[float, float]) -> str:
        return "  ".join(f"{value:.3g} (h={curvature:g})" for curvature, value in left.items())

    return facts(
        [
            ("noise shape", "  ".join(f"{value:.4g}" for value in report.coefficients)),
            ("noise of a release", f"{report.power:.4g}, after the filter {report.filtered_power:.4g}"),
            ("left in parameters", ratios(report.left)),
            ("left by white noise", ratios(report.left_by_white)),
        ]
    )


def response_table(gains: Mapping[float, float]) -> Table:
    """Gain of the filter by frequency."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("cycles per step", "gain", "dB"):
        table.add_column(heading, justify="right")
    for frequency, gain in gains.items():
        table.add_row(f"{frequency:.2f}", f"{gain:.4g}", f"{20 * math.log10(max(gain, 1e-12)):.1f}")
    return table


def audit_table(reports: Sequence[AuditReport]) -> Table:
    """One row per bound: the claimed epsilon, the measured lower bound, and whether it refutes the claim."""
    table = Table(box=SIMPLE_HEAD, title="epsilon: the claim and measured lower bounds", title_justify="left")
    table.add_column("audited")
    table.add_column("bound")
    for heading in ("at delta", "claimed", "at least"):
        table.add_column(heading, justify="right")
    table.add_column("claim")
    for report in reports:
        for index, bound in enumerate(report.bounds):
            table.add_row(
                "" if index else report.subject,
                bound.name,
                f"{bound.delta:.3g}",
                f"{bound.claimed:.4g}",
                f"{bound.epsilon:.4g}",
                "REFUTED" if bound.refutes else "not refuted",
                style="bold" if bound.refutes else None,
            )
    return table


def sensitivity_table(reports: Sequence[ModelReport]) -> Table:
    """One row per model: how far the worst record found moves the clipped sum."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("audited")
    for heading in ("sum moved by", "in float64", "tried", "refused"):
        table.add_column(heading, justify="right")
    table.add_column("claim")
    for report in reports:
        found = report.sensitivity
        table.add_row(
            report.subject,
            f"{found.multiple:.6f} C",
            "-" if found.exact is None else f"{found.exact:.6f} C",
            str(found.evaluations),
            str(found.refused),
            "not refuted" if found.holds else "REFUTED",
            style=None if found.holds else "bold",
        )
    return table


def worst_records(reports: Sequence[ModelReport]) -> str:
    """Where the search found each worst record and by which moves. Never the record itself."""
    rows = []
    for report in reports:
        found = report.sensitivity
        mode = "training" if found.training else "eval"
        where = f"example {found.example} with {found.others} others, {mode} mode, release {found.releases + 1}"
        rows.append((report.subject, f"{where}; {_counted(found.moves)}"))
    return facts(rows)


def _counted(moves: Sequence[str]) -> str:
    """Moves by name, the most frequent first.

    >>> _counted(["scale", "make zero", "scale"])
    '2 x scale, 1 x make zero'
    """
    counts = Counter(moves).most_common(_MOST_MOVES_NAMED)
    rest = len(moves) - sum(count for _, count in counts)
    named = [f"{count} x {name}" for name, count in counts] + ([f"{rest} more moves"] if rest else [])
    return ", ".join(named) or "unchanged"


def plot_accuracy(methods: Sequence[MethodResults], path: Path) -> None:
    """Draw test accuracy against epochs with its 95 % interval, one line per method, into the image file `path`."""
    # Figure instead of pyplot: no display needed, no global state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for each in methods:
        course = each.course()
        epochs = [epoch for epoch, _, _ in course]
        label = f"{each.method} ({each.brief})"
        (drawn,) = axes.plot(epochs, [mean for _, mean, _ in course], marker="o", label=label)
        known = [(epoch, interval) for epoch, _, interval in course if interval is not None]
        low, high = ([interval[end] for _, interval in known] for end in (0, 1))
        axes.fill_between([epoch for epoch, _ in known], low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
    first = methods[0].runs[0]
    seeds = len(methods[0].runs)
    over = f"mean of {seeds} seeds, 95 % interval of it" if seeds > 1 else "95 % interval over test records"
    axes.set(
        title=f"{first.spec.model} on {first.spec.dataset}, epsilon {first.epsilon:.3g}, delta {first.spec.delta:.3g}",
        xlabel="epoch",
        ylabel="1 / test perplexity" if first.metric == "perplexity" else f"test {first.metric}, {over}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
