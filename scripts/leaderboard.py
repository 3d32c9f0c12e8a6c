"""Write docs/leaderboard.md from the stored records in docs/results.

python scripts/leaderboard.py            # writes the page
python scripts/leaderboard.py --check    # fails if the page is not what the records say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results"
PAGE = DOCS / "leaderboard.md"
DATASETS = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "sst2": "SST-2"}
_TEST_RECORDS = {"cifar10": 10_000, "fashion-mnist": 10_000, "mnist": 10_000, "sst2": 872}
HEAD = """# Leaderboard

Accuracy by privacy budget, for adding or removing one record, delta 1e-5.
`python scripts/leaderboard.py` makes this page from the records in `docs/results`.

- **Measured** rows are this library's, on CPUs: mean over seeds, and a 95 % interval. With several seeds it is
  Student's interval of the mean over seeds; it leaves out the choice of test records, which is 2.7 points either way
  on the 872 sentences of SST-2. With one seed it is Wilson's interval of one model.
- A row links to its record, which holds the command, the settings, the certified epsilon of every run and the times.
- *Published* rows are what others report. They were not run here; hardware, models and tuning differ.
- Time of training is a share: models of all epsilons of a seed are trained side by side, in one pass over the features.
- Tuning is not in epsilon, in either kind of row. The settings of measured rows come from held-out training records.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    dataset: str
    epsilon: float
    recipe: str
    accuracy: str
    seeds: str
    time: str
    source: str
    order: float

    def markdown(self) -> str:
        cells = (f"{self.epsilon:g}", self.recipe, self.accuracy, self.seeds, self.time, self.source)
        return f"| {' | '.join(cells)} |"


def rows() -> Iterator[Row]:
    """All rows, in no order."""
    for path in sorted(RESULTS.glob("prior-linear-*.json")):
        document = json.loads(path.read_text())
        if document["split"] == "test":
            yield from prior_rows(path.name, document)
    for path in sorted(RESULTS.glob("recipe-*.json")):
        document = json.loads(path.read_text())
        if "scores" in document and path.stem in ("recipe-cifar10", "recipe-mnist", "recipe-sst2"):
            yield network_row(path.name, document)
    for figure in json.loads((RESULTS / "published.json").read_text())["figures"]:
        about = "about " if figure.get("about") else ""
        yield Row(
            dataset=figure["dataset"],
            epsilon=figure["epsilon"],
            recipe=f"*published:* {figure['recipe']}",
            accuracy=f"*{about}{figure['accuracy']:g}*",
            seeds="",
            time="",
            source=figure["source"],
            order=figure["accuracy"],
        )


def prior_rows(name: str, document: dict[str, Any]) -> Iterator[Row]:
    """A private linear model on features: one row per epsilon."""
    records = _TEST_RECORDS[document["dataset"]]
    for epsilon, found in document["summary"].items():
        runs = [run for run in document["runs"] if run["target_epsilon"] == float(epsilon)]
        shares = [run["processor_seconds_of_all_trained_together"] / run["trained_together"] for run in runs]
        yield Row(
            dataset=document["dataset"],
            epsilon=float(epsilon),
            recipe=linear_recipe(document["recipe"]),
            accuracy=f"**{shown(found['mean'], found.get('interval') or wilson(found['mean'], records))}**",
            seeds=str(found["seeds"]),
            time=f"{features_seconds(document) / 60:.1f} + {sum(shares) / len(shares) / 60:.1f} min of one core "
            "(features, training)",
            source=f"[record](results/{name})",
            order=100 * found["mean"],
        )


def linear_recipe(name: str) -> str:
    """What a private linear model is trained on."""
    if name == "prior-linear":
        return "**prior-linear**: [features from synthetic images](explanation/priors.md), private linear model"
    return f"**{name}**: [embeddings](how-to/private-probes.md), private linear model"


def features_seconds(document: dict[str, Any]) -> float:
    """The processor time of one seed's features, on a machine that has none of them yet."""
    before = document.get("features_processor_seconds_measured_before")
    seconds = list(document["features_processor_seconds"].values())
    return float(before) if before is not None else sum(seconds) / len(seconds)


def network_row(name: str, document: dict[str, Any]) -> Row:
    """A network trained once by a recipe. Its result is the average of the parameters, as declared beforehand."""
    averaged = document.get("ema_accuracy") is not None
    accuracy = document["ema_accuracy"] if averaged else document["test_accuracy"]
    records = next(iter(document["scores"].values()))["records"]
    return Row(
        dataset=document["dataset"],
        epsilon=round(document["epsilon"], 3),
        recipe=f"{document['model']}, {document['method']}" + (", averaged" if averaged else ""),
        accuracy=shown(accuracy, wilson(accuracy, records)),
        seeds="1",
        time=f"{document['seconds'] / 60:.0f} min",
        source=f"[record](results/{name}), [command](recipes.md)",
        order=100 * accuracy,
    )


def wilson(share: float, records: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.959964
    centre = (share + z * z / (2 * records)) / (1 + z * z / records)
    half = z / (1 + z * z / records) * (share * (1 - share) / records + z * z / (4 * records**2)) ** 0.5
    return centre - half, centre + half


def shown(share: float, interval: Any) -> str:
    text = f"{100 * share:.2f}"
    return text if interval is None else f"{text} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    found = list(rows())
    for dataset, title in DATASETS.items():
        own = sorted((row for row in found if row.dataset == dataset), key=lambda row: (row.epsilon, -row.order))
        if own:
            lines = ["| epsilon | recipe | accuracy, % | seeds | time | source |", "|---|---|---|---|---|---|"]
            parts.append("\n".join([f"## {title}", "", *lines, *(row.markdown() for row in own), ""]))
    parts.append("The published figures are in [a file of their own](results/published.json).\n")
    return "\n".join(parts)


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
        return 0
    return int(PAGE.read_text() != page())


if __name__ == "__main__":
    sys.exit(main())
