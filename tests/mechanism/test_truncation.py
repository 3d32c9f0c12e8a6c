"""Truncated Poisson sampling: its accounting against dp-accounting's event, draws, ledger, certificate and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import special

from pmlf import Ledger, accounting, checkpoint, methods
from pmlf.cli.main import main
from pmlf.evidence import ledger as ledgers
from pmlf.evidence.certificate import examined, sealed
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.truncation import smallest_batch_bound
from pmlf.sampling import PoissonBatches
from small_runs import finish, private, weights

RECORDS, BATCH, STEPS, DELTA = 2000, 100, 50, 1e-5
LEAST = smallest_batch_bound(records=RECORDS, batch_size=BATCH, steps=STEPS, epsilon=4.0, delta=DELTA)


def independent(z: float, largest: int) -> float:
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(RECORDS, BATCH / RECORDS, largest, z)
    accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    return float(accountant.compose(dp_accounting.SelfComposedDpEvent(event, STEPS)).get_epsilon(DELTA))


@pytest.mark.slow
@pytest.mark.parametrize("largest", [LEAST, LEAST + 20, RECORDS])
def test_epsilon_is_that_of_dp_accountings_truncated_event(largest: int) -> None:
    chance = accounting.overflow(records=RECORDS, batch_size=BATCH, largest_batch=largest)
    ours = accounting.epsilon(
        noise_multiplier=0.9, sample_rate=BATCH / RECORDS, steps=STEPS, delta=DELTA, overflow=chance
    )
    assert ours == pytest.approx(independent(0.9, largest), rel=3e-3)


@pytest.mark.slow
def test_epsilon_is_not_below_dp_accountings_where_cuts_are_frequent() -> None:
    largest, step = LEAST - 22, {"noise_multiplier": 0.9, "sample_rate": BATCH / RECORDS, "steps": STEPS}
    chance = accounting.overflow(records=RECORDS, batch_size=BATCH, largest_batch=largest)
    ours = accounting.epsilon(**step, delta=DELTA, overflow=chance)  # type: ignore[arg-type]
    assert ours > accounting.epsilon(**step, delta=DELTA) and ours >= independent(0.9, largest) * (1 - 1e-3)  # type: ignore[arg-type]
    assert accounting.epsilon(**step, delta=DELTA, overflow=0.01) == float("inf")  # type: ignore[arg-type]


def test_delta_includes_the_chance_of_a_cut() -> None:
    step = {"noise_multiplier": 1.0, "sample_rate": 0.05, "steps": 50, "epsilon": 3.0}
    more = accounting.delta(**step, overflow=1e-9) - accounting.delta(**step)  # type: ignore[arg-type]
    assert more == pytest.approx(50 * 1e-9 * (1 + np.exp(3.0)), rel=1e-6)


@pytest.mark.slow
def test_calibrated_noise_meets_the_target_by_the_independent_computation() -> None:
    chance = accounting.overflow(records=RECORDS, batch_size=BATCH, largest_batch=LEAST)
    z = accounting.noise_multiplier(
        target_epsilon=4.0, target_delta=DELTA, sample_rate=BATCH / RECORDS, steps=STEPS, overflow=chance
    )
    assert 3.97 < independent(z, LEAST) <= 4.005


def draws(largest: int | None, steps: int, seed: int = 0) -> list[list[int]]:
    sampler = PoissonBatches(
        torch.arange(40), expected_batch_size=10, randomness=SeededRandomness(seed), largest_batch=largest
    )
    return [[i for part in sampler.draw(step) for i in part.tolist()] for step in range(steps)]


def test_larger_draws_are_cut_to_a_uniform_part_of_them_and_others_are_not() -> None:
    whole, cut = draws(None, 4000), draws(10, 4000)
    left = np.zeros(40)
    for before, after in zip(whole, cut, strict=True):
        assert after == before if len(before) <= 10 else (len(after) == 10 and set(after) < set(before))
        left[after] += len(before) > 10
    assert np.ptp(left) < 8 * np.sqrt(left.mean())  # no record is left more often than another


@pytest.mark.slow
def test_a_run_states_its_adjacency_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, dataset="records") as ledger:
        run = finish(private(largest_batch=100, ledger=ledger))
        document = run.certificate()
        with pytest.raises(ValueError, match="a ledger of its own"):
            private(ledger=ledger, noise_multiplier=5.0, target_epsilon=None)
    assert document["adjacency"].startswith("zero out one record") and document["sampler"] == "truncated Poisson"
    assert examined(document)[1] is None and run.epsilon() <= 2.0 and "zeroed out" in repr(run)
    (event,) = ledgers.read(path).events
    assert event.overflow == document["overflow"] > 0
    for changed in ({"overflow": event.overflow / 2}, {"largest_batch": 90}):
        assert examined(sealed({**document, **changed}))[1] is not None
    without = {name: value for name, value in document.items() if name not in ("overflow", "largest_batch")}
    with pytest.raises(ValueError, match="mechanism"):
        examined(sealed(without))


def test_a_run_whose_draws_are_never_cut_does_not_cut_those_of_one_record_more_either() -> None:
    """It is accounted for records that are added or removed, and a cut to n of n + 1 moves the sum by up to 2 C."""
    run = private(largest_batch=120, batch_size=120, noise_multiplier=5.0, target_epsilon=None)
    assert run.largest_batch is None and run.certificate()["adjacency"].startswith("add or remove one record")


@pytest.mark.slow
def test_a_seeded_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = finish(private(seed=1, largest_batch=100))
    checkpoint.save(tmp_path / "state", finish(private(seed=1, largest_batch=100), 3).state_dict())
    resumed = private(seed=1, largest_batch=100)
    resumed.load_state_dict(checkpoint.load(tmp_path / "state"))
    assert torch.equal(weights(whole.model), weights(finish(resumed).model))
    with pytest.raises(ValueError, match="largest_batch"):
        private(seed=1).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest_batch": 31}, r"largest_batch=31 .* give \d+ or more"),
        ({"largest_batch": 0}, "largest_batch=0"),
        ({"largest_batch": 100, "method": methods.dp_pmlf(bands=2)}, "largest_batch=100 with noise of 2 bands"),
    ],
)
def test_what_is_not_argued_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(**options)


@pytest.mark.slow
def test_the_command_line_accounts_for_a_cut(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ("--records", "2000", "--batch-size", "100", "--steps", "50", "--epsilon", "4", "--delta", "1e-5")
    assert main(["account", *setting, "--largest-batch", str(LEAST), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["overflow"] < 1e-9 and 3.99 < found["epsilon"] <= 4.0
    assert main(["account", *setting, "--largest-batch", "110"]) == 2
    assert "--largest-batch" in capsys.readouterr().err


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 14.0, 20.0, 200.0])
def test_the_smallest_bound_is_the_smallest_by_a_sum_of_exact_terms(epsilon: float) -> None:
    """Above epsilon 12 the bound was n: the quantile of scipy's tail is n where the tail is below 1e-16."""
    records, size, steps, delta = 50_000, 1000, 400, 1e-5
    found = smallest_batch_bound(records=records, batch_size=size, steps=steps, epsilon=epsilon, delta=delta)
    log_q, log_rest = math.log(size / records), math.log1p(-size / records)

    def log_tail(largest: int) -> float:
        terms = [
            math.lgamma(records + 1) - math.lgamma(m + 1) - math.lgamma(records - m + 1)
            + m * log_q + (records - m) * log_rest
            for m in range(largest + 1, largest + 500)
        ]  # fmt: skip
        return float(special.logsumexp(terms))

    allowed = math.log(1e-3 * delta / steps) - math.log1p(math.exp(epsilon))
    assert log_tail(found) < allowed < log_tail(found - 1) + 2e-6


@pytest.mark.parametrize(
    "changed", [{"steps": 0}, {"records": 0}, {"epsilon": -1.0}, {"delta": 2.0}, {"batch_size": 200.0}]
)
def test_arguments_out_of_range_are_named(changed: dict[str, float]) -> None:
    usual = {"records": 100, "batch_size": 10, "steps": 4, "epsilon": 8.0, "delta": 1e-5}
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        smallest_batch_bound(**(usual | changed))  # type: ignore[arg-type]


def test_a_huge_target_needs_no_number_that_a_float_cannot_hold() -> None:
    assert smallest_batch_bound(records=1000, batch_size=100, steps=4, epsilon=1e6, delta=1e-5) <= 1000
