"""A small private network on features against the private linear model on the same features, at the same epsilon.

python benchmarks/beyond_linear.py --dataset sst2 --model DIR --data-dir DATA --out docs/results/beyond-linear.json

Both are trained on the training split but for its last 5,000 records, which they are judged on. Both see the records as
the probe shapes them, with its private mean and second moments; the network's steps have what these leave of epsilon.
The network has one hidden layer. Every learning rate is a row of its own, so the best one is chosen with hindsight, in
the network's favour. Rows that are already in the file at --out are kept, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from pmlf import machine
from pmlf.accounting import noise_multiplier
from pmlf.basics.files import write_json
from pmlf.experiments.linear_features import FeatureSplits, feature_splits
from pmlf.experiments.options import PretrainedOptions
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.accounting import Event
from pmlf.probe import FeatureRows, PrivateProbe
from pmlf.probe.training import ProbeTraining
from pmlf.run.making import make_private

DELTA, HELD_OUT, SEED = 1e-5, 5000, 0
HIDDEN, BATCH_SIZE = 128, 2048


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Shaped records in float16, given out as float32."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self._features, self._labels = features, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._features[index].float(), self._labels[index]


def shaped(training: ProbeTraining, rows: FeatureRows) -> Tensor:
    """The records as the steps of a probe see them: unit vectors (n, d), each from its record and released values."""
    found = torch.empty(rows.records, rows.width, dtype=torch.float16)
    shapes = training.model().conditioning
    total = sum(shape.weight for shape in shapes)
    for places, part in rows.blocks():
        for shape in shapes:
            columns = shape.block.columns
            centred = F.normalize(part[:, columns], dim=1).sub_(shape.mean.float()).mul_(shape.scale.float())
            found[places, columns] = (F.normalize(centred, dim=1) * (shape.weight / total) ** 0.5).half()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="sst2")
    parser.add_argument("--model", type=Path, help="the folder of an encoder of texts")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 4.0, 16.0])
    parser.add_argument("--methods", nargs="+", default=["lp-dpsgd", "dp-pmlf"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clip-norm", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    spec = RunSpec(dataset=arguments.dataset, model="prior-linear", seed=SEED)
    if arguments.model is not None:
        given = PretrainedOptions(prior="sentence-embedding")
        spec = RunSpec(dataset=arguments.dataset, model=str(arguments.model), seed=SEED, pretrained=given)
    splits = feature_splits(spec, arguments.data_dir)
    document: dict[str, Any] = {
        "command": "python benchmarks/beyond_linear.py --data-dir DATA",
        "split": "held-out training records",
        "machine": machine.describe("torch", "numpy"),
        "runs": [],
    }
    if arguments.out.exists():
        document = json.loads(arguments.out.read_text())
    for epsilon in arguments.epsilons:
        compared(arguments, splits, epsilon, document)


def compared(arguments: argparse.Namespace, splits: FeatureSplits, epsilon: float, document: dict[str, Any]) -> None:
    """The probe, then the networks, at one epsilon."""
    cut = len(splits.labels) - HELD_OUT
    rows, labels = FeatureRows(splits.features), splits.labels

    def record(**row: Any) -> None:
        document["runs"].append({"dataset": arguments.dataset, "epsilon": epsilon, **row})
        print(json.dumps(document["runs"][-1]), flush=True)
        write_json(arguments.out, document, released=True)

    def done(**row: Any) -> bool:
        wanted = {"dataset": arguments.dataset, "epsilon": epsilon, **row}
        return any(all(each.get(name) == value for name, value in wanted.items()) for each in document["runs"])

    settings = {**splits.recipe(epsilon), "epsilon": epsilon, "delta": DELTA, "classes": len(splits.names)}
    probe = PrivateProbe(**settings, random_state=SEED)
    training = probe.begin(splits.features[:cut], labels[:cut])
    while training.stage != "steps":
        training.advance()
    matrix = shaped(training, rows)
    if not done(what="private linear model"):
        began = time.process_time()
        while training.advance():
            pass
        accuracy = probe.finish(training).score(splits.features[cut:], labels[cut:])
        record(what="private linear model", accuracy=accuracy, processor_seconds=time.process_time() - began)
    spent: Counter[Event] = Counter()
    for query in training.budget.plan.queries:
        spent[query.event] += query.count
    for method in arguments.methods:
        for rate in arguments.rates:
            if not done(what="private network", method=method, rate=rate):
                began = time.process_time()
                accuracy = network(arguments, matrix, labels, cut, epsilon, spent, method, rate)
                seconds = time.process_time() - began
                record(what="private network", method=method, rate=rate, accuracy=accuracy, processor_seconds=seconds)


def network(
    arguments: argparse.Namespace,
    matrix: Tensor,
    labels: NDArray[np.int64],
    cut: int,
    epsilon: float,
    spent: Counter[Event],
    method: str,
    rate: float,
) -> float:
    """The held-out accuracy of a network with one hidden layer, trained with what the queries leave of epsilon."""
    torch.manual_seed(SEED)
    classes = int(labels.max()) + 1
    model = nn.Sequential(nn.Linear(matrix.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes))
    with torch.no_grad():
        model[0].weight.mul_(matrix.shape[1] ** 0.5)  # type: ignore[operator]  # records have norm 1
    truth = torch.from_numpy(np.array(labels))
    noise = noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=BATCH_SIZE / cut,
        steps=arguments.steps,
        spent=spent,
    )
    run = make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        dataset=Rows(matrix[:cut], truth[:cut]),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        method=method,
        noise_multiplier=noise,
        target_delta=DELTA,
        batch_size=BATCH_SIZE,
        steps=arguments.steps,
        clip_norm=arguments.clip_norm,
        max_physical_batch_size=512,
        seed=SEED,
        ema=0.95,
    )
    for batch in run.batches():
        run.step(batch)
    judged = run.averaged_model() or model
    with torch.inference_mode():
        found = torch.cat([judged(part.float()).argmax(1) for part in matrix[cut:].split(500)])
    return float((found == truth[cut:]).float().mean())


if __name__ == "__main__":
    main()
