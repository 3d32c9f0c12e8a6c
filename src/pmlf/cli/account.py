"""`pmlf account`: convert between epsilon and noise, verify a certificate, sum up a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pmlf.basics.arguments import warn_of_large_delta
from pmlf.cli.common import Command
from pmlf.cli.display import claims_table, facts, ledger_table
from pmlf.experiments.spec import USUAL_DELTA, Budget, shown_default

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pmlf.evidence.tally import Query

_NO_GUARANTEE = 20.0  # above, the odds change by a factor of more than 10^8: nothing worth the name is left


@dataclass(frozen=True, kw_only=True)
class Account(Budget, Command):
    """Compute the noise for an epsilon or the epsilon of a noise; verify a certificate; sum up a ledger.

    Nothing is trained. Each step draws every record with probability batch size / records and adds Gaussian noise to
    the clipped sum. With no options: the noise of `pmlf train` with no options. Epsilon is computed with the PLD
    accountant, as in `pmlf train`. The RDP value is printed for comparison; it is looser.
    """

    certificate: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Verify this certificate.json: recompute every epsilon from the numbers in it. Exit code 0 if all hold, else 1.
    This checks the arithmetic. It cannot check that the numbers describe the training that took place."""

    ledger: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Print the epsilon that all runs in this ledger spend together, at --delta (default: 1e-5).
    PLD for a single run with a single plan, otherwise an RDP filter."""

    records: int = 12_000
    """Number n of training records."""

    group: Annotated[int | None, shown_default("none", "RECORDS")] = None
    """Also print the epsilon for a person with this number of records (group privacy). It grows faster than the
    number of records."""

    bands: int = 1
    """Shaped noise with this many bands, and records drawn from as many groups in turn; 1 is white noise.
    A record is then drawn in at most ceil(steps / bands) steps, with probability bands * batch size / n."""

    largest_batch: Annotated[int | None, shown_default("none", "RECORDS")] = None
    """Truncated Poisson sampling: a draw of more records is cut to this many at random. Epsilon is then for one record
    zeroed out, and delta includes the chance of a cut."""

    def execute(self) -> int:
        if self.group is not None and self.largest_batch is not None:
            raise ValueError("--group and --largest-batch are both given: group privacy is for whole draws")
        if self.group is not None and self.bands > 1:
            raise ValueError("--group and --bands are both given: the records of a person are in different groups")
        if self.certificate is not None and self.ledger is not None:
            raise ValueError("--certificate and --ledger are both given: give one of them")
        if self.certificate is not None:
            return self._check(self.certificate)
        if self.ledger is not None:
            return self._add_up(self.ledger)
        return self._calibrate()

    def _check(self, path: Path) -> int:
        from pmlf.evidence import certificate

        found, reason = certificate.examined(certificate.read(path))
        self.show(
            {
                "holds": reason is None,
                "reason": reason,
                "claims": [{**asdict(claim), "holds": claim.holds} for claim in found],
            },
            *([claims_table(found)] if found else []),
            f"The certificate does NOT hold: {reason}." if reason else "The certificate holds.",
        )
        return 1 if reason else 0

    def _add_up(self, path: Path) -> int:
        from pmlf.evidence import ledger
        from pmlf.mechanism import accounting, composition

        tally = ledger.read(path)
        delta = USUAL_DELTA if self.delta is None else self.delta
        planned = len({start.key for start in tally.starts}) == 1
        if planned:
            spent = composition.composed_epsilon(tally.events, delta=delta)
        else:
            spent = accounting.filter_epsilon(tally.events, delta=delta)
        runs = [
            {
                "run": t.run,
                "beginning": t.beginning,
                **t.plan.event.document(),
                "planned_steps": t.plan.steps,
                "seeded": tally.replayable(t),
                "bands": t.plan.bands,
                "steps": releases,
                "events": tally.parts_of(t)[-1],
                **({"queries": _queries(t.plan.queries, tally.parts_of(t))} if t.plan.queries else {}),
            }
            for t, releases in tally.starts.items()
        ]
        rule = "PLD" if planned else "RDP filter"
        self.show(
            {"epsilon": spent, "delta": delta, "composition": rule, "runs": runs},
            ledger_table(runs),
            facts([("epsilon", f"{spent:.5g} by {rule}, at delta {delta:.3g}")]),
        )
        return 0

    def _group(self, noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
        from pmlf.mechanism.groups import group_epsilon

        assert self.group is not None
        return group_epsilon(
            noise_multiplier=noise_multiplier, sample_rate=rate, steps=steps, delta=delta, group=self.group
        )

    def _check_sizes(self) -> None:
        if self.records < 1:
            raise ValueError(f"records={self.records} is not a number of training records: give 1 or more")
        if not 0 < self.batch_size <= self.records:
            raise ValueError(
                f"batch_size={self.batch_size} is not in (0, {self.records}]: it is the expected number of records per "
                "step, at most the number of records"
            )

    def _calibrate(self) -> int:
        from pmlf.mechanism import accounting
        from pmlf.mechanism.truncation import chance_of_a_cut

        self._check_sizes()
        budget = self.resolved(self.records)
        assert budget.delta is not None
        rate, steps = self.batch_size / self.records, budget.planned_steps(self.records)
        overflow = chance_of_a_cut(
            largest_batch=self.largest_batch,
            records=self.records,
            batch_size=self.batch_size,
            steps=steps,
            epsilon=budget.epsilon,
            delta=budget.delta,
            bands=self.bands,
            processes=1,
        )
        drawn = _DrawArguments(sample_rate=rate, steps=steps, bands=self.bands, overflow=overflow)
        noise_multiplier = budget.noise_multiplier
        if noise_multiplier is None:
            assert budget.epsilon is not None
            noise_multiplier = accounting.noise_multiplier(
                target_epsilon=budget.epsilon, target_delta=budget.delta, **drawn
            )
        pld, rdp = (
            accounting.epsilon(noise_multiplier=noise_multiplier, delta=budget.delta, accountant=name, **drawn)
            for name in ("pld", "rdp")
        )
        group = None if self.group is None else self._group(noise_multiplier, rate, steps, budget.delta)
        warn_of_large_delta("delta", budget.delta, self.records, stacklevel=1)
        self.show(
            {
                "noise_multiplier": noise_multiplier,
                "epsilon": pld,
                "epsilon_rdp": rdp,
                "delta": budget.delta,
                "records": self.records,
                "batch_size": self.batch_size,
                "sample_rate": rate,
                "steps": steps,
                "bands": self.bands,
                **({"largest_batch": self.largest_batch, "overflow": overflow} if overflow else {}),
                **({} if group is None else {"group": self.group, "epsilon_of_group": group}),
            },
            facts(
                [
                    ("noise multiplier", f"{noise_multiplier:.5g}"),
                    ("epsilon", f"{pld:.5g} by PLD, {rdp:.5g} by RDP, at delta {budget.delta:.3g}"),
                    ("steps", _steps_in_words(rate, steps, self.bands, overflow)),
                    *([] if group is None else [_group_line(self.group, group, budget.delta)]),
                ]
            ),
        )
        return 0


def _queries(queries: Sequence[Query], events: Sequence[int]) -> list[dict[str, Any]]:
    """What a run of a ledger releases before its steps."""
    pairs = zip(queries, events, strict=False)
    return [{"name": q.name, **q.event.document(), "planned": q.count, "events": count} for q, count in pairs]


def _group_line(records: int | None, epsilon: float, delta: float) -> tuple[str, str]:
    meaning = "too large to protect anyone" if epsilon > _NO_GUARANTEE else "for adding or removing all of them"
    return f"{records} records", f"epsilon {epsilon:.5g} at delta {delta:.3g}, {meaning}"


class _DrawArguments(TypedDict):
    """How often, and how, records are drawn: arguments of the accountant."""

    sample_rate: float
    steps: int
    bands: int
    overflow: float


def _steps_in_words(rate: float, steps: int, bands: int, overflow: float) -> str:
    """The number of steps, and how records are drawn for them."""
    from pmlf.mechanism import accounting

    if bands == 1:
        cut = f"; a draw is cut with probability {overflow:.3g}, and epsilon is for one record zeroed out"
        return f"{steps}, each record drawn with probability {rate:.4g}{cut * (overflow > 0)}"
    in_group, events = accounting.cyclic(rate, steps, bands)
    return f"{steps}, each record drawn with probability {in_group:.4g} in at most {events} of them"
