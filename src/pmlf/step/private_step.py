"""The private step: the one place where the stages meet, so that the order that makes it private is written once.

accumulate (sensitive): micro-batches -> per-sample momentum at the evaluation points -> one clip -> sum
release (public from the noise on): sum -> + noise -> / B -> filter -> p.grad
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.basics.arguments import require_count
from pmlf.basics.clipping import Clipping
from pmlf.checks.caches import with_constants_made
from pmlf.checks.comparison import Subject
from pmlf.checks.finding import Finding
from pmlf.checks.first_look import FirstLook
from pmlf.checks.validation import check_collation, refuse_unsafe_model
from pmlf.checks.watch import Watch
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.clipper import ClippedSum, Clipper
from pmlf.engine.criteria import as_per_sample
from pmlf.engine.fingerprint import Fingerprint, fingerprint, refuse_other_iterate, refuse_written
from pmlf.engine.owners import MicroBatch, averaged, each_a_unit, on_records
from pmlf.engine.passes import LossFunction
from pmlf.engine.pending import PendingSum
from pmlf.engine.plan import Gradients, Plan, require_known
from pmlf.engine.questions import Questions
from pmlf.engine.strategy import Strategy
from pmlf.mechanism.adaptive_clipping import AdaptiveClipping
from pmlf.mechanism.filters import FilterMemory
from pmlf.mechanism.noise import Randomness, randomness_from
from pmlf.mechanism.points import History
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.methods import Method, resolve
from pmlf.parallel.agreement import Agreement, facts_of
from pmlf.parallel.processes import Group, Processes, joined
from pmlf.parallel.shards import ParameterShards, placement_of
from pmlf.step.accumulation import Accumulation
from pmlf.step.point_passes import PointPasses
from pmlf.step.release_noise import ReleaseNoise
from pmlf.step.settings import StepSettings
from pmlf.step.turns import Turns


class PrivateStep:
    """One differentially private step, for your own training loop.

    Call `accumulate` on every micro-batch of a Poisson-drawn logical batch, if it is not empty. Then call `release`,
    which leaves the private gradient in `p.grad` of every trainable parameter. Then call `optimizer.step()`.

    Guarantees: one sample moves the sum before noise by at most C; noise of standard deviation noise_multiplier * C is
    added once per release. Batches must be Poisson-drawn, by `pmlf.sampling.PoissonBatches`.

    Args:
        model: The model to train. Its trainable parameters must not change between `accumulate` and `release`.
        loss_fn: A function of (model, batch) that returns one loss per sample, or a criterion of `torch.nn`.
        method: A method of `pmlf.methods`, or the name of a preset.
        clip_norm: Largest norm C of what one sample adds to the sum.
        noise_multiplier: Standard deviation of the noise over C. 0 is for tests, and warns.
        expected_batch_size: B = q * n, the public divisor of the sum.
        generator: A seeded `torch.Generator` for experiments. None means cryptographic noise.
        clipping: "flat" scales v by min(1, C/|v|), "automatic" by C/(|v| + 0.01), "per-layer" each of L layers' part
            of v to at most C/sqrt(L).
        adaptive_clipping: How the clip norm follows a private quantile, from clip_norm on; None keeps it.
        augmentation: A random change to each sample.
        secure_noise: Whether noise is hardened against floating-point attacks.
        cycle: The `cycle` of the sampler that draws the batches. Noise of b bands needs cycle=b.
        gradients: "ghost" takes per-sample gradients at layers and operations. "vmap" maps the model over samples by
            `torch.func`. "one-by-one" runs one sample after the other: slow, for models that the others refuse.
        assume_independent_samples: Whether to skip the proof and the watch that samples do not influence each other.
        strategy: How norms and sums are computed. By default the cheapest way.
        units: Whether the sum is over units of several records: `accumulate` then takes the unit of each record.
        group: The processes that share every step: "auto" for torch's default process group, or a process group. Each
            rank accumulates its own micro-batches of one logical batch; `release` adds up the ranks' sums.

    Raises:
        ValueError: If a setting or the model would break the guarantee, or differs between ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        method: Method | str = "dp-pmlf",
        clip_norm: float = 1.0,
        noise_multiplier: float,
        expected_batch_size: float,
        generator: torch.Generator | Randomness | None = None,
        clipping: Clipping = "flat",
        adaptive_clipping: AdaptiveClipping | None = None,
        augmentation: Augmentation | None = None,
        secure_noise: bool = False,
        cycle: int = 1,
        gradients: Gradients = "ghost",
        assume_independent_samples: bool = False,
        strategy: Strategy | None = None,
        units: bool = False,
        group: Group | Processes = None,
    ) -> None:
        self._processes = joined(group, "PrivateStep")
        require_known(gradients)
        self._placement = placement_of(model, self._processes, gradients)
        with self._placement.whole_parameters():
            refuse_unsafe_model(model)
            self._plan = Plan.of(model, gradients)
        loss_fn = as_per_sample(loss_fn)
        if not isinstance(assume_independent_samples, bool):
            raise ValueError(f"assume_independent_samples={assume_independent_samples!r} is neither True nor False")
        self._settings = StepSettings(
            method=resolve(method),
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            clipping=clipping,
            secure_noise=secure_noise,
            cycle=cycle,
            adaptive=adaptive_clipping,
            units=units,
        )
        if units:
            loss_fn, augmentation = averaged(loss_fn), on_records(augmentation)
        if self._processes.size > 1 and (what := self._settings.in_one_process):
            raise ValueError(f"{what} runs in one process: start one, not {self._processes.size}, or leave it out")
        if self._settings.without_noise:
            warnings.warn("noise_multiplier=0: no noise is added and nothing is private", stacklevel=2)
        self._randomness = randomness_from(generator)
        points = self._settings.method.points
        self._subject = Subject(
            model=model,
            plan=self._plan,
            loss_fn=loss_fn,
            clip_norm=self._settings.clip_norm,
            weights=[point.weight for point in points.at(points.depth)],
        )
        self._clipper = Clipper(
            self._plan.parameters,
            clip_norm=self._settings.clip_norm,
            clipping=clipping,
            wide=self._settings.wide or self._processes.size > 1,
            counts=adaptive_clipping is not None,
            strategy=strategy,
        )
        self._clip_norm = self._settings.clip_norms()
        self._history, self._filter = History(points.depth), FilterMemory(self._settings.method.low_pass)
        self._noise = ReleaseNoise(self._settings, self._randomness, self._placement)
        self._turns, self._releases, self._torn = Turns(self._settings.cycle), 0, False
        self._pending: PendingSum | None = None
        self._agreement = Agreement(self._processes, self._placement.iterate, self._forget)
        self._first_look = FirstLook(self._subject, gradients, augmentation, assumed=assume_independent_samples)
        watches = gradients == "ghost" and not assume_independent_samples
        self._passes = PointPasses(
            subject=self._subject,
            randomness=self._randomness,
            augmentation=augmentation,
            watch=Watch(self._subject, self._randomness, expected_batch_size) if watches else None,
        )
        stages = self._subject, self._clipper, self._first_look, self._passes
        self._accumulation = Accumulation(*stages, self._settings, self._processes)
        self._processes.require_same(self._facts(gradients))

    @property
    def model(self) -> nn.Module:
        """The model, fixed at the start: another one would go unchecked."""
        return self._subject.model

    @property
    def settings(self) -> StepSettings:
        """The mechanism, fixed at the start: less noise would go uncounted."""
        return self._settings

    @property
    def randomness(self) -> Randomness:
        """The source of noise and dropout."""
        return self._randomness

    @property
    def processes(self) -> Processes:
        """The processes that share every step."""
        return self._processes

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the parameters."""
        return isinstance(self._placement, ParameterShards)

    @property
    def independence(self) -> Finding | None:
        """What is known about samples that might influence each other; None before any was looked at."""
        return self._first_look.finding

    @property
    def first_look(self) -> FirstLook:
        """The checks of the first samples, and what they have found."""
        return self._first_look

    @property
    def watched(self) -> bool:
        """Whether a few samples of every step run again alone."""
        return self._passes.watch is not None

    @property
    def releases(self) -> int:
        """The number of private gradients released so far."""
        return self._releases

    @property
    def events(self) -> int:
        """What the releases so far are accounted as: with a cycle, the turns of the group that had most."""
        return self._turns.events

    @property
    def pending(self) -> bool:
        """Whether samples were accumulated and not released yet."""
        return self._pending is not None

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [self.model.get_parameter(name) for name in self._plan.parameters]

    def accumulate(self, micro_batch: Any, *, samples: Tensor | None = None, units: Any = None) -> None:
        """Add the clipped momentum of a micro-batch's samples to the pending sum: all of them, or nothing.

        `samples` numbers the samples for augmentation; by default they are counted through the logical batch. `units`
        has the id of each record's unit, for a step of units: all records of a unit are in one micro-batch. With a
        group, an error discards the step on every rank. With `fully_shard`, all ranks call it equally often.
        """
        with self._agreement.sharing_errors(self._releases):
            if not isinstance(self._placement, ParameterShards):
                self._accumulate(micro_batch, samples, units)
                return
            self._in_round(self._placement, micro_batch, samples, units)
        self._agreement.synchronize_again(self._releases)

    def in_rounds(self, batch: LogicalBatch) -> Iterator[tuple[Tensor | None, Any]]:
        """(numbers of samples, micro-batch) of a logical batch; empty ones where other ranks have more of them."""
        return self._placement.rounds(batch)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """A block in which this rank accumulates. At its end all ranks agree, and if one failed, all of them raise.

        `release` does the same if there was no such block. Without a group it does nothing.
        """
        with self._agreement.sharing_errors(self._releases):
            yield
        self._agreement.synchronize(self._releases)

    def _accumulate(self, micro_batch: Any, samples: Tensor | None, units: Any) -> None:
        self._refuse_torn()
        anatomy, questions = Anatomy(self.model), Questions()
        _, iterate = self._unchanged(anatomy, questions)
        pending = self._pending or PendingSum(fingerprint=iterate)
        given = self._accumulation.numbered(pending, micro_batch, samples, units)
        if given is None:
            questions.answer()
            self._pending = pending
            return
        try:
            self._pending = self._accumulation.added(anatomy, pending, given, self._releases, self._history, questions)
        except BaseException:
            self._pending, kept = None, self._pending
            refuse_written(anatomy.parameters, iterate)
            self._pending = kept
            raise

    def _in_round(self, shards: ParameterShards, micro_batch: Any, samples: Tensor | None, units: Any) -> None:
        """One round of all ranks, of which each holds a part of the parameters; one may have no samples."""
        pending = self._pending or PendingSum(fingerprint=fingerprint(map(shards.local_part, self.model.parameters())))

        def given() -> MicroBatch | None:
            self._refuse_torn()
            self._unchanged(Anatomy(self.model), asked := Questions())
            asked.answer()
            return self._accumulation.numbered(pending, micro_batch, samples, units)

        self._pending = self._accumulation.added_to_shards(pending, given, self._releases, self._history, shards)

    def sensitive_sum(self) -> ClippedSum | None:
        """The pending sum before noise, None of no samples. For tests and audits: it must not be shown or kept."""
        return None if self._pending is None else self._pending.total

    def release(self, batch: LogicalBatch | None = None) -> None:
        """Add noise, divide by the expected batch size, filter, and leave the result in `p.grad`; forget the sum.

        `batch` is the logical batch that was accumulated. If it is given, a sum of another number of samples is refused
        and forgotten. With a cycle it must be given, and be the next one: see `Turns`.
        """
        self._refuse_torn()
        with self._agreement.sharing_errors(self._releases):
            self._check_turn(batch)
        (self._agreement.synchronize if batch is None else self._agreement.synchronize_again)(self._releases)
        anatomy, asked = Anatomy(self.model), Questions()
        named, _ = self._unchanged(anatomy, asked)
        asked.answer()
        parameters = [self._placement.local_part(parameter) for parameter in named.values()]
        total = self.sensitive_sum()
        self._torn = True
        self._turns.take(batch)  # before the noise: a release that is interrupted is counted
        if total is None:  # an empty batch is a step like any other
            total = self._clipper.nothing(dict(zip(named, parameters, strict=True)))
        values = [total.values[name] for name in self._plan.parameters]
        dtypes = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        self._noise.add_(values, total.sensitivity, dtypes, release=self._releases)
        values = [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]
        self._history.remember(parameters)
        filtered = self._filter.apply(values, scale=1 / self._settings.expected_batch_size)
        for parameter in anatomy.parameters.values():
            parameter.grad = None  # also of frozen ones: what an optimizer finds there was never made private
        for parameter, value in zip(named.values(), filtered, strict=True):
            parameter.grad = self._placement.as_gradient(value.to(parameter.dtype), parameter)
        self._clipper.clip_norm = self._clip_norm.after(total.within, self._randomness, self._releases)
        self._clipper.give_away(total)  # to the filter or p.grad: no later sum is written where somebody can see it
        self._pending, self._releases, self._torn = None, self._releases + 1, False

    def discard(self) -> None:
        """Forget a pending sum: nothing was released, nothing is spent. With a cycle, take the same step again."""
        self._refuse_torn()
        self._forget()

    def _forget(self) -> None:
        self._pending = None

    def _check_turn(self, batch: LogicalBatch | None) -> None:
        held, self._pending = self._pending, None  # a sum that is refused is forgotten
        due = self._releases if self._randomness.reproducible else None
        self._turns.check(batch, samples=0 if held is None else held.samples, due=due)
        self._pending = held
        if self._turns.begins(batch):
            self._noise.begin()

    def state_dict(self) -> dict[str, Any]:
        """Step count, filter memory and past iterates: released values only. Raises while a sum is pending."""
        self._refuse_torn()
        if self._pending is not None:
            raise RuntimeError("a sum is pending, which is sensitive: call release() or discard() before state_dict()")
        return {
            "method": self._settings.method.name,
            "shape": list(self._settings.method.noise.coefficients),
            "releases": self._releases,
            "turns": self._turns.state_dict(),
            "filter": self._filter.state_dict(),
            "history": self._history.state_dict(),
            **self._clip_norm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of a step with the same method, noise shape and model. Forgets a pending sum."""
        self._settings.refuse_other_state(state)
        require_count("releases", state["releases"], "it counts the releases of the state", least=0)
        history = History(self._settings.method.points.depth)
        history.load_state_dict(state["history"], like=[self._placement.local_part(p) for p in self.trained])
        memory = FilterMemory(self._settings.method.low_pass)
        memory.load_state_dict(state["filter"])
        self._clipper.clip_norm = self._clip_norm.load_state_dict(state)
        self._history, self._filter, self._releases = history, memory, state["releases"]
        self._turns.load_state_dict(state["turns"])
        self._noise.begin()
        self._pending, self._torn = None, False

    def __getstate__(self) -> dict[str, Any]:
        if self._pending is not None:
            raise RuntimeError("a sum is pending, which is sensitive: call release() or discard() before copying it")
        return vars(self)

    def check_collation(self, indices: Sequence[int], batch_of: Callable[[list[int]], Any]) -> None:
        """Refuse a `batch_of` some indices by which records change each other's gradients, by padding or otherwise."""
        batch_of = each_a_unit(batch_of) if self._settings.units else batch_of
        checked = partial(check_collation, self._subject, indices, batch_of)
        with self._placement.whole_parameters():
            with_constants_made(self._subject, lambda: batch_of(list(indices[:1])), checked)

    def _refuse_torn(self) -> None:
        if self._torn:
            raise RuntimeError("a release was interrupted halfway: load a saved state, or build a new step")

    def _facts(self, gradients: Gradients) -> dict[str, str]:
        """What all ranks must have in common."""
        with self._placement.whole_parameters():
            facts = facts_of(self.model)
        setting = f"{self._settings} {gradients}, plain: {not self._passes.augmentation}, watched: {self.watched}"
        return {**facts, "setting of the step": setting, "seed": str(self._randomness.identity)}

    def _unchanged(self, anatomy: Anatomy, questions: Questions) -> tuple[dict[str, nn.Parameter], Fingerprint]:
        """The trainable parameters by name, and the fingerprint of all; refused if they are others than at the start,
        or, when the questions are answered, than the pending sum's."""
        named = self._plan.unchanged(anatomy.parameters)
        iterate = fingerprint(map(self._placement.local_part, anatomy.parameters.values()))
        if self._pending is not None:
            refuse_other_iterate(self._pending.fingerprint, iterate, questions)
        return named, iterate
