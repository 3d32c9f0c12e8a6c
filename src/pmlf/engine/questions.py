"""Questions about numbers on a device, asked while a step goes on and answered together, by one read.

Reading a number from an accelerator makes the host wait for all work before it. What a step wants to know (is every
norm finite, was the model written, does a watched sample agree) is therefore asked as numbers on the device, and all of
them are read at once. The host's own numbers are read where they are asked about: nothing has to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmlf.engine.arithmetic import on_host, wide_dtype

Act = Callable[[list[float]], None]


class Questions:
    """Questions to a device: what is to be done with numbers once they are read.

    >>> questions = Questions()
    >>> questions.ask(torch.tensor([1.0, 2.0]), print)
    [1.0, 2.0]
    >>> questions.answer()  # nothing is left
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Act]] = []

    def ask(self, numbers: Tensor, act: Act) -> None:
        """Do `act` with the numbers: at once if they are the host's, in `answer` if they are a device's."""
        if on_host(numbers):
            act(numbers.flatten().tolist())
        else:
            self._asked.append((numbers, act))

    def refuse(self, wrong: Tensor, error: Callable[[], None]) -> None:
        """Do `error`, which raises, if a flag is true."""

        def act(found: list[float]) -> None:
            if any(found):
                error()

        self.ask(wrong, act)

    def answer(self) -> None:
        """Read all numbers that were asked about, at once, and do what is to be done with them, in order."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        first = asked[0][0]
        flat = [numbers.flatten().to(first.device, wide_dtype(first)) for numbers, _ in asked]
        read = torch.cat(flat).tolist()
        for numbers, act in asked:
            act(read[: numbers.numel()])
            del read[: numbers.numel()]
