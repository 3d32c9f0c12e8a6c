"""The results as Markdown, with sentences and tables, and the tables as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pmlf.reproduction import paper
from pmlf.reproduction.report import theory, words
from pmlf.reproduction.report.summary import Record, claims
from pmlf.reproduction.report.tables import ResultTable, panels, trials

_HEAD = """# Results

This page is made by `pmlf report docs/results/reproduction --markdown docs/results.md` from the records in that
folder. The same command writes an HTML page with charts, learning curves and certificates (`--out`). The paper's
numbers are marked as such. Accuracies are in per cent on the test split: mean ± standard deviation over seeds.
Differences are paired over seeds (same initial weights, same batches), with a 95 % confidence interval in parentheses
(Student's t). "Undecided" means that the interval includes 0. The standard deviation of differences counts as at least
one test record. The best mean of a column is bold, if all cells of the column have the same seeds.
"""


def markdown(records: Sequence[Record], diagnostics: Sequence[dict[str, Any]]) -> str:
    """The Markdown document. It leaves smoke runs out."""
    real = [record for record in records if record.profile != "smoke"]
    parts = [_HEAD, _items(words.verdicts(real))]
    parts.append("## Not run yet\n\n" + _items(words.missing(records)))
    for record in real:
        if record.done:
            parts.append(_record(record, real))
    for document in diagnostics:
        parts.append(_diagnostics(theory.view(document)))
    parts.append("## Limits of the comparison with the paper\n\n" + _items(words.NOT_COMPARABLE))
    return "\n".join(parts)


def latex(records: Sequence[Record]) -> str:
    """The tables in LaTeX, with booktabs. The best of a column is bold."""
    return "\n".join(_latex_panel(panel, record) for record in records if record.done for panel in panels(record))


def _record(record: Record, records: Sequence[Record]) -> str:
    statements = claims(record.artifact)["statements"]
    settings = "; ".join(dict.fromkeys(panel.title for panel in panels(record)))
    name = record.artifact.replace("-", " ").capitalize()
    parts = [f"## {name}: {settings} ({record.profile}, {record.protocol} rates)\n"]
    parts.append(f"In the paper: {paper.BY_NAME[record.artifact].title}. It says: {' '.join(statements)}\n")
    found = [*words.findings(record), *words.tuning(record, records)]
    if found:
        parts.append("Measured:\n\n" + _items(found))
    parts += [_panel(panel) for panel in panels(record)]
    tried = trials(record)
    if tried:
        rates = sorted({rate for one in tried for rate in one.accuracies})
        rows = [
            [
                one.label,
                *(f"{one.accuracies[rate]:.2f}" if rate in one.accuracies else "-" for rate in rates),
                _chosen(one.chosen, one.at_an_end),
            ]
            for one in tried
        ]
        parts.append(f"Trials of {tried[0].steps} steps, accuracy on the held-out records by learning rate:\n")
        parts.append(_table(["", *(f"{rate:g}" for rate in rates), "chosen"], rows))
    parts.append(_items([f"{name}: {value}" for name, value in words.facts(record)]))
    return "\n".join(parts)


def _chosen(rate: float | None, at_an_end: bool) -> str:
    return "" if rate is None else f"{rate:g}" + (" (end of the grid)" if at_an_end else "")


def _panel(panel: ResultTable) -> str:
    rows = []
    for variant, cells in panel.rows:
        shown = []
        for cell in cells:
            measured = f"**{cell.measured()}**" if cell.best else cell.measured()
            measured += (
                f" ({cell.seeds} seed{'' if cell.seeds == 1 else 's'})" if panel.seeds is None and cell.seeds else ""
            )
            shown.append(measured + (f"<br>*paper: {cell.claim}*" if cell.claim else ""))
        rows.append([variant, *shown])
    return f"{panel.title_with_seeds}:\n\n" + _table(["", *(f"ε = {epsilon:g}" for epsilon in panel.epsilons)], rows)


def _diagnostics(view: dict[str, Any]) -> str:
    head = ["quantity", "theory", "measured", "what it means"]
    begin = f"## Theory and measurement: {view['title']}\n\n`{view['command']}`\n\n"
    return begin + _table(head, [list(row) for row in view["rows"]])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines) or "Nothing.\n"


def _latex_panel(panel: ResultTable, record: Record) -> str:
    def entry(cell: Any) -> str:
        value = cell.measured(r"$\pm$")
        return rf"\textbf{{{value}}}" if cell.best else value

    head = " & ".join(["", *(rf"$\epsilon={epsilon:g}$" for epsilon in panel.epsilons)])
    rows = "\n".join(" & ".join([_escaped(variant), *map(entry, cells)]) + r" \\" for variant, cells in panel.rows)
    caption = _escaped(
        f"{panel.title_with_seeds}: test accuracy (%), {record.profile} profile, {record.protocol} learning rate."
    )
    return rf"""% {record.command}
\begin{{table}}
\caption{{{caption}}}
\begin{{tabular}}{{l{"r" * len(panel.epsilons)}}}
\toprule
{head} \\
\midrule
{rows}
\bottomrule
\end{{tabular}}
\end{{table}}
"""


def _escaped(words: str) -> str:
    for character in "%&#_{}":
        words = words.replace(character, f"\\{character}")
    return words.replace("ε", r"$\epsilon$")
