"""What a case of the benchmark is: a model with random weights, a random batch of realistic size, one loss a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0
Batch = tuple[Tensor, Tensor]  # inputs, classes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch. The memory of the modules in `imports` does not count as the model's."""

    name: str
    batch: int
    classes: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    images: bool = False
    micro_batches: int = 1  # of a whole step
    label_shape: tuple[int, ...] = ()  # of one sample: one class, or one for every token or pixel
    imports: tuple[str, ...] = ()

    def samples(self, scale: float = 1.0) -> int:
        """The scaled batch size."""
        return max(1, round(self.batch * scale))

    def prepare(self, scale: float = 1.0) -> tuple[nn.Module, Batch]:
        """Build the model and the batch. They are the same in every process."""
        torch.manual_seed(SEED)
        model = self.build().train()
        samples = self.samples(scale)
        return model, (self.inputs(samples), torch.randint(self.classes, (samples, *self.label_shape)))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each sample, the same for all cases and contenders: the mean over its tokens or pixels."""
    inputs, classes = batch
    return sample_losses(model(inputs), classes)


def sample_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of each sample; classes are on axis 1 of the logits."""
    each = F.cross_entropy(logits, classes, reduction="none")
    return each if each.ndim == 1 else each.flatten(1).mean(1)
