"""Two private runs on the same records share one ledger, so the target epsilon covers both together.

    python examples/several_runs_one_budget.py

The second run is calibrated to what the first has left. The ledger is written to a temporary folder here; keep yours.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf

FIRST_TARGET, LAST_TARGET = 2.0, 4.0  # fixed before the first result is seen


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def train(dataset: TensorDataset, path: Path, name: str, learning_rate: float, target_epsilon: float) -> None:
    """One run that writes every step to the ledger at `path` before it is released."""
    model = nn.Linear(20, 2)
    with pmlf.Ledger(path, dataset="patients", run=name) as ledger:
        run = pmlf.make_private(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
            dataset=dataset,
            loss_fn=loss_fn,
            method="dpsgd",
            target_epsilon=target_epsilon,
            target_delta=1e-5,
            batch_size=150,
            steps=30,
            ledger=ledger,
        )
        for batch in run.batches():  # ends before the step that would pass the target
            run.step(batch)
        certificate = run.certificate()
    print(
        f"{name}: {run.steps_done} steps, noise multiplier {certificate['noise_multiplier']:.3f}, "
        f"epsilon of all runs so far {run.epsilon():.2f}"
    )


def main() -> None:
    inputs = torch.randn(3000, 20)
    dataset = TensorDataset(inputs, (inputs[:, :2].sum(1) > 0).long())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.ledger"
        train(dataset, path, "first", learning_rate=1.0, target_epsilon=FIRST_TARGET)
        train(dataset, path, "second", learning_rate=3.0, target_epsilon=LAST_TARGET)
        print(f"the ledger has {len(path.read_text().splitlines())} lines")


if __name__ == "__main__":
    main()
