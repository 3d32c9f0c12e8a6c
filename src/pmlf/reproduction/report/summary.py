"""Statistics of records: means, deviations and paired differences over seeds, and verdicts on the paper's claims."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pmlf.reproduction import paper, stand_ins
from pmlf.reproduction.artifacts import PROFILES, PROTOCOLS

NAMES = {
    **{"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"},
    **{"fashion-mnist-small": "packaged images", "sst2": "SST-2", "qnli": "QNLI", "qqp": "QQP", "mnli": "MNLI"},
    **{"cnn5": "CNN-5", "resnet18": "ResNet-18", "vit": "ViT", "FacebookAI/roberta-base": "RoBERTa-base"},
    **{"resnet18-narrow": "ResNet-18 with 8 to 64 channels", "vit-mini": "ViT of two layers"},
    **{stand_ins.EMBEDDINGS: "SST-2 as embeddings by MiniLM-L6", "linear": "linear model"},
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Dataset, model and epsilon: what the cells of a comparison share."""

    dataset: str
    model: str
    epsilon: float

    def __str__(self) -> str:
        return f"{named(self.dataset)}, {named(self.model)}, ε = {self.epsilon:g}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Accuracy of `above` minus accuracy of `below`, in percentage points, over their common seeds."""

    place: Place
    above: str
    below: str
    mean: float
    half_width: float | None  # of the paired 95 % confidence interval; None for a single seed
    seeds: int
    runs: frozenset[str]  # keys of the compared runs; artifacts can share runs

    @property
    def verdict(self) -> str:
        """The verdict on the claim that `above` is better."""
        if self.half_width is None:
            return "one seed"
        if self.mean > self.half_width:
            return "holds"
        return "contradicted" if self.mean < -self.half_width else "cannot tell"

    @property
    def decided(self) -> bool:
        """Whether the confidence interval excludes 0."""
        return self.verdict in ("holds", "contradicted")


class CellResult:
    """One cell of a record, with its statistics. Accuracies are in per cent."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.place = Place(
            dataset=document["dataset"], model=document["model"], epsilon=float(document["target_epsilon"])
        )
        self.variant: str = document["variant"]
        self.runs: list[dict[str, Any]] = document["runs"]

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracy by seed."""
        return {run["seed"]: 100 * run["accuracy"] for run in self.runs}

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies.values()) if self.runs else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies.values()) if len(self.runs) > 1 else None

    @property
    def epsilon(self) -> float | None:
        """The largest true epsilon of the runs, by the PLD accountant."""
        return max((run["epsilon"] for run in self.runs), default=None)

    @property
    def seconds(self) -> float:
        return sum(run["cost"]["seconds"] for run in self.runs if run["cost"])

    @property
    def curve(self) -> list[tuple[float, float, float, float]]:
        """(epoch, mean, minimum, maximum) at the epochs that all runs have."""
        by_epoch: dict[float, list[float]] = {}
        for run in self.runs:
            for epoch, accuracy in run["curve"]:
                by_epoch.setdefault(epoch, []).append(100 * accuracy)
        complete = {epoch: values for epoch, values in by_epoch.items() if len(values) == len(self.runs)}
        return [(epoch, statistics.fmean(values), min(values), max(values)) for epoch, values in complete.items()]


class Record:
    """The record of one artifact, profile and protocol, as `pmlf reproduce` wrote it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.artifact: str = document["artifact"]
        self.profile: str = document["profile"]
        self.protocol: str = document["protocol"]
        self.command: str = document["command"]
        self.axis: str = document["axis"]
        self.cells = [CellResult(cell) for cell in document["cells"]]

    @property
    def key(self) -> str:
        return f"{self.artifact}-{self.profile}-{self.protocol}"

    @property
    def places(self) -> list[Place]:
        return list(dict.fromkeys(cell.place for cell in self.cells))

    def at(self, place: Place) -> list[CellResult]:
        """The cells of a place."""
        return [cell for cell in self.cells if cell.place == place]

    @property
    def done(self) -> int:
        """Number of complete runs."""
        return sum(len(cell.runs) for cell in self.cells)

    @property
    def planned(self) -> int:
        """Number of planned runs."""
        return sum(cell.document["planned_seeds"] for cell in self.cells)

    @property
    def trials(self) -> list[dict[str, Any]]:
        return [trial for cell in self.cells for trial in cell.document.get("trials", [])]

    @property
    def seconds(self) -> float:
        tuning = sum(trial["cost"]["seconds"] for trial in self.trials if trial["cost"])
        return tuning + sum(cell.seconds for cell in self.cells)

    @property
    def machines(self) -> list[str]:
        """The machines of the runs, each once."""
        found = [run["cost"] for cell in self.cells for run in cell.runs if run["cost"]]
        shown = (
            f"{cost['machine']['cpu']}, {cost['machine']['cores']} cores, {cost['threads']} thread"
            f"{'s' if cost['threads'] > 1 else ''} a run, device {cost['machine'].get('device', 'cpu')}, "
            f"torch {cost['machine']['torch']}"
            for cost in found
        )
        return list(dict.fromkeys(shown))

    @property
    def sources(self) -> dict[str, int]:
        """Number of runs by digest of the source code. Some old records do not have it."""
        runs = [run for cell in self.cells for run in cell.runs]
        return dict(Counter((run["cost"] or {"machine": {}})["machine"].get("code", "not recorded") for run in runs))

    def differences(self) -> Iterator[Difference]:
        """The differences behind the paper's claims that one variant is better, if both have runs."""
        for claim in claims(self.artifact)["claims"]:
            for place in self.places:
                if place.dataset != claim.get("dataset", place.dataset):
                    continue
                if place.epsilon != claim.get("epsilon", place.epsilon):
                    continue
                cells = {cell.variant: cell for cell in self.at(place)}
                for below in claim["below"]:
                    if _numbers_say_otherwise(self.artifact, place, claim["above"], below):
                        continue
                    found = difference(cells.get(claim["above"]), cells.get(below))
                    if found is not None:
                        yield found

    def gains_of_shaped_noise(self) -> Iterator[Difference]:
        """The differences between the row with shaped noise, which is no claim of the paper, and the other rows."""
        for place in self.places:
            cells = self.at(place)
            shaped = next((cell for cell in cells if cell.variant == paper.SHAPED_LABEL), None)
            found = (difference(shaped, cell) for cell in cells if cell is not shaped)
            yield from (one for one in found if one is not None)


def difference(above: CellResult | None, below: CellResult | None) -> Difference | None:
    """The difference of two cells, paired over common seeds; None if there are none."""
    if above is None or below is None:
        return None
    first, second = above.accuracies, below.accuracies
    pairs = [first[seed] - second[seed] for seed in first if seed in second]
    if not pairs:
        return None
    half_width = None
    if len(pairs) > 1:
        from scipy.stats import t

        # at least one record, the resolution of a split: equal differences can be a coincidence
        finest = 100 / min(run["judged_records"] for run in (*above.runs, *below.runs))
        deviation = max(statistics.stdev(pairs), finest)
        half_width = float(t.ppf(0.975, len(pairs) - 1)) * deviation / len(pairs) ** 0.5
    return Difference(
        place=above.place,
        above=above.variant,
        below=below.variant,
        mean=statistics.fmean(pairs),
        half_width=half_width,
        seeds=len(pairs),
        runs=frozenset(run["key"] for run in (*above.runs, *below.runs)),
    )


@cache
def paper_numbers() -> dict[str, Any]:
    """The paper's numbers and statements."""
    numbers: dict[str, Any] = json.loads((resources.files("pmlf") / "assets" / "paper_numbers.json").read_text())
    return numbers


def claims(artifact: str) -> dict[str, Any]:
    """The paper's numbers and statements of one artifact."""
    found: dict[str, Any] = paper_numbers()[artifact]
    return found


def claimed(artifact: str, place: Place, variant: str) -> dict[str, Any] | None:
    """The paper's number for a cell, if it has one for this dataset, model, variant and epsilon."""
    wanted = (place.dataset, place.model, variant, place.epsilon)
    for cell in claims(artifact)["cells"]:
        if (cell["dataset"], cell["model"], cell["variant"], float(cell["epsilon"])) == wanted:
            return dict(cell)
    return None


def _numbers_say_otherwise(artifact: str, place: Place, above: str, below: str) -> bool:
    """Whether the paper's numbers contradict its general claim here."""
    higher, lower = claimed(artifact, place, above), claimed(artifact, place, below)
    return higher is not None and lower is not None and higher["mean"] <= lower["mean"]


def named(name: str) -> str:
    """The usual spelling of a dataset or model."""
    return NAMES.get(name, name)


def read(folders: Sequence[Path]) -> tuple[list[Record], list[dict[str, Any]]]:
    """Read all records and diagnostics of some folders, in the paper's order. Of equal names, the last counts.

    Raises:
        ValueError: If a folder does not exist, a file is damaged, or there is nothing to report.
    """
    records: dict[str, Record] = {}
    diagnostics: list[dict[str, Any]] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder: give a folder that `pmlf reproduce` wrote")
        for path in sorted(folder.glob("*.json")):
            document = _document(path)
            if document.get("artifact") in paper.BY_NAME:
                record = Record(document)
                records[record.key] = record
        for path in sorted(folder.glob("**/diagnostics*.json")):
            diagnostics.append(_document(path))
    if not records and not diagnostics:
        raise ValueError(
            f"there is no record in {', '.join(map(str, folders))}: run for example `pmlf reproduce table-4 --profile "
            "smoke` and give its folder"
        )

    def order(record: Record) -> tuple[int, int, int]:
        names = list(paper.BY_NAME)
        return names.index(record.artifact), PROFILES.index(record.profile), PROTOCOLS.index(record.protocol)

    return sorted(records.values(), key=order), diagnostics


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: restore the file") from error
    return document if isinstance(document, dict) else {}
