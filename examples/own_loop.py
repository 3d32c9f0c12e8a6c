"""A private training loop of your own: `PrivateStep`, a Poisson sampler and the accountant.

    python examples/own_loop.py

`make_private` counts steps, keeps the ledger and writes the certificate. Here all of this is the caller's work.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import accounting, sampling


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def main() -> None:
    inputs = torch.randn(3000, 20)
    dataset = TensorDataset(inputs, (inputs[:, :2].sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.0, 0.999))  # the filter is the momentum

    expected_batch_size, steps, delta = 200, 60, 1e-5
    rate = expected_batch_size / len(dataset)
    noise_multiplier = accounting.noise_multiplier(
        target_epsilon=3.0, target_delta=delta, sample_rate=rate, steps=steps
    )
    step = pmlf.PrivateStep(
        model,
        loss_fn,
        method="lp-dpsgd",
        clip_norm=0.5,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
    )
    sampler = sampling.PoissonBatches(
        dataset,
        expected_batch_size=expected_batch_size,
        randomness=step.randomness,
        max_physical_batch_size=64,
    )
    for batch in sampler.batches(0, steps):
        for micro_batch in batch:  # none at all if the draw is empty: release() comes all the same
            step.accumulate(micro_batch)
        step.release(batch)  # p.grad is now the filtered private gradient
        optimizer.step()
        optimizer.zero_grad()

    spent = accounting.epsilon(noise_multiplier=noise_multiplier, sample_rate=rate, steps=step.events, delta=delta)
    accuracy = pmlf.evaluate(model, dataset)
    print(f"{step.events} releases, noise multiplier {noise_multiplier:.3f}, epsilon {spent:.2f} at delta {delta:g}")
    print(f"accuracy {accuracy:.2f} on the synthetic training records (never print this for private ones)")


if __name__ == "__main__":
    main()
