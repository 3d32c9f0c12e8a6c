"""An exponential average of the released parameters: post-processing, so it costs no privacy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ParameterAverage:
    """m_t = d m_{t-1} + (1 - d) x_t with m_0 = 0; the average is m_t / (1 - d^t), so the weights sum to 1.

    Args:
        decay: The decay d, in (0, 1).

    Raises:
        ValueError: decay is out of range.

    >>> average = ParameterAverage(0.5)
    >>> for x in (1.0, 4.0):
    ...     average.update([torch.tensor(x)])
    >>> average.values()
    [tensor(3.)]
    """

    def __init__(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0.0 < decay < 1.0:
            raise ValueError(
                f"ema={decay!r} is not in (0, 1): it is the weight of the past at each step, give 0.99 for example"
            )
        self.decay = decay
        self._updates = 0
        self._means: list[Tensor] = []

    def update(self, parameters: Sequence[Tensor]) -> None:
        """Add the newest iterate."""
        iterate = [parameter.detach().float() for parameter in parameters]
        if self._updates == 0:
            self._means = [torch.zeros_like(value) for value in iterate]
        torch._foreach_lerp_(self._means, iterate, 1.0 - self.decay)
        self._updates += 1

    def values(self) -> list[Tensor]:
        """The average, one tensor per parameter; empty before the first update."""
        return [mean / (1.0 - self.decay**self._updates) for mean in self._means]

    def in_copy_of(self, model: nn.Module) -> nn.Module:
        """A copy of the model whose trainable parameters are the average."""
        averaged = copy.deepcopy(model)
        trained = [parameter for parameter in averaged.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter, value in zip(trained, self.values(), strict=True):
                parameter.copy_(value)
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """The decay, the number of updates, and copies of the tensors."""
        return {"decay": self.decay, "updates": self._updates, "means": [mean.clone() for mean in self._means]}

    def load_state_dict(self, state: dict[str, Any], like: Sequence[Tensor]) -> None:
        """Continue a saved average.

        Args:
            state: What `state_dict` returned.
            like: The model's parameters, which determine the device and the shapes that are accepted.

        Raises:
            ValueError: The decay or the shapes differ.
        """
        if state["decay"] != self.decay:
            raise ValueError(
                f"the state has ema={state['decay']} and this run has {self.decay}: build the run with the same ema"
            )
        if state["updates"] and [mean.shape for mean in state["means"]] != [value.shape for value in like]:
            raise ValueError(
                "the saved average does not have the shapes of the model's parameters: load a state of this model"
            )
        self._means = [
            mean.detach().clone().to(value.device) for mean, value in zip(state["means"], like, strict=False)
        ]
        self._updates = state["updates"]
