"""Runs with shaped noise: cyclic draws, events by group, secret memory, resuming, and the certificate."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import Ledger, PrivateRun, accounting, checkpoint, methods, shapes
from pmlf.evidence import ledger as ledgers
from pmlf.evidence.certificate import examined, sealed
from pmlf.evidence.certificate_page import page
from pmlf.filters import FilterMemory, LowPass
from pmlf.mechanism.noise import SecureRandomness, SeededRandomness
from pmlf.sampling import LogicalBatch, PoissonBatches

RECORDS, BATCH, BANDS, STEPS = 60, 6, 4, 14
INPUTS = torch.randn(RECORDS, 3, generator=torch.Generator().manual_seed(0))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def start(seed: int | None = None, steps: int = STEPS, records: int = RECORDS, **more: Any) -> PrivateRun:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    dataset = TensorDataset(INPUTS[:records], (INPUTS[:records, 0] > 0).long())
    usual = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "dataset": dataset}
    given = usual | {"target_epsilon": 3.0, "method": methods.dp_pmlf(bands=BANDS)} | more
    return pmlf.make_private(
        loss_fn=losses,
        target_delta=1e-4,
        batch_size=BATCH,
        steps=steps,
        seed=seed,
        **given,
    )


def go(run: PrivateRun, steps: int = STEPS) -> PrivateRun:
    for batch in run.batches():
        run.step(batch)
        if run.steps_done == steps:
            break
    return run


def weights(run: PrivateRun) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


# --- what is spent


def test_a_run_says_that_it_draws_from_groups_in_turn() -> None:
    assert "Poisson from 4 groups in turn, 6 of 60 records expected" in repr(start())


@pytest.mark.slow
def test_a_run_is_accounted_for_by_the_steps_that_a_record_can_be_in() -> None:
    run = go(start())
    z, rate, events = run.private_step.settings.noise_multiplier, BANDS * BATCH / RECORDS, math.ceil(STEPS / BANDS)
    assert run.epsilon() == accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=events, delta=1e-4)
    assert 2.99 < run.epsilon() <= 3.0 and (run.budget.run_steps, run.budget.run_events) == (STEPS, events)


def test_steps_count_for_their_own_group_alone() -> None:
    run, events = start(), []
    for batch in run.batches():
        run.step(batch)
        events.append(run.budget.run_events)
    assert events == [1 + step // BANDS for step in range(STEPS)]


@pytest.mark.slow
def test_repeated_steps_count_again_and_the_budget_ends_before_a_group_has_too_many() -> None:
    run = go(start(), 9)
    state = run.state_dict()
    go(run, 12)  # groups 1, 2, 3 take their third step
    run.load_state_dict(state)
    go(run)
    assert run.budget.run_events <= math.ceil(STEPS / BANDS) and run.epsilon() <= 3.0
    assert run.steps_done == 13  # step 13 would be the fifth of group 1: it was 1, 5, 9 twice, 13
    other = start()
    other.load_state_dict(run.state_dict())
    assert other.budget.run_events == run.budget.run_events and other.budget.run_steps == run.budget.run_steps


def test_a_ledger_counts_events_by_group(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, dataset="records", run="first") as ledger:
        run = go(start(ledger=ledger), 6)
        state = run.state_dict()
        go(run, 9)
    with Ledger(path, dataset="records", run="first") as ledger:
        run = start(ledger=ledger)
        run.load_state_dict(state)
        go(run, 10)
        assert run.budget.run_events == 4  # group 2: steps 2, 6, 6 again; group 0: 0, 4, 8, 8 again
    tally = ledgers.read(path)
    assert sum(tally.events.values()) == 4 and sum(tally.starts.values()) == 9 + 4


@pytest.mark.slow
def test_a_ledger_of_white_noise_is_written_as_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, dataset="records") as ledger:
        go(start(ledger=ledger, method="dp-pmlf"), 2)
    assert "bands" not in path.read_text()


# --- resuming


@pytest.mark.slow
def test_a_seeded_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = go(start(seed=1))
    checkpoint.save(tmp_path / "state", go(start(seed=1), 6).state_dict())
    resumed = start(seed=1)
    resumed.load_state_dict(checkpoint.load(tmp_path / "state"))
    assert torch.equal(weights(go(resumed)), weights(whole))


def test_an_unseeded_run_resumes_with_new_groups_and_an_empty_memory(tmp_path: Path) -> None:
    run = go(start(), 6)
    checkpoint.save(tmp_path / "state", run.state_dict())
    resumed = start()
    resumed.load_state_dict(checkpoint.load(tmp_path / "state"))
    assert run.private_step._noise.memory.vectors == BANDS - 1 and resumed.private_step._noise.memory.vectors == 0
    groups = [[each._sampler.eligible(step).tolist() for step in range(BANDS)] for each in (run, resumed)]
    assert groups[0] != groups[1]
    assert go(resumed).budget.run_events == 2 + 2  # of 6 and of 8 steps in four groups


def test_going_back_to_a_state_empties_the_memory() -> None:
    run = go(start(), 6)
    run.load_state_dict(run.state_dict())
    assert run.private_step._noise.memory.vectors == 0


def test_a_copy_of_a_step_does_not_share_the_memory() -> None:
    step = go(start(), 6).private_step
    assert copy.deepcopy(step)._noise.memory.vectors == 0 and step._noise.memory.vectors == BANDS - 1


def shuffled(seed: int) -> TensorDataset:
    order = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(INPUTS[order], (INPUTS[order, 0] > 0).long())


def test_a_resumed_run_pays_for_the_most_turns_of_any_record_also_in_another_order(tmp_path: Path) -> None:
    """Groups that were kept let one record be in 15 of 16 steps where 4 events were claimed, if its place changed."""
    turns: Counter[float] = Counter()
    state: dict[str, Any] | None = None
    for process in range(5):
        with Ledger(tmp_path / "ledger", dataset="records", run="one") as ledger:
            run = start(dataset=shuffled(process), ledger=ledger, target_epsilon=20.0)
            if state is not None:
                run.load_state_dict(checkpoint.load(tmp_path / "state"))
            for batch in run.batches():
                members = run._sampler.eligible(batch.step)
                turns.update(run._sampler._records.dataset.tensors[0][members, 0].tolist())  # type: ignore[attr-defined]
                run.step(batch)
                if run.steps_done % 3 == 0:
                    break
            state = run.state_dict()
            checkpoint.save(tmp_path / "state", state)
            events = run.budget.run_events
            assert max(turns.values()) <= events and run.private_step.events == events
            assert examined(run.certificate())[1] is None
    assert run.steps_done == STEPS - 2 + 2 * (run.steps_done == STEPS) and events >= math.ceil(STEPS / BANDS)


def test_a_run_that_goes_back_in_its_process_keeps_its_groups() -> None:
    run = go(start(target_epsilon=20.0), 6)
    state = run.state_dict()
    before = run.budget.run_events
    run.load_state_dict(state)
    go(run, 8)
    assert run.budget.run_events == before == 2  # steps 6 and 7 are the second turns of groups 2 and 3


def own_step(bands: int = BANDS, seed: int | None = None) -> pmlf.PrivateStep:
    return pmlf.PrivateStep(
        nn.Linear(3, 2),
        losses,
        method=methods.lp_dpsgd(bands=bands) if bands > 1 else "lp-dpsgd",
        noise_multiplier=2.0,
        expected_batch_size=BATCH,
        cycle=bands,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def own_sampler(cycle: int = BANDS, seed: int | None = None) -> PoissonBatches:
    randomness = SecureRandomness() if seed is None else SeededRandomness(seed)
    dataset = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())
    return PoissonBatches(
        dataset, expected_batch_size=BATCH, randomness=randomness, cycle=cycle, max_physical_batch_size=3
    )


def take(step: pmlf.PrivateStep, batch: LogicalBatch) -> None:
    for micro_batch in batch:
        step.accumulate(micro_batch)
    step.release(batch)


def test_no_step_of_shaped_noise_may_be_left_out() -> None:
    """With every seventh step left out, a group was back in fewer than b releases: 10.5 where 9.2 was claimed."""
    step, sampler = own_step(), own_sampler()
    batches = sampler.batches(0, 20)
    for _ in range(3):
        take(step, next(batches))
    with pytest.raises(ValueError, match="batch is missing"):
        step.release()
    next(batches)  # left out
    with pytest.raises(ValueError, match=r"the batch is of step 4, and step 3 is due: .* from batches\(3, steps\)"):
        take(step, next(batches))
    assert step.releases == 3 and not step.pending
    take(step, next(sampler.batches(3, 20)))
    with pytest.raises(ValueError, match="the batch is of step 3, and step 4 is due"):
        take(step, next(sampler.batches(3, 20)))


@pytest.mark.parametrize("cycle", [1, BANDS])
def test_a_batch_that_is_taken_again_after_an_error_counts_each_sample_once(cycle: int) -> None:
    """Samples from before the error stayed in the sum, and moved it by 2 C when the batch was taken again."""
    step, sampler = own_step(cycle), own_sampler(cycle)
    number = next(t for t in range(99) if sum(map(len, sampler.draw(t))) > 3)  # more than one micro-batch
    batch = next(sampler.batches(number, number + 1))
    step.accumulate(next(iter(batch)))  # and then an error
    with pytest.raises(ValueError, match="does not have as many samples as its batch"):
        take(step, next(sampler.batches(number, number + 1)))
    assert not step.pending and step.releases == 0
    take(step, next(sampler.batches(number, number + 1)))
    assert step.releases == 1


@pytest.mark.parametrize("cycle", [1, 2])
def test_a_sampler_with_another_cycle_is_refused(cycle: int) -> None:
    with pytest.raises(ValueError, match=f"drawn with cycle={cycle} and this step has cycle=4"):
        take(own_step(), next(own_sampler(cycle).batches(0, 9)))


def test_a_new_sampler_begins_a_new_block_and_its_turns_add_up() -> None:
    step = own_step()
    for _ in range(3):
        for batch in own_sampler().batches(0, 5):
            take(step, batch)
            assert step._noise.memory.vectors == min(batch.step + 1, BANDS - 1)
    assert step.releases == 15 and step.events == 6  # two turns of the first group, three times
    other = own_step()
    other.load_state_dict(step.state_dict())
    assert other.events == 6


@pytest.mark.parametrize("cycle", [1, BANDS])
def test_a_draw_is_for_one_release(cycle: int) -> None:
    """Two releases with one draw were counted as two events, and cost more: 2.68 where 1.20 was claimed."""
    step, sampler = own_step(cycle), own_sampler(cycle)
    state, drawn = step.state_dict(), []
    for _ in range(2):
        for number in range(4):
            drawn.append([chunk.tolist() for chunk in sampler.draw(number)])
            take(step, next(sampler.batches(number, 20)))
        step.load_state_dict(state)
    assert drawn[:4] != drawn[4:] and step.events == 8 // cycle
    batch = next(sampler.batches(0, 20))
    samples = list(batch)
    for _ in range(2):
        for micro_batch in samples:
            step.accumulate(micro_batch)
        if not batch.released:
            step.release(batch)
    with pytest.raises(ValueError, match="was released already"):
        step.release(batch)


def test_events_of_a_copy_and_of_a_loaded_state_are_added() -> None:
    step, sampler = own_step(), own_sampler()
    for batch in sampler.batches(0, 4):
        take(step, batch)
    beside = copy.deepcopy(step)
    assert beside.events == 1
    for each in (step, beside):
        for batch in sampler.batches(4, 8):
            take(each, batch)
    step.load_state_dict(beside.state_dict())
    assert step.events == 4  # of the copy 2, which has the first once more
    state = step.state_dict()
    step.load_state_dict(state)
    assert step.events == 4


def test_a_release_that_is_interrupted_is_counted() -> None:
    step, sampler = own_step(1), own_sampler(1)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilterMemory, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take(step, next(sampler.batches(0, 5)))
    assert step.events == 1 and step.releases == 0


def test_a_shaped_run_without_a_target_ends_at_its_planned_events_and_keeps_its_certificate() -> None:
    run = go(start(target_epsilon=None, noise_multiplier=1.5), 5)
    resumed = start(target_epsilon=None, noise_multiplier=1.5)
    resumed.load_state_dict(run.state_dict())
    go(resumed)
    document = resumed.certificate()
    assert resumed.budget.run_events == math.ceil(STEPS / BANDS) and resumed.steps_done < STEPS
    assert document["epsilon"] is not None and examined(document)[1] is None


def test_an_epoch_that_is_left_early_is_an_error_with_bands_too() -> None:
    run = start(steps=16)
    with pytest.raises(RuntimeError, match="steps left"):
        for epoch in run.epochs():
            for batch in epoch:
                run.step(batch)
                if run.steps_done == 13:
                    break


def test_seeded_noise_goes_on_with_its_own_groups_only() -> None:
    step = own_step(seed=1)
    for batch in own_sampler(seed=1).batches(0, 3):
        take(step, batch)
    with pytest.raises(ValueError, match="drawn from other groups"):
        take(step, next(own_sampler(seed=2).batches(3, 9)))
    resumed = own_step(seed=1)
    resumed.load_state_dict(step.state_dict())
    with pytest.raises(ValueError, match="the batch is of step 5, and step 3 is due"):
        take(resumed, next(own_sampler(seed=1).batches(5, 9)))
    take(resumed, next(own_sampler(seed=1).batches(3, 9)))


def test_a_step_goes_on_with_its_own_shape_only() -> None:
    saved = own_step(8).state_dict()
    with pytest.raises(ValueError, match="the state has noise of 8 bands"):
        own_step(2).load_state_dict(saved)
    own_step(8).load_state_dict(saved)
    with pytest.raises(ValueError, match="the state has no 'method'"):
        own_step().load_state_dict({})


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize("seed", [None, 1])
def test_no_state_contains_noise(seed: int | None) -> None:
    run = go(start(seed), 6)
    secret = [tensor for vector in run.private_step._noise.memory._past for tensor in vector]
    assert len(secret) == 2 * (BANDS - 1)
    for tensor in tensors_in(run.state_dict()):
        assert not any(tensor.shape == other.shape and torch.allclose(tensor, other) for other in secret)


def test_the_noise_of_a_float64_model_has_the_digits_of_float64() -> None:
    model = nn.Linear(50, 2, dtype=torch.float64)
    method = methods.Method(name="shaped", points=methods.dpsgd().points, low_pass=LowPass(), noise=shapes.banded(4))
    mechanism = {"noise_multiplier": 1.0, "expected_batch_size": 1.0}
    step = pmlf.PrivateStep(model, losses, method=method, cycle=4, **mechanism)  # type: ignore[arg-type]
    for t in range(6):  # of empty batches: noise with float32's digits would show any sum that it is added to
        step.release(LogicalBatch.whole(t, samples=0, cycle=4))
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        assert (gradient.float().double() == gradient).sum() <= 1


# --- sensitivity through the whole stream


UNITS = np.concatenate([np.zeros(12, int), 1 + np.arange(48) % 29])  # unit 0 has 12 records, the others 1 or 2


@pytest.mark.parametrize("units", [None, UNITS], ids=["record", "unit"])
def test_the_parts_of_one_record_or_unit_in_shape_times_sums_are_short_and_orthogonal(units: Any) -> None:
    """Leave one out, with the same draws of the others: the proof's two claims, through the real step."""
    run = start(noise_multiplier=1.0, target_epsilon=None, units=units)
    sampler, shape = run._sampler, run.private_step.settings.method.noise
    owner = np.arange(RECORDS) if units is None else units
    one = int(sampler.eligible(1)[0]) if units is None else 0
    group = next(step for step in range(BANDS) if one in sampler.eligible(step))
    differences = []
    for batch in run.batches():
        drawn = np.concatenate([np.zeros(0, int), *sampler.draw(batch.step)])
        others = drawn[owner[drawn] != one]
        joined = np.flatnonzero(owner == one) if batch.step % BANDS == group else others[:0]
        assert len(joined) or len(others) == len(drawn)  # no other step draws it
        sums = []
        for indices in (np.concatenate([joined, others]), others):
            if len(indices):
                rows = torch.from_numpy(indices)
                whose = {} if units is None else {"units": units[indices]}
                run.private_step.accumulate((INPUTS[rows], (INPUTS[rows, 0] > 0).long()), **whose)
            total = run.private_step.sensitive_sum()
            size = weights(run).shape
            sums.append(torch.zeros(size) if total is None else torch.cat([v.flatten() for v in total.values.values()]))
            run.private_step.discard()
        differences.append((sums[0] - sums[1]).double().numpy())
        run.step(batch)
    matrix, parts = shape.matrix(STEPS), np.stack(differences)
    taken = [step for step in range(STEPS) if np.linalg.norm(parts[step]) > 0]
    assert taken == list(range(group, STEPS, BANDS))
    images = [matrix[:, [step]] * parts[step] for step in taken]
    for place, image in enumerate(images):
        assert np.linalg.norm(image) <= 1 + 1e-4
        assert all(np.sum(image * other) == 0.0 for other in images[:place])


# --- certificate


def test_the_certificate_states_shape_sampling_and_argument_and_holds() -> None:
    document = go(start()).certificate()
    assert examined(document)[1] is None
    assert document["sampler"] == "cyclic Poisson, 4 groups" and "at most once in 4 steps" in document["mechanism"]
    assert len(document["method"]["noise_shape"]) == BANDS and document["sample_rate"] == BANDS * BATCH / RECORDS
    assert "p = 4 B/n" in page(document) and "cyclic Poisson" in page(document)


@pytest.mark.parametrize("bands", [(1, 4), (4, 1), (4, 2), (2, 4), (4, 4)])
def test_certificates_of_runs_with_as_many_steps_on_one_ledger_hold(bands: tuple[int, int], tmp_path: Path) -> None:
    """The events of the white run were taken for those of the shaped one, whose certificate then did not hold."""
    for number, each in enumerate(bands):
        with Ledger(tmp_path / "ledger", dataset="records", run=f"run {number}") as ledger:
            run = go(start(method=methods.lp_dpsgd(bands=each), ledger=ledger, target_epsilon=4.0 + 4 * number))
            document = run.certificate()
        assert examined(document)[1] is None
        assert document.get("released_events", STEPS) == math.ceil(STEPS / each)


@pytest.mark.parametrize(
    "change", ["shape", "unstable shape", "bands", "events", "released events", "sampler", "white"]
)
def test_a_certificate_that_contradicts_itself_does_not_hold(change: str) -> None:
    document = copy.deepcopy(go(start()).certificate())
    if change == "shape":
        document["method"]["noise_shape"][0] *= 2
    elif change == "unstable shape":
        document["method"]["noise_shape"] = [0.0, 0.5, 0.5, 0.5]
    elif change == "released events":
        document["released_events"] -= 1
    elif change == "bands":
        document["trials"][0]["bands"] = 7
    elif change == "events":
        document["trials"][0]["events"] = 3
    elif change == "sampler":
        document["sampler"] = "Poisson"
    else:
        del document["method"]["noise_shape"]
    with contextlib.suppress(ValueError):  # not a certificate that this version can check
        assert examined(sealed(document))[1] is not None


# --- refusals


def test_batches_larger_than_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bands=16 at a sampling rate of 0\.1"):
        start(method=methods.dp_pmlf(bands=16))


def test_a_state_of_another_shape_is_refused() -> None:
    state = go(start(), 3).state_dict()
    with pytest.raises(ValueError, match="method"):
        start(method="dp-pmlf").load_state_dict(state)
