"""A run in a few lines, as text and as HTML. Public values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmlf.run.private_run import PrivateRun

Facts = Sequence[tuple[str, str]]


def run_facts(run: PrivateRun) -> Facts:
    """What a run is and how far it is, as pairs of name and value."""
    settings, plan = run.private_step.settings, run.budget.plan
    epochs = run.planned_epochs
    neighbour = "zeroed out" if plan.event.overflow else "added or removed"
    clipped = settings.clipping if settings.adaptive is None else f"at first, {settings.adaptive}"
    target = "" if plan.target_epsilon is None else f" of {plan.target_epsilon:g}"
    rates = ", ".join(sorted({f"{float(group['lr']):g}" for group in run.optimizer.param_groups}))
    optimizer = f"{type(run.optimizer).__name__}, learning rate {rates}"
    if run.scheduler is not None:
        optimizer += f", {type(run.scheduler).__name__} after every {run.scheduler_interval}"
    trained = sum(parameter.numel() for parameter in run.private_step.trained)
    drawn = "Poisson" if settings.cycle == 1 else f"Poisson from {settings.cycle} groups in turn"
    return [
        ("method", settings.method.name),
        ("steps", f"{run.steps_done} of {run.steps} done, {epochs.count} epoch{'s' * (epochs.count != 1)}"),
        ("epsilon", f"{run.budget.epsilon():.4g}{target} spent, delta {plan.delta:g}"),
        ("protects", f"{run.unit}, {neighbour}"),
        (
            "mechanism",
            f"noise multiplier {settings.noise_multiplier:.4g}, clip norm {settings.clip_norm:g} ({clipped})",
        ),
        (
            "batches",
            f"{drawn}, {settings.expected_batch_size:g} of {epochs.records} {'units' * settings.units or 'records'} "
            f"expected, at most {run.max_physical_batch_size} records in memory",
        ),
        ("model", f"{type(run.model).__name__}, {trained:,} trained parameters"),
        ("optimizer", optimizer),
        ("noise", settings.noise_source(run.private_step.randomness)),
    ]


def saved_mechanism(run: PrivateRun) -> dict[str, Any]:
    """What a resumed run must have in common with the saved one."""
    step, plan = run.private_step, run.budget.plan
    settings = step.settings
    return {
        "method": repr(settings.method),
        "clipping": settings.clipping,
        "adaptive_clipping": None if settings.adaptive is None else repr(settings.adaptive),
        "largest_batch": run.largest_batch,
        "records": run.planned_epochs.records,
        "unit": run.unit,
        "expected_batch_size": settings.expected_batch_size,
        "noise_multiplier": settings.noise_multiplier,
        "clip_norm": settings.clip_norm,
        "steps": plan.steps,
        "delta": plan.delta,
        "secure_noise": settings.secure_noise,
        "target_epsilon": plan.target_epsilon,
        "randomness": step.randomness.identity,
    }


def refuse_other_mechanism(run: PrivateRun, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state is of the run's mechanism, or of one with fewer steps where that is guarded."""
    for name, value in saved_mechanism(run).items():
        before = saved.get(name)
        if before == value or (name == "steps" and before < value and run.budget.guards_longer_plans):
            continue
        if name == "randomness":
            raise ValueError("the state and this run differ in seed: build the run with the same seed")
        raise ValueError(
            f"the state has {name}={before!r} and this run has {value!r}: build the run with the same {name}"
        )


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
