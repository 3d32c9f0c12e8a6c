"""Accuracy of private linear models on features from synthetic images.

python benchmarks/prior_linear.py test --dataset cifar10 --data-dir DATA --out docs/results/prior-linear-cifar10.json
python benchmarks/prior_linear.py test --seeds 3 --data-dir DATA --out seed-3.json  # seeds in parallel
python benchmarks/prior_linear.py merge seed-*.json --out docs/results/prior-linear-cifar10.json
python benchmarks/prior_linear.py ablation --data-dir DATA --out docs/results/prior-linear-ablation.json

`test` trains on the whole training split and evaluates each model once on the test split. A seed redraws everything
random: synthetic images, dictionaries and all noise. `ablation` changes one thing at a time and evaluates on the last
5,000 training records, which it does not train on. Both skip what the file at --out already holds, so they resume.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pmlf import data, machine, priors
from pmlf.basics.files import write_json
from pmlf.experiments.prior_linear import recipe
from pmlf.priors import ImagePrior, PriorSpec
from pmlf.probe import FeatureBlock, PrivateProbe

EPSILONS = (1.0, 2.0, 4.0, 8.0)
HELD_OUT = 5000
DATASETS = ("cifar10", "fashion-mnist", "mnist")
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "without the private mean": {"mean_share": 0.0},
    "without private second moments": {"moments_share": 0.0},
    "whitening 0.5": {"whitening": 0.5},
    "whitening 0": {"whitening": 0.0},
    "clip norm 1": {"clip_norm": 1.0},
    "patches alone": {"kept": ("patches",)},
    "patches and half-size patches": {"kept": ("patches", "half-size patches")},
    "patches and colours": {"kept": ("patches", "colours")},
}


def spec_of(images: data.ImageData, seed: int) -> PriorSpec:
    return PriorSpec(image_size=images.image_size, channels=images.in_channels, mirrors=images.mirrors, seed=seed)


def extracted(prior: ImagePrior, split: data.ImageDataset) -> NDArray[Any]:
    def show(done: int, of: int) -> None:
        print(f"\r{done} of {of} images", end="" if done < of else "\n", file=sys.stderr, flush=True)

    return priors.extract(prior, split.images.numpy(), progress=show)


def record(document: dict[str, Any], out: Path, row: dict[str, Any]) -> None:
    document["runs"].append(row)
    print(json.dumps(row), flush=True)
    write_json(out, document, released=True)


def test(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    """Every seed and epsilon: one model, one evaluation on the test split."""
    images = data.load(arguments.dataset, arguments.data_dir)
    done = {(row["seed"], row["target_epsilon"]) for row in document["runs"]}
    for seed in arguments.seeds:
        left = [epsilon for epsilon in arguments.epsilons if (seed, epsilon) not in done]
        if not left:
            continue
        wall, processor = time.perf_counter(), time.process_time()
        prior = ImagePrior.load(spec_of(images, seed))
        train, judged = extracted(prior, images.train), extracted(prior, images.test)
        features_seconds = time.perf_counter() - wall
        for epsilon in left:
            wall, processor = time.perf_counter(), time.process_time()
            probe = PrivateProbe(classes=10, epsilon=epsilon, delta=1e-5, random_state=seed, **recipe(prior))
            probe.fit(train, images.train.labels.numpy())
            row = {
                "seed": seed,
                "target_epsilon": epsilon,
                "epsilon": probe.epsilon_,
                "delta": 1e-5,
                "noise_multiplier": probe.noise_multiplier_,
                "accuracy": probe.score(judged, images.test.labels.numpy()),
                "seconds": time.perf_counter() - wall,
                "processor_seconds": time.process_time() - processor,
                "features_seconds": features_seconds,
            }
            record(document, arguments.out, row)
    document["summary"] = summary(document["runs"])
    write_json(arguments.out, document, released=True)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
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


def merge(parts: list[Path], out: Path) -> None:
    """One record of the runs in several files."""
    documents = [json.loads(part.read_text()) for part in parts]
    runs = sorted(
        (row for each in documents for row in each["runs"]), key=lambda row: (row["target_epsilon"], row["seed"])
    )
    write_json(out, {**documents[0], "runs": runs, "summary": summary(runs)}, released=True)


def ablation(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    """One change at a time, on records of the training split that are held out."""
    images = data.load(arguments.dataset, arguments.data_dir)
    prior = ImagePrior.load(spec_of(images, arguments.seeds[0]))
    features, labels = extracted(prior, images.train), images.train.labels.numpy()
    cut = len(labels) - HELD_OUT
    done = {(row["change"], row["target_epsilon"]) for row in document["runs"]}
    for epsilon in arguments.epsilons:
        for change, changes in ABLATIONS.items():
            if (change, epsilon) in done:
                continue
            settings = {**recipe(prior), **{name: value for name, value in changes.items() if name != "kept"}}
            chosen, settings["blocks"] = of_blocks(prior, features, changes.get("kept"))
            probe = PrivateProbe(classes=10, epsilon=epsilon, delta=1e-5, random_state=arguments.seeds[0], **settings)
            probe.fit(chosen[:cut], labels[:cut])
            row = {"change": change, "target_epsilon": epsilon, "accuracy": probe.score(chosen[cut:], labels[cut:])}
            record(document, arguments.out, row)


def of_blocks(
    prior: ImagePrior, features: NDArray[Any], kept: tuple[str, ...] | None
) -> tuple[NDArray[Any], tuple[FeatureBlock, ...]]:
    """The features of the named blocks alone, and these blocks at their new places. None keeps all blocks."""
    if kept is None:
        return features, recipe(prior)["blocks"]
    parts, blocks, start = [], [], 0
    for block in prior.blocks:
        if block.name in kept:
            part = features[:, block.columns]
            stop = start + part.shape[1]
            blocks.append(
                FeatureBlock(start=start, stop=stop, weight=block.weight, eigenvalues=block.eigenvalues.tolist())
            )
            parts.append(part)
            start = stop
    return np.concatenate(parts, axis=1), tuple(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("test", "ablation", "merge"))
    parser.add_argument("parts", type=Path, nargs="*", help="for merge: files that `test` wrote")
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.what == "merge":
        merge(arguments.parts, arguments.out)
        return
    document: dict[str, Any] = {
        "command": f"python benchmarks/prior_linear.py {arguments.what} --dataset {arguments.dataset}",
        "recipe": "prior-linear",
        "dataset": arguments.dataset,
        "split": "test" if arguments.what == "test" else "held-out training records",
        "settings": "pmlf.experiments.prior_linear.recipe",
        "machine": machine.describe("torch", "numpy"),
        "runs": [],
    }
    if arguments.out.exists():
        document["runs"] = json.loads(arguments.out.read_text())["runs"]
    (test if arguments.what == "test" else ablation)(arguments, document)


if __name__ == "__main__":
    main()
