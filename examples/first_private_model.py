"""Train a small convolutional network privately on synthetic images, and print what it spends.

    python examples/first_private_model.py

The images are noise with a bright bar, lying or standing. The bar's direction is the label.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf


def bars(records: int) -> TensorDataset:
    """Images of 1 x 8 x 8 pixels: class 0 has a bright row, class 1 a bright column."""
    images = torch.randn(records, 1, 8, 8)
    labels = torch.randint(0, 2, (records,))
    places = torch.randint(0, 8, (records,))
    for image, label, place in zip(images, labels, places, strict=True):
        if label == 0:
            image[0, place, :] += 2.0
        else:
            image[0, :, place] += 2.0
    return TensorDataset(images, labels)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per sample: the reduction is left to the library."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main() -> None:
    train, test = bars(2000), bars(500)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 2),
    )
    print(pmlf.check(model, loss_fn, (torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))))

    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        dataset=train,
        loss_fn=loss_fn,
        method="dp-pmlf",
        target_epsilon=3.0,
        target_delta=1e-5,
        batch_size=200,
        epochs=5,
    )
    for batch in run.batches():
        run.step(batch)

    print(f"epsilon {run.epsilon():.2f}, test accuracy {pmlf.evaluate(model, test):.2f}")
    Path("certificate.json").write_text(json.dumps(run.certificate(), indent=2))


if __name__ == "__main__":
    main()
