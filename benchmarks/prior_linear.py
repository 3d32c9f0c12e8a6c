"""Accuracy of private linear models on features from synthetic images, and on embeddings of texts.

python benchmarks/prior_linear.py test --dataset cifar10 --data-dir DATA --out docs/results/prior-linear-cifar10.json
python benchmarks/prior_linear.py test --dataset sst2 --model DIR --data-dir DATA --out docs/results/...-sst2.json
python benchmarks/prior_linear.py ablation --data-dir DATA --out docs/results/prior-linear-ablation.json
python benchmarks/prior_linear.py trials --trials trials.json --data-dir DATA --out dev/results/prior-linear-trials.json

`test` trains on the whole training split and evaluates each model once on the test split. A seed redraws everything
random: synthetic images, dictionaries and all noise; an encoder of texts (--model) is fixed. `ablation` changes one
thing at a time, `trials` what a file lists: `[{"epsilon": 1, "clip_norm": 0.1}, ...]` are changes of the recipe, with
other `weights` of its blocks, or with the `kept` ones alone. Both evaluate on 5,000 training records, which they do not
train on. With --records they take the first records of the training split only, and with --as-if the noise is that of a
larger number of records. All skip what the file at --out already holds, so they resume. Models on the same
features are trained side by side, with one pass over the features a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pmlf import accounting, machine
from pmlf.basics.files import write_json
from pmlf.experiments.linear_features import FeatureSplits, feature_splits
from pmlf.experiments.options import PretrainedOptions
from pmlf.experiments.spec import RunSpec
from pmlf.filters import LowPass
from pmlf.probe import FeatureBlock, FeatureRows, PrivateProbe, advance_together
from pmlf.probe.training import ProbeTraining

EPSILONS = (1.0, 2.0, 4.0, 8.0)
HELD_OUT = 5000
DELTA = 1e-5
DATASETS = {"cifar10": 50_000, "fashion-mnist": 60_000, "mnist": 60_000, "sst2": 67_349}  # training records
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "without the private mean": {"mean_share": 0.0},
    "without private second moments": {"moments_share": 0.0},
    "whitening 0.5": {"whitening": 0.5},
    "whitening 0": {"whitening": 0.0},
    "clip norm 1": {"clip_norm": 1.0},
    "no filter": {"low_pass": LowPass()},
    "without scattering": {"kept": ("patches", "half-size patches", "colours")},
    "scattering alone": {"kept": ("scattering",)},
    "without patches": {"kept": ("half-size patches", "colours", "scattering")},
    "without colours": {"kept": ("patches", "half-size patches", "scattering")},
}

Row = dict[str, Any]
Fitted = tuple[Mapping[str, Any], PrivateProbe, ProbeTraining]


class Records:
    """The rows of a file, written after each of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out
        encoder = None if arguments.model is None else f"{arguments.encoder or arguments.model.name}, frozen"
        self.document: dict[str, Any] = {
            "command": f"python benchmarks/prior_linear.py {arguments.what} --dataset {arguments.dataset}",
            "recipe": encoder or "prior-linear",
            "dataset": arguments.dataset,
            "split": "test" if arguments.what == "test" else "held-out training records",
            "settings": "pmlf.experiments.linear_features",
            "machine": machine.describe("torch", "numpy"),
            "features_processor_seconds": {},
            "runs": [],
        }
        if self.out.exists():
            self.document = json.loads(self.out.read_text())
        if arguments.features_seconds is not None:
            self.document["features_processor_seconds_measured_before"] = arguments.features_seconds

    def has(self, **keys: Any) -> bool:
        return any(all(row.get(name) == value for name, value in keys.items()) for row in self.document["runs"])

    def add(self, row: Row) -> None:
        self.document["runs"].append(row)
        print(json.dumps(row), flush=True)
        if self.document["split"] == "test":
            self.document["summary"] = summary(self.document["runs"])
        write_json(self.out, self.document, released=True)

    def extracted(self, seed: int, seconds: float) -> None:
        """Add up the time of a seed's features: an interrupted extraction continues, and what is cached costs none."""
        known = self.document["features_processor_seconds"]
        known[str(seed)] = known.get(str(seed), 0.0) + seconds
        write_json(self.out, self.document, released=True)


def loaded(arguments: argparse.Namespace, seed: int, *, judged: bool) -> FeatureSplits:
    """The features of a seed, from the cache or computed into it; `judged`: with the test split."""

    def show(done: int, of: int) -> None:
        print(f"\r{done} of {of} records", end="" if done < of else "\n", file=sys.stderr, flush=True)

    spec = RunSpec(dataset=arguments.dataset, model="prior-linear", seed=seed)
    if arguments.model is not None:
        embedding = PretrainedOptions(prior="sentence-embedding")
        spec = replace(spec, model=str(arguments.model), pretrained=embedding)
    if not judged:
        records = arguments.records or DATASETS[arguments.dataset]
        spec = replace(spec, records=arguments.records, holdout=HELD_OUT / records)
    return feature_splits(spec, arguments.data_dir, show)


def trained(
    settings: Iterable[Mapping[str, Any]], rows: FeatureRows, labels: NDArray[np.int64], seed: int
) -> list[Fitted]:
    """A model for each of the settings, trained side by side."""
    found: list[Fitted] = []
    for each in settings:
        probe = PrivateProbe(delta=DELTA, random_state=seed, **each)
        found.append((each, probe, probe.begin(rows, labels)))
    while advance_together([training for _, _, training in found]):
        pass
    for _, probe, training in found:
        probe.finish(training)
    return found


def test(arguments: argparse.Namespace, records: Records) -> None:
    """Every seed and epsilon: one model, one evaluation on the test split."""
    for seed in arguments.seeds:
        left = [epsilon for epsilon in arguments.epsilons if not records.has(seed=seed, target_epsilon=epsilon)]
        if not left:
            continue
        began = time.process_time()
        splits = loaded(arguments, seed, judged=True)
        ((judged, judged_labels),) = splits.judged_on.values()
        records.extracted(seed, time.process_time() - began)
        began = time.process_time()
        settings = [{**splits.recipe(epsilon), "epsilon": epsilon, "classes": len(splits.names)} for epsilon in left]
        fitted = trained(settings, FeatureRows(splits.features), splits.labels, seed)
        seconds = time.process_time() - began
        for each, probe, _ in fitted:
            row = {
                "seed": seed,
                "target_epsilon": each["epsilon"],
                "epsilon": probe.epsilon_,
                "delta": DELTA,
                "noise_multiplier": probe.noise_multiplier_,
                "learning_rate": probe.learning_rate_,
                "accuracy": probe.score(judged, judged_labels),
                "processor_seconds_of_all_trained_together": seconds,
                "trained_together": len(left),
            }
            records.add(row)


def summary(runs: Sequence[Row]) -> dict[str, Any]:
    """Mean, deviation and 95 % interval over seeds, by epsilon."""
    from scipy import stats

    found = {}
    for epsilon in sorted({row["target_epsilon"] for row in runs}):
        accuracies = [row["accuracy"] for row in runs if row["target_epsilon"] == epsilon]
        entry: dict[str, Any] = {"seeds": len(accuracies), "mean": statistics.fmean(accuracies)}
        if len(accuracies) > 1:
            deviation = statistics.stdev(accuracies)
            half = float(stats.t.ppf(0.975, len(accuracies) - 1)) * deviation / len(accuracies) ** 0.5
            entry |= {"deviation": deviation, "interval": [entry["mean"] - half, entry["mean"] + half]}
        entry["largest_epsilon"] = max(row["epsilon"] for row in runs if row["target_epsilon"] == epsilon)
        found[f"{epsilon:g}"] = entry
    return found


def ablation(arguments: argparse.Namespace, records: Records) -> None:
    """One change at a time, on records of the training split that are held out."""
    asked = [
        {"epsilon": epsilon, "change": change, **changes}
        for change, changes in ABLATIONS.items()
        for epsilon in arguments.epsilons
    ]
    held_out(arguments, records, asked)


def trials(arguments: argparse.Namespace, records: Records) -> None:
    """What the file lists, on records of the training split that are held out."""
    held_out(arguments, records, json.loads(arguments.trials.read_text()))


def held_out(arguments: argparse.Namespace, records: Records, asked: Sequence[Mapping[str, Any]]) -> None:
    """Train with changed recipes, side by side where the features are the same; evaluate on held-out records."""
    left = [trial for trial in asked if not records.has(trial=_key(trial))]
    if not left:
        return
    seed, began = arguments.seeds[0], time.process_time()
    splits = loaded(arguments, seed, judged=False)
    ((judged, judged_labels),) = splits.judged_on.values()
    records.extracted(seed, time.process_time() - began)
    for kept in dict.fromkeys(tuple(trial.get("kept", ())) for trial in left):
        same = [trial for trial in left if tuple(trial.get("kept", ())) == kept]
        columns, blocks = of_blocks(splits, kept)
        settings = [
            {**splits.recipe(trial["epsilon"]), "blocks": weighted(blocks, trial), "classes": len(splits.names)}
            | {name: value for name, value in trial.items() if name not in ("kept", "change", "weights")}
            | {"epsilon": as_if(trial["epsilon"], len(splits.labels), arguments.as_if)}
            for trial in same
        ]
        began = time.process_time()
        fitted = trained(settings, FeatureRows(joined(splits.features, columns)), splits.labels, seed)
        print(f"{len(same)} models in {time.process_time() - began:.0f} processor seconds", flush=True)
        for trial, (_, probe, _) in zip(same, fitted, strict=True):
            accuracy = probe.score(joined(judged, columns), judged_labels)
            row = {"trial": _key(trial), "learning_rate": probe.learning_rate_, "accuracy": accuracy}
            records.add(row | {"records": len(splits.labels), "noise_of_records": arguments.as_if})


def as_if(epsilon: float, records: int, as_many: int | None) -> float:
    """The epsilon at which sums over `records` have, relative to them, the noise that `as_many` have at `epsilon`."""
    if as_many is None:
        return epsilon
    alone = accounting.noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, sample_rate=1.0, steps=1)
    return accounting.epsilon(noise_multiplier=alone * records / as_many, delta=DELTA, sample_rate=1.0, steps=1)


def _key(trial: Mapping[str, Any]) -> dict[str, Any]:
    """A trial as JSON keeps it."""
    found: dict[str, Any] = json.loads(json.dumps(dict(trial), default=repr))
    return found


def of_blocks(splits: FeatureSplits, kept: tuple[str, ...]) -> tuple[list[slice], tuple[FeatureBlock, ...]]:
    """The columns of the named blocks, and these blocks at their new places. None named: all blocks."""
    known: tuple[FeatureBlock, ...] = splits.recipe(1.0)["blocks"]
    if not kept:
        return [slice(None)], known
    assert splits.prior is not None
    columns, blocks, start = [], [], 0
    for block, described in zip(known, splits.prior.all_blocks, strict=True):
        if described.name in kept:
            columns.append(block.columns)
            blocks.append(replace(block, start=start, stop=start + block.width))
            start += block.width
    return columns, tuple(blocks)


def joined(features: NDArray[Any], columns: Sequence[slice]) -> NDArray[Any]:
    """Some of the columns, without a copy where they are one range."""
    parts = [features[:, part] for part in columns]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def weighted(blocks: tuple[FeatureBlock, ...], trial: Mapping[str, Any]) -> tuple[FeatureBlock, ...]:
    """The blocks with the weights of a trial, if it has any."""
    weights = trial.get("weights", [block.weight for block in blocks])
    return tuple(replace(block, weight=weight) for block, weight in zip(blocks, weights, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("test", "ablation", "trials"))
    parser.add_argument("--dataset", choices=tuple(DATASETS), default="cifar10")
    parser.add_argument("--model", type=Path, help="the folder of an encoder of texts")
    parser.add_argument("--encoder", help="the name of the encoder, for the record, if its folder does not say it")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument(
        "--features-seconds", type=float, help="processor seconds of a seed's features that are already in the cache"
    )
    parser.add_argument("--records", type=int, help="for trials and ablation: the first records of the training split")
    parser.add_argument("--as-if", type=int, help="for trials and ablation: train with the noise of so many records")
    parser.add_argument("--trials", type=Path, help="for trials: a JSON list of changes")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    {"test": test, "ablation": ablation, "trials": trials}[arguments.what](arguments, Records(arguments))


if __name__ == "__main__":
    main()
