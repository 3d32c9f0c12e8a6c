"""Look for the record that moves the clipped sum of a model furthest, and for what a broken model shows.

    python examples/audit_a_model.py

The noise is calibrated to one clip norm. A record that moves the sum by more than 1 + 1e-4 clip norms is a fault.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmlf
from pmlf import audit


class Centred(nn.Module):
    """A model that cannot be private: it subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def main() -> None:
    examples = torch.randn(6, 10), torch.randint(0, 3, (6,))
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    settings = audit.ModelSettings(restarts=3, tries=20, runs=0)  # runs=0: the search alone
    report = audit.audit_model(model, loss_fn, examples, method="dp-pmlf", settings=settings)
    print(f"the worst record found moves the sum by {report.sensitivity.multiple:.5f} clip norms")
    print("refuted" if report.refuted else "not refuted, which is no proof")

    try:
        pmlf.check(Centred(), loss_fn, examples)
    except ValueError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
