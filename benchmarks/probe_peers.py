"""Private linear models of several libraries on the same embeddings: accuracy and processor time.

pip install --no-deps opacus==1.6.0 diffprivlib==0.6.6  # diffprivlib imports beside scikit-learn 1.6.1, not 1.9
python benchmarks/probe_peers.py --model DIR --data-dir DATA --out docs/results/probe-peers.json

Features are SST-2's sentence embeddings by the encoder in DIR, each record scaled to norm 1. Every contender has three
values of one setting (learning rate, or the strength of regularisation), chosen on 5,000 held-out training phrases at
each epsilon with seed 0; then it trains on all others with every seed and is evaluated on the validation split.
diffprivlib's guarantee is pure epsilon (delta 0), which is more than the others give. Rows that are already in the file
at --out are kept, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pmlf import machine
from pmlf.basics.files import write_json
from pmlf.experiments.linear_features import feature_splits
from pmlf.experiments.options import PretrainedOptions
from pmlf.experiments.spec import RunSpec
from pmlf.probe import PrivateProbe
from pmlf.run.making import make_private

DELTA, HELD_OUT, BATCH_SIZE, EPOCHS = 1e-5, 5000, 2048, 5
SEEDS = (0, 1, 2)
Predict = Callable[[NDArray[Any]], NDArray[Any]]
Fit = Callable[[NDArray[Any], NDArray[Any], float, float, int], Predict]


def probe(X: NDArray[Any], y: NDArray[Any], epsilon: float, setting: float, seed: int) -> Predict:
    """This library's probe; the setting multiplies its default learning rate."""
    fitted = PrivateProbe(classes=2, epsilon=epsilon, delta=DELTA, random_state=seed)
    rate = fitted.begin(X, y).learning_rate
    return fitted.set_params(learning_rate=setting * rate).fit(X, y).predict


def diffprivlib(X: NDArray[Any], y: NDArray[Any], epsilon: float, setting: float, seed: int) -> Predict:
    """Objective perturbation; the setting is the inverse strength of regularisation."""
    from diffprivlib.models import LogisticRegression

    model = LogisticRegression(epsilon=epsilon, data_norm=1.0, C=setting, max_iter=200, random_state=seed)
    model.fit(X.astype(np.float64), y)
    predict: Predict = model.predict
    return predict


def opacus(X: NDArray[Any], y: NDArray[Any], epsilon: float, setting: float, seed: int) -> Predict:
    """DP-SGD by Opacus; the setting is the learning rate."""
    from opacus import PrivacyEngine

    torch.manual_seed(seed)
    model = _zeros(X.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=setting)
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(y)), batch_size=BATCH_SIZE)
    private, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    for _ in range(EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(features), labels).backward()
            optimizer.step()
    return partial(_predicted, private)


def engine(X: NDArray[Any], y: NDArray[Any], epsilon: float, setting: float, seed: int) -> Predict:
    """DP-SGD by this library's engine; the setting is the learning rate."""
    model = _zeros(X.shape[1])
    run = make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setting),
        dataset=TensorDataset(torch.from_numpy(X), torch.from_numpy(y)),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        method="dpsgd",
        target_epsilon=epsilon,
        target_delta=DELTA,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        clip_norm=1.0,
        max_physical_batch_size=BATCH_SIZE,
        seed=seed,
    )
    for batch in run.batches():
        run.step(batch)
    return partial(_predicted, model)


def _zeros(width: int) -> torch.nn.Linear:
    model = torch.nn.Linear(width, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def _predicted(model: torch.nn.Module, X: NDArray[Any]) -> NDArray[Any]:
    with torch.inference_mode():
        found: NDArray[Any] = model(torch.from_numpy(X)).argmax(1).numpy()
    return found


CONTENDERS: dict[str, tuple[Fit, tuple[float, float, float]]] = {
    "pmlf-probe": (probe, (0.5, 1.0, 2.0)),
    "pmlf-dpsgd": (engine, (2.0, 8.0, 32.0)),
    "opacus-dpsgd": (opacus, (2.0, 8.0, 32.0)),
    "diffprivlib-logistic": (diffprivlib, (0.1, 1.0, 10.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    given = PretrainedOptions(prior="sentence-embedding")
    splits = feature_splits(RunSpec(dataset="sst2", model=str(arguments.model), pretrained=given), arguments.data_dir)
    width = splits.recipe(1.0)["blocks"][0].width  # the mean of the last layer alone: the peers take one block
    X, y = _unit(splits.features[:, :width]), np.array(splits.labels)
    ((judged, truth),) = splits.judged_on.values()
    judged = _unit(judged[:, :width])
    document: dict[str, Any] = {
        "command": "python benchmarks/probe_peers.py --model DIR --data-dir DATA",
        "dataset": "sst2",
        "machine": machine.describe("torch", "opacus", "scikit-learn"),
        "runs": [],
    }
    if arguments.out.exists():
        document = json.loads(arguments.out.read_text())
    for name in arguments.contenders:
        fit, settings = CONTENDERS[name]
        for epsilon in arguments.epsilons:
            if any(row["contender"] == name and row["epsilon"] == epsilon for row in document["runs"]):
                continue
            document["runs"].append(
                {"contender": name, "epsilon": epsilon, **contest(fit, settings, epsilon, X, y, judged, truth)}
            )
            print(json.dumps(document["runs"][-1]), flush=True)
            write_json(arguments.out, document, released=True)


def contest(
    fit: Fit,
    settings: tuple[float, ...],
    epsilon: float,
    X: NDArray[Any],
    y: NDArray[Any],
    judged: NDArray[Any],
    truth: NDArray[Any],
) -> dict[str, Any]:
    """Choose the setting on held-out records, then train with every seed."""
    cut = len(y) - HELD_OUT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other libraries
        held_out = {
            setting: float(np.mean(fit(X[:cut], y[:cut], epsilon, setting, 0)(X[cut:]) == y[cut:]))
            for setting in settings
        }
        chosen = max(held_out, key=lambda setting: held_out[setting])
        accuracies, seconds = [], []
        for seed in SEEDS:
            began = time.process_time()
            predict = fit(X, y, epsilon, chosen, seed)
            seconds.append(time.process_time() - began)
            accuracies.append(float(np.mean(predict(judged) == truth)))
    return {
        "held_out": {f"{setting:g}": accuracy for setting, accuracy in held_out.items()},
        "setting": chosen,
        "accuracies": accuracies,
        "mean": statistics.fmean(accuracies),
        "processor_seconds": statistics.median(seconds),
    }


def _unit(features: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = features / np.linalg.norm(features, axis=1, keepdims=True)
    return found.astype(np.float32)


if __name__ == "__main__":
    main()
