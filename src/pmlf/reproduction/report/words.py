"""The sentences of the report, for the page and for Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pmlf.reproduction import paper
from pmlf.reproduction.artifacts import PROTOCOLS
from pmlf.reproduction.report.summary import CellResult, Difference, Record, difference, named
from pmlf.reproduction.report.tables import duration

_USEFUL_BOUND = 3.0  # points; a larger bound on a lead says nothing
PROFILE_WORDS = {
    "paper": "the paper's setting",
    "cpu": "a reduced form of the paper's setting, the same for every method",
    "smoke": "a test of a few seconds; its accuracies mean nothing",
}
PROTOCOL_WORDS = {
    "shared": "every method uses the paper's learning rate, 0.5",
    "tuned": (
        "each method uses the learning rate that is best on 10 % held-out training records. All methods have the same "
        "grid and the same number of trials, all with one seed. The "
        "final runs use the full training set. Tuning is not accounted for in epsilon"
    ),
}
NOT_COMPARABLE = (
    "The public code of the paper clips the gradient at each of the k points and adds them with weight one. One record "
    "then moves the sum by up to k C, while the noise is scaled to C. At k = 2 and 50 epochs on CIFAR, a claimed "
    "epsilon of 1 is really 2.3, and a claimed 8 is 57 (PLD; see tests/mechanism/test_accounting.py). The runs here "
    "clip once, and their epsilon is the one stated.",
    "The public code trains a linear model on MNIST and Fashion-MNIST, whatever the model option says. The paper's "
    "numbers for these datasets may therefore be those of a linear model. Table 4 is run with both models.",
    "The public code uses automatic clipping, AutoAugment on CIFAR, delta = n^-1.1 and 100 outputs for CIFAR-10. The "
    "paper states clipping at C = 1 and delta = 1/n, and mentions no augmentation. The runs here follow the paper.",
    "The number of epochs for CIFAR is 50 in the paper's captions and 20 in its appendix. Its Figure 2 shows CNN-5 at "
    "about 47 %, its Figure 4 shows the same setting at about 54 %.",
    "InnerOuter is implemented from the paper's description. Its filter has a DC gain of 10, so at a shared learning "
    "rate its steps are ten times as large. The tuned protocol is the fairer comparison.",
    "The paper gives no numbers for its figures. Next to them, this report shows the paper's statements.",
)


# what two cores can run in a day
TO_RECORD = (
    *((name, "shared") for name in paper.BY_NAME),
    ("table-1", "tuned"),
    ("table-2", "tuned"),
)


def missing(records: Sequence[Record]) -> list[str]:
    """What has not been run, of the set for two cores and of the records."""
    lines = []
    real = [record for record in records if record.profile != "smoke" and record.done]
    for name, protocol in TO_RECORD:
        if not any((record.artifact, record.protocol) == (name, protocol) for record in real):
            command = f"pmlf reproduce {name} --profile cpu --protocol {protocol}"
            lines.append(f"{name}, {protocol}: no run beyond the smoke profile; run `{command}`")
    for record in real:
        if record.done < record.planned:
            lines.append(f"{record.artifact}: {record.done} of {record.planned} runs done; run `{record.command}`")
    return lines


def findings(record: Record) -> list[str]:
    """The findings of a record: which of the paper's orderings hold, what shaped noise gains, and by how much."""
    differences = [*record.differences(), *record.gains_of_shaped_noise()]
    lines = []
    for claim in dict.fromkeys((d.above, d.place) for d in differences):
        mine = [d for d in differences if (d.above, d.place) == claim]
        lines.append(f"{claim[1]}: {_compared(mine)}.")
    if record.axis == "beta":
        for place in record.places:
            means = [cell.mean for cell in record.at(place) if cell.mean is not None]
            if len(means) > 1:
                lines.append(f"{place}: the means for all beta lie within {max(means) - min(means):.1f} points.")
    return lines


def tuning(record: Record, records: Sequence[Record]) -> list[str]:
    """How the tuned learning rates change the accuracy compared with the shared rate, paired over seeds."""
    if record.protocol != "tuned":
        return []
    lines = []
    for shared in records:
        if (shared.artifact, shared.profile, shared.protocol) == (record.artifact, record.profile, "shared"):
            for place in record.places:
                before = {cell.variant: cell for cell in shared.at(place)}
                changes = [difference(cell, before.get(cell.variant)) for cell in record.at(place)]
                changed = ", ".join(f"{one.above} {signed(one)}" for one in changes if one is not None)
                if changed:
                    lines.append(f"{place}: the tuned rate instead of the shared rate changes {changed}.")
    return lines


def signed(difference: Difference) -> str:
    """A difference with its confidence interval, in points.

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
    """How the runs of a record were made."""
    by_target: dict[float, list[float]] = {}
    for cell in record.cells:
        by_target.setdefault(cell.place.epsilon, []).extend(run["epsilon"] for run in cell.runs)
    true = [f"at most {max(values):.4g} for a target of {target:g}" for target, values in by_target.items() if values]
    deltas = sorted({run["delta"] for cell in record.cells for run in cell.runs})
    trials = f", and {len(record.trials)} trials" if record.trials else ""
    return [
        ("command", f"`{record.command}`"),
        ("profile", f"{PROFILE_WORDS[record.profile]}: {'; '.join(_settings(record))}"),
        ("protocol", PROTOCOL_WORDS[record.protocol] + _trial_lengths(record)),
        ("runs", f"{record.done} of {record.planned}{trials}"),
        ("true epsilon", f"{', '.join(true) or 'none yet'} (PLD), delta {', '.join(f'{d:.3g}' for d in deltas)}"),
        ("machine", "; ".join(record.machines) or "not recorded"),
        (
            "source",
            ", ".join(f"{code}: {count} run{'s' if count > 1 else ''}" for code, count in record.sources.items()),
        ),
        ("cost", f"{duration(record.seconds)} of training and evaluation, summed over all runs"),
    ]


def _trial_lengths(record: Record) -> str:
    """The steps of trials and of final runs. A trial has the epochs of a final run, on fewer records."""
    pairs = sorted(
        {
            (trial["steps"], run["steps"])
            for cell in record.cells
            for trial in cell.document.get("trials", [])
            for run in cell.runs
        }
    )
    shown = ", ".join(f"{trial} and {final}" for trial, final in pairs)
    return f". Steps of a trial and of a final run: {shown}" if pairs else ""


def _settings(record: Record) -> list[str]:
    """One line for each dataset, model and number of steps: records, steps, seeds, noise."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for cell in record.cells:
        document = cell.document
        records = "all records" if document["records"] is None else f"the first {document['records']:,} records"
        size = document.get("image_size")  # where images are smaller than the dataset's
        records += f", images of {size} x {size}" if size else ""
        length = f"{document['steps']} steps" if document["epochs"] is None else f"{document['epochs']:g} epochs"
        seeds = f"{document['planned_seeds']} seed{'s' if document['planned_seeds'] > 1 else ''}"
        length = f"{records}, {length} with batches of {document['batch_size']}, {seeds}"
        groups.setdefault((f"{named(cell.place.dataset)}, {named(cell.place.model)}", length), []).append(cell)
    lines = []
    for (what, length), cells in groups.items():
        noise: dict[tuple[float, int], list[str]] = {}  # shaped noise has a multiplier of its own
        for cell in cells:
            for run in cell.runs[:1]:
                of_steps = noise.setdefault((cell.place.epsilon, run["steps"]), [])
                if (shown := f"{run['noise_multiplier']:.3g}") not in of_steps:
                    of_steps.append(shown)
        drawn = [f"{steps} steps with noise multiplier {' or '.join(z)} (ε = {e:g})" for (e, steps), z in noise.items()]
        lines.append(f"{what}: {length}" + (f", {', '.join(drawn)}" if drawn else ""))
    return lines


def comparisons(records: Sequence[Record]) -> list[tuple[Record, Difference]]:
    """All orderings with runs beyond the smoke profile. An ordering of several artifacts appears once."""
    found: dict[frozenset[str], tuple[Record, Difference]] = {}
    for record in records:
        if record.profile != "smoke":
            for one in record.differences():
                found.setdefault(one.runs, (record, one))
    return list(found.values())


def tally(records: Sequence[Record]) -> Counter[str]:
    """Number of orderings by verdict."""
    return Counter(one.verdict for _, one in comparisons(records))


def verdicts(records: Sequence[Record]) -> list[str]:
    """One sentence per protocol with the number of orderings by verdict."""
    lines = []
    for protocol in PROTOCOLS:
        counts = tally([record for record in records if record.protocol == protocol])
        tested, unclear = counts.total() - counts["one seed"], counts["cannot tell"] + counts["one seed"]
        if counts:
            lines.append(
                f"With {protocol} learning rates, {counts.total()} of the paper's orderings were tested: "
                f"{counts['holds']} held up, {counts['contradicted']} were contradicted and {unclear} are undecided. "
                f"Of {tested} intervals at 95 %, about {tested / 20:.1f} exclude 0 by chance."
            )
    return lines


def _compared(differences: Sequence[Difference]) -> str:
    """A sentence that compares one variant with the others at one place."""
    by_verdict: dict[str, list[Difference]] = {}
    for one in differences:
        by_verdict.setdefault(one.verdict, []).append(one)
    phrases = {
        "holds": "is above",
        "contradicted": "is below",
        "cannot tell": "is undecided against",
        "one seed": "has a single seed, too few for an interval, against",
    }
    parts = [
        f"{phrases[verdict]} " + ", ".join(f"{one.below} {signed(one)}" for one in by_verdict[verdict])
        for verdict in phrases
        if verdict in by_verdict
    ]
    unclear = by_verdict.get("cannot tell", [])
    bounds = [one.mean + one.half_width for one in unclear if one.half_width is not None]
    if bounds and max(bounds) <= _USEFUL_BOUND:
        parts.append(f"where undecided, its lead is below {max(bounds):.2f} points")
    elif bounds:
        parts.append(f"{unclear[0].seeds} seeds are too few to bound its lead where undecided")
    return f"{differences[0].above} " + "; ".join(parts)
