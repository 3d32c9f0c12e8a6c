"""Checks of the first samples: does each have a gradient of its own, and does it agree with plain autograd?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pmlf.basics.batches import Signature, batch_size, select, signature
from pmlf.checks.comparison import Subject, trained, undisturbed
from pmlf.checks.finding import ASSUMED, STRUCTURAL, Finding
from pmlf.checks.reach import unreached, warn_of
from pmlf.checks.validation import check_augmentation, check_losses, check_samples, refuse_unsafe_model
from pmlf.checks.ways_out import faster_way
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.layers import UnsupportedModel
from pmlf.engine.momentum import contributions
from pmlf.engine.operations.looking import layers_suffice
from pmlf.engine.passes import Pass, Rows
from pmlf.engine.plan import Gradients
from pmlf.engine.swap import ModelWritten
from pmlf.mechanism.noise import SeededRandomness, keyed_uniforms

_AUGMENTATIONS = 4  # of a whole micro-batch, so that rare random changes happen to some samples
Modes = tuple[bool, ...]
Found = TypeVar("Found")


class FirstLook:
    """Proves that samples do not influence each other, for every mode of the model, form and largest size of a batch.

    Without a proof, the first samples are compared with each other, and marks verify the rows of every later
    micro-batch. The gradients of one sample and of a pair are compared with plain autograd in any case. Samples that
    are `assumed` to be independent, or that have passes of their own, need no proof.
    """

    def __init__(
        self, subject: Subject, gradients: Gradients, augmentation: Augmentation | None, *, assumed: bool
    ) -> None:
        self._subject = subject
        self._gradients = gradients
        self._augmentation = augmentation
        self._alone = STRUCTURAL[gradients] if gradients != "ghost" else ASSUMED if assumed else None
        self._modes = Anatomy(subject.model).modes
        self._gradients_of = 0  # how many samples' gradients were compared: 0, 1 or 2
        self._augmented = False
        self._losses = False
        self._findings: dict[tuple[Modes, Signature], Finding] = {}
        self._largest: dict[tuple[Modes, Signature], int] = {}  # micro-batch that a finding covers
        self._unreached: tuple[str, ...] | None = None  # before it was looked at

    @property
    def unreached(self) -> tuple[str, ...]:
        """Trained parameters that no loss depends on, by synthetic samples; none before anything was looked at."""
        return self._unreached or ()

    @property
    def finding(self) -> Finding | None:
        """The weakest of all findings; None before anything was looked at."""
        if self._alone is not None:
            return self._alone
        return next(
            (found for found in self._findings.values() if not found.proven), next(iter(self._findings.values()), None)
        )

    def at(self, batch: Any, size: int, modes: Modes) -> Rows:
        """Raise ValueError if these samples show what breaks the guarantee; cheap once the checks are done.

        Args:
            batch: A micro-batch.
            size: Its number of samples.
            modes: The model's present modes (training or evaluation), module by module.

        Returns:
            How the rows of a layer are known to be the samples' own.
        """
        if modes != self._modes:  # another mode is another model
            refuse_unsafe_model(self._subject.model)
            self._modes = modes
            self.again()
        rows = by_layers_or_operations(
            self._subject, batch, lambda: self._looked(batch, size, modes), forget=self._forget
        )
        if self._unreached is None:
            self._unreached = unreached(self._subject, batch)
            warn_of(self._unreached)
        return rows

    def _forget(self) -> None:
        """Drop the findings about layers, where gradients are taken at operations now."""
        self._findings, self._largest = {}, {}

    def _looked(self, batch: Any, size: int, modes: Modes) -> Rows:
        found = self._alone or self._found(batch, size, modes)
        few = min(size, 2) if self._gradients != "one-by-one" and self._alone is not ASSUMED else 1
        if self._gradients_of < few:
            looked_at = select(batch, slice(0, few))
            self._look_at_augmentation(looked_at, few)
            if check_samples(self._subject, looked_at, proven=found.proven):
                self._gradients_of = few
        if size > 2 and not self._augmented and self._gradients == "ghost":
            self._look_at_augmentation(batch, size)
            self._augmented = True
        if found.proven:
            return "their own"
        if size > 2 and not self._losses:
            check_losses(self._subject, batch)
            self._losses = True
        return "marked"

    def again(self) -> None:
        """Check the next samples as the first ones."""
        self._gradients_of, self._augmented, self._losses = 0, False, False

    def _found(self, batch: Any, size: int, modes: Modes) -> Finding:
        """The finding for batches of this form; looked for again where a batch is larger than any before."""
        key = modes, signature(batch)
        found = self._findings.get(key)
        if found is None or (found.proven and size > self._largest[key]):
            found = proof(self._subject, batch)
            self._findings[key], self._largest[key] = found, size
        return found

    def _look_at_augmentation(self, batch: Any, size: int) -> None:
        """Several times: it may mix samples at random."""
        if self._augmentation is None:
            return
        for draw in range(_AUGMENTATIONS):
            stream = SeededRandomness(0).stream("check", draw)
            uniforms = keyed_uniforms(stream, torch.arange(size), self._augmentation.draws)
            check_augmentation(self._augmentation.function, batch, uniforms)


def by_layers_or_operations(
    subject: Subject, batch: Any, look: Callable[[], Found], forget: Callable[[], None] | None = None
) -> Found:
    """What a look at the first samples finds, at layers; once more at operations, if it fails at layers.

    Args:
        subject: What is looked at. Its plan keeps where gradients are taken.
        batch: The samples.
        look: The look; raises `UnsupportedModel` if rows are not in the samples' order, for one.
        forget: Called before the look at operations.

    Raises:
        UnsupportedModel: It fails at both. The error names the faster of the other ways to gradients.
    """
    ghost, learned = subject.plan.gradients == "ghost", subject.plan.learned
    try:
        choose_capture(subject, batch)
        try:
            return look()
        except UnsupportedModel:
            if learned.by_operations or not ghost:
                raise
        learned.capture = "operations"
        if forget is not None:
            forget()
        return look()
    except UnsupportedModel as error:
        if not ghost:
            raise
        raise UnsupportedModel(error.reason, faster_way(subject, batch)) from error.__cause__


def choose_capture(subject: Subject, batch: Any) -> None:
    """Take gradients at operations where a weight is used outside its own layer; decided once."""
    learned = subject.plan.learned
    if learned.capture != "undecided" or subject.plan.gradients != "ghost":
        return
    few = select(batch, slice(0, 3))  # three, so that few tables have as many rows by chance
    samples = batch_size(few)
    with undisturbed(subject.model, training=True):
        anatomy, values = Anatomy(subject.model), trained(subject.model)
        one = Pass(anatomy, subject.plan, subject.loss_fn, values, few, samples, rows="marked")
        elsewhere = not layers_suffice(one)
        try:
            for _ in contributions(one) if not elsewhere else ():
                pass
        except ModelWritten:
            raise
        except Exception:  # rows that are not in the samples' order; what is the user's own comes up at operations too
            elsewhere = True
    if elsewhere:
        learned.capture = "operations"
    elif samples > 1:  # one sample alone shows nothing
        learned.capture = "layers"


def proof(subject: Subject, batch: Any) -> Finding:
    """Whether samples are proven independent; raises if the proof finds that they are not."""
    try:
        from pmlf.checks.independence import prove  # torch.distributed takes a while, and some builds lack it
    except ImportError:
        return Finding(reason="this build of torch has no torch.distributed.tensor")
    with undisturbed(subject.model, training=True, dropout=True):
        found = prove(subject.model, subject.plan, subject.loss_fn, batch)
    if found.samples_meet:
        raise UnsupportedModel(
            f"a sample's gradient depends on the other samples of its batch: {found.reason}; compute it for every "
            "sample by itself"
        )
    return found
