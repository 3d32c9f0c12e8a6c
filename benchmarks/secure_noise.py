"""What `secure_noise` adds to a whole DP-PMLF step (k=2, filter, noise, optimizer) of CNN-5 at B=1000, as a ratio.

python benchmarks/secure_noise.py        # both kinds of step in one process, in turn; prints JSON

Processor time on one thread: other work on the machine then changes little.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.nn.functional as F

from pmlf import PrivateStep, models

BATCH, PHYSICAL, ROUNDS = 1000, 250, 5


class Contender:
    """A model with its step and optimizer."""

    def __init__(self, secure_noise: bool) -> None:
        self.model = models.build("cnn5", in_channels=3, image_size=32, classes=10, seed=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.step = PrivateStep(
            self.model,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            method="dp-pmlf",
            noise_multiplier=1.0,
            expected_batch_size=BATCH,
            secure_noise=secure_noise,
        )

    def seconds(self, images: torch.Tensor, classes: torch.Tensor) -> tuple[float, float]:
        """Of a whole step, and of its release alone."""
        start = time.process_time()
        for micro_batch in zip(images.split(PHYSICAL), classes.split(PHYSICAL), strict=True):
            self.step.accumulate(micro_batch)
        before_release = time.process_time()
        self.step.release()
        released = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - start, released - before_release


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    plain, secure = Contender(False), Contender(True)
    for contender in (plain, secure):
        contender.seconds(*batch)  # a warm-up, which also makes the past iterate that k=2 needs
    rounds = [(plain.seconds(*batch), secure.seconds(*batch)) for _ in range(ROUNDS)]
    steps, releases = ([[times[i] for times in pair] for pair in rounds] for i in (0, 1))
    plain_step = statistics.median(step for step, _ in steps)
    extra = statistics.median(hardened - usual for usual, hardened in releases)
    print(
        json.dumps(
            {
                "model": "cnn5, 3x32x32",
                "batch_size": BATCH,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "step_cpu_seconds": {"plain": [s for s, _ in steps], "secure": [s for _, s in steps]},
                "release_cpu_seconds": {"plain": [r for r, _ in releases], "secure": [r for _, r in releases]},
                "extra_over_step": extra / plain_step,
                "step_ratio": statistics.median(s for _, s in steps) / plain_step,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
