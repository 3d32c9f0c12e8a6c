"""Names that other libraries use: what to give instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from pmlf.basics.arguments import did_you_mean

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

OF_OPACUS: Mapping[str, str] = {  # arguments of PrivacyEngine.make_private
    "batch_first": "leave it out, axis 0 of every tensor counts samples",
    "criterion": "give loss_fn=nn.CrossEntropyLoss(), or a function of (model, batch) with one loss per sample",
    "data_loader": "give dataset=data_loader, or dataset= and batch_size=",
    "grad_sample_mode": 'leave it out, the default computes norms layer by layer ("ghost"); for other models give '
    'gradients="vmap" or gradients="one-by-one"',
    "loss_reduction": "leave it out, the gradient is a mean over batch_size",
    "max_grad_norm": "give clip_norm, the same bound on each sample's gradient",
    "module": "give model=",
    "noise_generator": "leave it out for cryptographic noise, or give seed=0 for an experiment that repeats",
    "poisson_sampling": "leave it out, every run draws Poisson batches, because its epsilon is for them",
    "rand_on_empty": "leave it out, an empty batch is a step of noise alone",
    "secure_mode": "leave it out, noise is cryptographic unless seed is given; secure_noise=True also protects the low "
    "bits",
    "wrap_model": "leave it out, the model is never wrapped",
}


def known_arguments_only(
    instead: Mapping[str, str],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Refuse an argument that a function does not have, with a sentence on what to give instead.

    Args:
        instead: What to do instead of an argument of another library, by the argument's name.

    Returns:
        A decorator. The function keeps its signature; it gets only arguments that are in it.

    >>> @known_arguments_only({"max_grad_norm": "give clip_norm"})
    ... def f(*, clip_norm: float) -> None: ...
    >>> f(max_grad_norm=1.0)
    Traceback (most recent call last):
    TypeError: f has no argument 'max_grad_norm': give clip_norm
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        known = inspect.signature(function).parameters
        name = function.__name__

        @functools.wraps(function)
        def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if args:
                raise TypeError(f"{name} takes arguments by name only: write {name}({next(iter(known))}=..., ...)")
            for given in kwargs:
                if given not in known:
                    hint = f": {instead[given]}" if given in instead else did_you_mean(given, known)
                    raise TypeError(f"{name} has no argument {given!r}{hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_wrapped(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError for a model or an optimizer that Opacus has wrapped: it would clip and add noise twice."""
    for argument, value in (("model", model), ("optimizer", optimizer)):
        if _of_opacus(value):
            raise ValueError(
                f"{argument} is a {type(value).__name__} of Opacus, which clips and adds noise by itself: give the "
                f"{argument} from before PrivacyEngine.make_private"
            )


def _of_opacus(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "opacus"
