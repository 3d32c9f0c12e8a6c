"""Looks at the first samples before any is summed: what a model or a loss does wrong, it does to these."""

from __future__ import annotations

from typing import Any

import torch

from pmlf.anatomy import Anatomy
from pmlf.augmentation import Augmentation
from pmlf.batches import select
from pmlf.comparison import Subject
from pmlf.noise import SeededRandomness, keyed_uniforms
from pmlf.plan import Gradients
from pmlf.validation import check_augmentation, check_losses, check_samples, refuse_unsafe_model

_AUGMENTATIONS = 4  # of a whole micro-batch, in which what happens to one sample in a hundred happens to some


class FirstLook:
    """Once on a single sample and once on a pair: do factors and plain autograd agree, sample by sample?

    And once on more: samples may be mixed only where there are so many. Those in passes of their own never are. What it
    has seen counts for the modes of training and evaluation in which it was seen.
    """

    def __init__(self, subject: Subject, gradients: Gradients, augmentation: Augmentation | None) -> None:
        self._subject = subject
        self._gradients = gradients
        self._augmentation = augmentation
        self._modes = Anatomy(subject.model).modes
        self._gradients_of = 0  # how many samples' gradients were compared: 0, 1 or 2
        self._whole_micro_batch = False

    def at(self, batch: Any, size: int, modes: tuple[bool, ...]) -> None:
        """Raise ValueError if these samples show what would break the guarantee; cheap once enough was seen.

        `modes` are the model's at the moment.
        """
        if modes != self._modes:  # another mode is another model
            refuse_unsafe_model(self._subject.model, self._gradients)
            self._modes = modes
            self.again()
        alone = self._gradients == "one-by-one"
        few = 1 if alone else min(size, 2)
        if self._gradients_of < few and self._compare(select(batch, slice(0, few)), few):
            self._gradients_of = few
        if size > 2 and not (self._whole_micro_batch or alone):
            self._look_at_augmentation(batch, size)
            check_losses(self._subject, batch)
            self._whole_micro_batch = True

    def again(self) -> None:
        """Look at the samples to come as at the first ones."""
        self._gradients_of, self._whole_micro_batch = 0, False

    def put_aside(self) -> None:
        """Take everything for seen: for the audit's controls, which are broken on purpose."""
        self._gradients_of, self._whole_micro_batch = 2, True

    def _compare(self, few: Any, size: int) -> bool:
        """Whether the samples told something; where not, look at others."""
        self._look_at_augmentation(few, size)
        return check_samples(self._subject, few)

    def _look_at_augmentation(self, batch: Any, size: int) -> None:
        """Several times: it may mix samples by chance."""
        if self._augmentation is None:
            return
        for draw in range(_AUGMENTATIONS):
            stream = SeededRandomness(0).stream("check", draw)
            uniforms = keyed_uniforms(stream, torch.arange(size), self._augmentation.draws)
            check_augmentation(self._augmentation.function, batch, uniforms)
