"""Per-sample momentum of one micro-batch: v_i = sum_j w_j grad f(x_{t-j}; i), its norm, and the clipped sum.

Norms and clip factors are computed by a fast path, which reads nothing from the device. It assumes that every sample is
ordinary: its norm is finite, float32 holds its factor with room to spare, and what it adds has no more rounding than
1e-4 of the clip norm. One flag on the device, for all samples and the parameters that are clipped together, says
whether this holds. It is read with all other questions about the micro-batch. If it is set, the results of the fast
path are kept. If not, they are dropped, and the checked path computes them again: it looks at each sample, refuses
those whose norm is not finite or too large for their factor, and forms and adds by itself each one with more rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmlf.basics.clipping import Clipping
from pmlf.engine.arithmetic import squared_norms, wide_numbers
from pmlf.engine.capture import capture
from pmlf.engine.factors import Factors
from pmlf.engine.gradients import ParameterGradient, Workspace
from pmlf.engine.half_precision import without_autocast
from pmlf.engine.layers import Contribution
from pmlf.engine.mapped import mapped
from pmlf.engine.operations.capture import taken_at_operations
from pmlf.engine.owners import Owners
from pmlf.engine.passes import Pass
from pmlf.engine.questions import Questions
from pmlf.engine.roots import Roots

_AUTOMATIC_STABILITY = 0.01
_SMALLEST_FACTOR = 2.0**24 * torch.finfo(torch.float32).smallest_normal  # times a gradient, it is still normal
_LARGEST_ROUNDING = 1e-4  # over the clip norm, by its bound, which ordinary samples stay far below


def clip_factors(norms: Tensor, clip_norm: float, clipping: Clipping) -> Tensor:
    """min(1, C/|v|), or C/(|v| + 0.01) for "automatic": always |factor * v| <= C.

    >>> clip_factors(torch.tensor([0.5, 4.0]), 1.0, "flat").tolist()
    [1.0, 0.25]
    """
    at_least = norms + _AUTOMATIC_STABILITY if clipping == "automatic" else norms.clamp(min=clip_norm)
    return at_least.reciprocal_().mul_(clip_norm)


def finite_factors(norms: Tensor, clip_norm: float, clipping: Clipping) -> tuple[Tensor, Tensor | None]:
    """(factors, refused): zero for samples, marked in `refused` if there are any, whose norm is not finite, or so large
    that float32 would round its factor up. Read from the device of the norms."""
    factors = clip_factors(norms, clip_norm, clipping)  # NaN of NaN, and 0 of infinity
    if float(factors.min()) >= _SMALLEST_FACTOR:  # which NaN is not
        return factors, None
    fine = factors >= _SMALLEST_FACTOR
    return torch.where(fine, factors, 0.0), ~fine


def clipped_together(parameters: Iterable[str], clip_norm: float, clipping: Clipping) -> list[tuple[list[str], float]]:
    """The parameters whose gradients have one norm, and the bound on it: all of them and C, or those of each layer.

    "per-layer" gives each of L layers C / sqrt(L). A sample then adds a vector whose square is at most L C^2 / L = C^2,
    so the sensitivity is C as with one norm. A layer is a module with trainable parameters of its own.

    >>> clipped_together(["body.weight", "body.bias", "head.weight"], 2.0, "per-layer")
    [(['body.weight', 'body.bias'], 1.414213562373095), (['head.weight'], 1.414213562373095)]
    """
    if clipping != "per-layer":
        return [(list(parameters), clip_norm)]
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return [(names, clip_norm / math.sqrt(len(layers))) for names in layers.values()]


def contributions(one: Pass) -> Iterator[tuple[str, Contribution]]:
    """The per-sample gradients that a pass asks for, in the way that is planned."""
    if one.plan.gradients == "vmap":
        return mapped(one)
    return taken_at_operations(one) if one.plan.learned.by_operations else capture(one)


class _FastResult(NamedTuple):
    """What the fast path computes for parameters that are clipped together, on their device; nothing of it was read."""

    norms: Tensor
    scale: Tensor
    ordinary: Tensor  # a flag: whether all samples are
    squared: Tensor  # norms^2 over the parameters that are not formed late
    slack: Tensor | None
    late: Sequence[str]
    step: int


class _Clipped(NamedTuple):
    """Norms and factors of all samples, and which samples are refused; None if none is."""

    norms: Tensor
    scale: Tensor
    refused: Tensor | None


class SampleMomentum:
    """v of every sample of a micro-batch, built up point by point, then clipped once and summed.

    Everything in here is sensitive; only the sum leaves it.
    """

    def __init__(
        self, parameters: Iterable[str], samples: int, points: int, workspace: Workspace, questions: Questions
    ) -> None:
        self.questions = questions
        self._samples = samples
        self._points = points
        self._strategy = workspace.strategy
        self._gradients = {name: ParameterGradient(name, workspace) for name in parameters}
        self._touched: set[str] = set()

    def add_pass(
        self, one: Pass, seen: Callable[[str, Contribution], None] | None = None, owners: Owners | None = None
    ) -> None:
        """v += what the pass asks for. `seen` is shown every contribution. With `owners`, v is that of the units that
        the samples of the pass belong to."""
        for name, contribution in contributions(one._replace(questions=self.questions)):
            if seen is not None:
                seen(name, contribution)
            self.add(name, contribution if owners is None else owners.together(contribution))

    def add(self, name: str, contribution: Contribution) -> None:
        """v of parameter `name` += contribution."""
        with without_autocast():
            if isinstance(contribution, Factors):
                self._gradients[name].add(contribution, self._points)
            else:
                self._gradients[name].add_formed(contribution)
        self._touched.add(name)

    def write_clipped_sum(
        self,
        clip_norm: float,
        clipping: Clipping,
        before: Mapping[str, Tensor] | None,
        into: Mapping[str, Tensor],
        written: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """into = before + sum_i clip(v_i); a sample whose v is not finite adds exactly zero, per layer if so clipped.

        A sample whose tokens cancel so far that rounding is a part of what it adds is formed and added by itself: in
        one product with the others its rounding would follow from who they are. `written` is told of each parameter.

        Returns |v| of every sample over all trainable parameters, never understated; not finite where v is not.
        """
        together = clipped_together(self._gradients, clip_norm, clipping)
        ordinary, norms = list[bool](), list[Tensor]()
        with without_autocast():
            fast = [self._fast_path(names, bound, clipping) for names, bound in together]
            for each in fast:
                self.questions.ask(each.ordinary, lambda read: ordinary.append(bool(read[0])))
            self.questions.answer()
            for (names, bound), each, fine in zip(together, fast, ordinary, strict=True):
                clipped = self._kept(each) if fine else self._checked_path(each, names, bound, clipping)
                norms.append(clipped[0])
                for name in names:
                    out = into[name]
                    self._write(name, *clipped[1:], None if before is None else before[name], out)
                    if written is not None:
                        written(name, out)
        return norms[0] if len(norms) == 1 else torch.stack(norms).square_().sum(0).sqrt_()

    def _write(self, name: str, scale: Tensor, refused: Tensor | None, before: Tensor | None, out: Tensor) -> None:
        """out = before + the clipped sum of one parameter."""
        if before is not None:
            out.copy_(before)
        elif name not in self._touched:
            out.zero_()
        if name in self._touched:
            if refused is not None:
                self._gradients[name].blank_out(refused)
            self._gradients[name].write_clipped_sum(scale, out, add=before is not None)

    def _fast_path(self, names: Sequence[str], clip_norm: float, clipping: Clipping) -> _FastResult:
        """Norms and factors of all samples over some parameters, which are clipped together.

        All samples are taken to be ordinary, and a flag says whether they are. Gradients that are formed late are
        summed on the way.
        """
        kept = {name: self._gradients[name].factors for name in names}
        late, step = self._strategy.held_late({name: uses for name, uses in kept.items() if uses}, self._samples)
        # in the parameters' order, not a set's: sums round the same way in every process
        others = [name for name in names if name in self._touched and name not in late]
        squared, slack = self._squared_norms(others)
        norms, scales, ordinary = squared.clone(), list[Tensor](), list[Tensor]()
        for chosen, some, formed in self._slices(norms, slack, late, step):
            scale = clip_factors(some, clip_norm, clipping)
            fine = scale >= _SMALLEST_FACTOR  # which NaN is not
            if slack is not None:
                fine &= scale * slack[chosen] <= _LARGEST_ROUNDING * clip_norm
            for name, part in formed.items():
                self._gradients[name].add_clipped(part, scale, None)
            scales.append(scale)
            ordinary.append(fine)
        flags, scale = (each[0] if len(each) == 1 else torch.cat(each) for each in (ordinary, scales))
        return _FastResult(norms, scale, flags.all(), squared, slack, late, step)

    def _slices(
        self, norms: Tensor, slack: Tensor | None, late: Sequence[str], step: int
    ) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Some samples at a time, with their norms over all parameters and the gradients that are formed late. `norms`
        has squares over the other parameters, and has norms afterwards."""
        for start in range(0, self._samples, step):
            chosen = slice(start, min(start + step, self._samples))
            some, formed = norms[chosen], {name: self._gradients[name].formed(chosen) for name in late}
            for part in formed.values():
                some += squared_norms(part).to(some)
            some.sqrt_()
            if slack is not None:
                some += slack[chosen]
            yield chosen, some, formed

    def _kept(self, fast: _FastResult) -> _Clipped:
        """The results of the fast path, where all samples are ordinary."""
        for name in fast.late:
            self._gradients[name].forget_factors()
        return _Clipped(fast.norms, fast.scale, None)

    def _checked_path(self, fast: _FastResult, names: Sequence[str], clip_norm: float, clipping: Clipping) -> _Clipped:
        """Norms and factors again, where some sample is not finite, or is to be formed and added by itself."""
        norms, slack, late, step = fast.squared, fast.slack, fast.late, fast.step
        for name in late:
            self._gradients[name].forget_total()
        others = [name for name in names if name in self._touched and name not in late]
        scales: list[Tensor] = []
        aside: list[int] = []
        for chosen, some, formed in self._slices(norms, slack, late, step):
            scale, refused = finite_factors(some, clip_norm, clipping)
            if slack is not None:
                rounded = scale * slack[chosen] > _LARGEST_ROUNDING * clip_norm
                for row in rounded.nonzero().flatten().tolist():
                    late_rows = [part[row : row + 1] for part in formed.values()]
                    some[row], scale[row] = self._add_alone(chosen.start + row, others, late_rows, clip_norm, clipping)
                    aside.append(chosen.start + row)
                    refused = scale == 0.0
            for name, part in formed.items():
                self._gradients[name].add_clipped(part, scale, refused)
            scales.append(scale)
        for name in late:
            self._gradients[name].forget_factors()
        if aside:
            added = torch.zeros(self._samples, dtype=torch.bool)
            added[aside] = True
            for name in others:
                self._gradients[name].set_aside(added)
        if len(scales) > 1:
            scale = torch.cat(scales)
            refused = None if bool(scale.all()) else scale == 0.0
        return _Clipped(norms, scale, refused)

    def _add_alone(
        self, sample: int, names: Sequence[str], rest: Sequence[Tensor], clip_norm: float, clipping: Clipping
    ) -> tuple[Tensor, Tensor]:
        """Form the gradients of one sample and take up those of parameters kept as factors; `rest` is of the others.

        Returns its norm, over all, and its factor.
        """
        formed = {name: self._gradients[name].formed(slice(sample, sample + 1)) for name in names}
        squares = [wide_numbers(squared_norms(part)) for part in (*formed.values(), *rest)]
        norm = torch.stack(squares).sum(0).sqrt_()
        factor, refused = finite_factors(norm, clip_norm, clipping)
        for name, part in formed.items():
            if self._gradients[name].factors:
                self._gradients[name].add_clipped(part, factor, refused)
        return norm[0], factor[0]

    def _squared_norms(self, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """(norm^2, slack) of every sample over some parameters, float64; no slack where nothing can cancel."""
        squared, slack, roots = None, None, Roots()
        for name in names:
            norm, rounding = self._gradients[name].norms(roots)
            squared = _added(squared, norm)
            if rounding is not None:
                slack = _added(slack, wide_numbers(rounding).square())  # not in less, which could lose it
        if squared is None:  # all are formed late
            like = next((gradient.factors[0] for gradient in self._gradients.values() if gradient.factors), None)
            device = None if like is None else like.like.device
            squared = wide_numbers(torch.zeros(self._samples, device=device))
        return squared, None if slack is None else slack.sqrt_()


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    part = wide_numbers(part)
    return part if total is None else total.add_(part.to(total.device))
