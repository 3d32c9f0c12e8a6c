"""What is said in words, on the page and in Markdown alike: what cannot be compared, and what the records show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pmlf.reproduction import paper
from pmlf.reproduction.artifacts import PROTOCOLS
from pmlf.reproduction.report.summary import Cell, Difference, Record, difference, named
from pmlf.reproduction.report.tables import duration

_TELLING = 3.0  # points: a bound on a lead above this says nothing
PROFILE_WORDS = {
    "paper": "the paper's own setting",
    "cpu": "a reduction of the paper's setting, the same for every method",
    "smoke": "seconds long: it shows that everything runs, and its accuracies mean nothing",
}
PROTOCOL_WORDS = {
    "shared": "every method has the paper's learning rate, 0.5",
    "tuned": (
        "each method has the learning rate that did best on 10 % held-out training records, out of the same grid and "
        "by as many trials, all with one seed; a trial is the beginning of a final run, with its noise, and the final "
        "runs use the full training set. Tuning is not accounted for in epsilon"
    ),
}
NOT_COMPARABLE = (
    "The public code behind the paper's numbers clips the gradient at each of the k points and adds them with unit "
    "weights, so that one record moves the sum by up to k C while the noise is scaled to C. At k = 2 and 50 CIFAR "
    "epochs a claimed epsilon of 1 is 2.3 and a claimed 8 is 57 (PLD; tests/test_accounting.py has both). The runs "
    "here clip once, and their epsilon is the one stated.",
    "That code trains a linear model on MNIST and Fashion-MNIST whatever the model option says, so the paper's numbers "
    "there may be a linear model's, whatever model they name. Table 4 is therefore run with both.",
    "It uses automatic clipping, AutoAugment on CIFAR, delta = n^-1.1 and 100 outputs for CIFAR-10, where the paper "
    "says clipping at C = 1 and delta = 1/n and speaks of no augmentation. The runs here do what the paper says.",
    "Epochs for CIFAR are 50 in the paper's captions and 20 in its appendix; its Figure 2 has CNN-5 at about 47 % and "
    "its Figure 4 the same setting at about 54 %.",
    "InnerOuter is rebuilt from the paper's words. Its filter has a steady gain of 10, so at a shared learning rate it "
    "steps ten times as far: the tuned protocol is the fairer comparison.",
    "Of the figures the paper has no numbers, only pictures and sentences; what stands beside them here is those "
    "sentences.",
)


# What two cores can run in about a day's third; the others are for GPUs.
TO_RECORD = (
    *((name, "shared") for name in ("figure-1", "figure-2", "figure-3", "figure-4", "figure-6", "figure-7", "table-4")),
    ("figure-2", "tuned"),
)


def missing(records: Sequence[Record]) -> list[str]:
    """What is not finished, what of the set for two cores is not begun, and what is not in that set."""
    lines = []
    real = [record for record in records if record.profile != "smoke" and record.done]
    for name, protocol in TO_RECORD:
        if not any((record.artifact, record.protocol) == (name, protocol) for record in real):
            command = f"pmlf reproduce {name} --profile cpu --protocol {protocol}"
            lines.append(f"{name}, {protocol}: not run beyond smoke; `{command}`")
    for record in real:
        if record.done < record.planned:
            lines.append(f"{record.artifact}: {record.done} of {record.planned} runs done; `{record.command}`")
    begun = {name for name, _ in TO_RECORD} | {record.artifact for record in real}
    left = [name for name in paper.BY_NAME if name not in begun]
    if left:
        lines.append(f"not meant for two cores, and run in smoke alone: {', '.join(left)}")
    return lines


def findings(record: Record) -> list[str]:
    """A record in plain words: how many of the paper's orderings hold, and by how much."""
    differences = list(record.differences())
    lines = []
    for claim in dict.fromkeys((d.above, d.place) for d in differences):
        mine = [d for d in differences if (d.above, d.place) == claim]
        lines.append(f"{claim[1]}: {_compared(mine)}.")
    if record.axis == "beta":
        for place in record.places:
            means = [cell.mean for cell in record.at(place) if cell.mean is not None]
            if len(means) > 1:
                lines.append(f"{place}: the means over beta lie within {max(means) - min(means):.1f} points.")
    return lines


def tuning(record: Record, records: Sequence[Record]) -> list[str]:
    """What a record's chosen learning rates changed against the shared one, paired over seeds."""
    if record.protocol != "tuned":
        return []
    lines = []
    for shared in records:
        if (shared.artifact, shared.profile, shared.protocol) == (record.artifact, record.profile, "shared"):
            for place in record.places:
                before = {cell.variant: cell for cell in shared.at(place)}
                changes = [difference(cell, before.get(cell.variant)) for cell in record.at(place)]
                told = ", ".join(f"{one.above} {signed(one)}" for one in changes if one is not None)
                if told:
                    lines.append(f"{place}: the chosen rate in place of the shared one changes {told}.")
    return lines


def signed(difference: Difference) -> str:
    """+1.2 (0.3 to 2.1), in points.

    >>> from pmlf.reproduction.report.summary import Place
    >>> place = Place(dataset="mnist", model="cnn5", epsilon=1)
    >>> signed(Difference(place=place, above="a", below="b", mean=1.25, half_width=1, seeds=3, runs=frozenset()))
    '+1.25 (+0.25 to +2.25)'
    """
    if difference.half_width is None:
        return f"{difference.mean:+.2f}"
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    return f"{difference.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def facts(record: Record) -> list[tuple[str, str]]:
    """How a record was obtained."""
    asked: dict[float, list[float]] = {}
    for cell in record.cells:
        asked.setdefault(cell.place.epsilon, []).extend(run["epsilon"] for run in cell.runs)
    true = [f"at most {max(values):.4g} where {target:g} was asked" for target, values in asked.items() if values]
    deltas = sorted({run["delta"] for cell in record.cells for run in cell.runs})
    trials = f", and {len(record.trials)} trials" if record.trials else ""
    return [
        ("command", f"`{record.command}`"),
        ("profile", f"{PROFILE_WORDS[record.profile]}: {'; '.join(_settings(record))}"),
        ("protocol", PROTOCOL_WORDS[record.protocol]),
        ("runs", f"{record.done} of {record.planned}{trials}"),
        ("true epsilon", f"{', '.join(true) or 'none yet'} (PLD), delta {', '.join(f'{d:.3g}' for d in deltas)}"),
        ("machine", "; ".join(record.machines) or "not recorded"),
        (
            "source",
            ", ".join(f"{code}: {count} run{'s' if count > 1 else ''}" for code, count in record.sources.items()),
        ),
        ("cost", f"{duration(record.seconds)} of training and evaluation, the runs added up"),
    ]


def _settings(record: Record) -> list[str]:
    """A line for every dataset, model and length of training: records, steps, seeds, noise."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in record.cells:
        document = cell.document
        records = "all records" if document["records"] is None else f"the first {document['records']:,} records"
        length = f"{document['steps']} steps" if document["epochs"] is None else f"{document['epochs']:g} epochs"
        seeds = f"{document['planned_seeds']} seed{'s' if document['planned_seeds'] > 1 else ''}"
        said = f"{records}, {length} of batches of {document['batch_size']}, {seeds}"
        groups.setdefault((f"{named(cell.place.dataset)}, {named(cell.place.model)}", said), []).append(cell)
    lines = []
    for (what, said), cells in groups.items():
        noise = {c.place.epsilon: (c.runs[0]["noise_multiplier"], c.runs[0]["steps"]) for c in cells if c.runs}
        drawn = [f"{steps} steps of noise multiplier {z:.3g} (ε = {e:g})" for e, (z, steps) in noise.items()]
        lines.append(f"{what}: {said}" + (f", {', '.join(drawn)}" if drawn else ""))
    return lines


def comparisons(records: Sequence[Record]) -> list[tuple[Record, Difference]]:
    """Every ordering that was run, smoke left out; one that artifacts share comes once, with the first of them."""
    found: dict[frozenset[str], tuple[Record, Difference]] = {}
    for record in records:
        if record.profile != "smoke":
            for one in record.differences():
                found.setdefault(one.runs, (record, one))
    return list(found.values())


def tally(records: Sequence[Record]) -> Counter[str]:
    """How often each verdict was reached."""
    return Counter(one.verdict for _, one in comparisons(records))


def verdicts(records: Sequence[Record]) -> list[str]:
    """The tally in words, by protocol."""
    lines = []
    for protocol in PROTOCOLS:
        counts = tally([record for record in records if record.protocol == protocol])
        tested, unclear = counts.total() - counts["one seed"], counts["cannot tell"] + counts["one seed"]
        if counts:
            lines.append(
                f"With {protocol} learning rates, of {counts.total()} of the paper's orderings that were run "
                f"{counts['holds']} hold, {counts['contradicted']} are contradicted and {unclear} cannot be told. Of "
                f"{tested} intervals at 95 %, about {tested / 20:.1f} leave 0 out by chance."
            )
    return lines


def _compared(differences: Sequence[Difference]) -> str:
    """One place and one variant against the others."""
    by_verdict: dict[str, list[Difference]] = {}
    for one in differences:
        by_verdict.setdefault(one.verdict, []).append(one)
    phrases = {
        "holds": "is above",
        "contradicted": "is below",
        "cannot tell": "cannot be told from",
        "one seed": "has a single seed, too few for an interval, against",
    }
    parts = [
        f"{phrases[verdict]} " + ", ".join(f"{one.below} {signed(one)}" for one in by_verdict[verdict])
        for verdict in phrases
        if verdict in by_verdict
    ]
    unclear = by_verdict.get("cannot tell", [])
    bounds = [one.mean + one.half_width for one in unclear if one.half_width is not None]
    if bounds and max(bounds) <= _TELLING:
        parts.append(f"where it cannot be told, its lead is below {max(bounds):.2f} points")
    elif bounds:
        parts.append(f"{unclear[0].seeds} seeds are too few to bound a lead where it cannot be told")
    return f"{differences[0].above} " + "; ".join(parts)
