"""A run in a few lines, as text and as HTML. Public values only."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmlf.run.private_run import PrivateRun

Facts = Sequence[tuple[str, str]]


def run_facts(run: PrivateRun) -> Facts:
    """What a run is and how far it is, as pairs of name and value."""
    settings, plan = run.private_step.settings, run.budget.plan
    epochs = run.planned_epochs
    target = "" if plan.target_epsilon is None else f" of {plan.target_epsilon:g}"
    rates = ", ".join(sorted({f"{float(group['lr']):g}" for group in run.optimizer.param_groups}))
    optimizer = f"{type(run.optimizer).__name__}, learning rate {rates}"
    if run.scheduler is not None:
        optimizer += f", {type(run.scheduler).__name__} after every {run.scheduler_interval}"
    trained = sum(parameter.numel() for parameter in run.private_step.trained)
    return [
        ("method", settings.method.name),
        ("steps", f"{run.steps_done} of {run.steps} done, {epochs.count} epoch{'s' * (epochs.count != 1)}"),
        ("epsilon", f"{run.budget.epsilon():.4g}{target} spent, delta {plan.delta:g}, one record added or removed"),
        (
            "mechanism",
            f"noise multiplier {settings.noise_multiplier:.4g}, clip norm {settings.clip_norm:g} ({settings.clipping})",
        ),
        (
            "batches",
            f"Poisson, {settings.expected_batch_size:g} of {epochs.records} records expected, at most "
            f"{run.max_physical_batch_size} in memory",
        ),
        ("model", f"{type(run.model).__name__}, {trained:,} trained parameters"),
        ("optimizer", optimizer),
        ("noise", run.private_step.noise_source),
    ]


def as_text(facts: Facts) -> str:
    """One fact per line.

    >>> print(as_text([("steps", "0 of 4")]))
    PrivateRun
      steps      0 of 4
    """
    return "\n".join(["PrivateRun", *(f"  {name:<10} {value}" for name, value in facts)])


def as_html(facts: Facts) -> str:
    """A table with one fact per row, for notebooks.

    >>> as_html([("steps", "0 < 4")])
    '<table><caption>PrivateRun</caption><tr><th>steps</th><td>0 &lt; 4</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table><caption>PrivateRun</caption>{rows}</table>"
