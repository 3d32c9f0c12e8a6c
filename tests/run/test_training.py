"""make_private and PrivateRun: the contract, its refusals, resuming, evaluation."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateRun, PrivateStep, methods
from pmlf.filters import FilterMemory
from small_runs import dataset, finish, loss, private, small, weights


@pytest.mark.slow
def test_the_ten_lines_of_the_contract_run() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = pmlf.make_private(
        model=model,
        optimizer=optimizer,
        dataset=dataset(),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        method=methods.dp_pmlf(k=2, beta=0.1, a=(-0.9,), b=(0.1,)),
        target_epsilon=1.0,
        target_delta=1e-3,
        batch_size=30,
        epochs=2,
        clip_norm=1.0,
        max_physical_batch_size=16,
        seed=None,
        scheduler=None,
        collate_fn=None,
        num_workers=0,
        device=None,
    )
    assert run.steps == 8 and run.steps_per_epoch == 4 and run.steps_done == 0 and run.epsilon() == 0.0
    spent = []
    for batch in run.batches():
        run.step(batch)
        spent.append(run.epsilon())
    assert run.steps_done == 8 and spent == sorted(spent) and 0.99 < spent[-1] <= 1.0
    certificate = json.loads(json.dumps(run.certificate()))
    assert certificate["records"] == 120 and certificate["sample_rate"] == 0.25
    assert certificate["epsilon_at_released_steps"]["pld"] == spent[-1]
    assert certificate["epsilon_at_released_steps"]["rdp"] >= spent[-1]
    assert certificate["planned_steps"] == certificate["released_steps"] == 8
    assert list(run.batches()) == []


def test_a_certificate_tells_the_planned_and_the_released_steps_apart() -> None:
    certificate = finish(private(), until=2).certificate()
    assert (certificate["planned_steps"], certificate["released_steps"]) == (6, 2)
    planned, released = certificate["epsilon_at_planned_steps"], certificate["epsilon_at_released_steps"]
    assert released["pld"] < planned["pld"] <= 2.0


@pytest.mark.slow
def test_steps_round_up_to_cover_the_epochs() -> None:
    assert private(steps=None, epochs=2, batch_size=50).steps == math.ceil(2 * 120 / 50)
    assert private(steps=None, epochs=3, batch_size=40).steps == 9
    assert private(steps=None, epochs=0.1, batch_size=1).steps == 12


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_whatever_the_micro_batches_and_none_differs() -> None:
    one, two = finish(private(seed=5)), finish(private(seed=5))
    assert torch.equal(weights(one.model), weights(two.model))
    pieces = finish(private(seed=5, max_physical_batch_size=100))
    torch.testing.assert_close(weights(one.model), weights(pieces.model), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(one.model), weights(finish(private(seed=6)).model))
    assert not torch.equal(weights(finish(private()).model), weights(finish(private()).model))
    assert one.certificate()["reproducible_noise"] and not private().certificate()["reproducible_noise"]


@pytest.mark.slow
def test_workers_and_collate_function_change_nothing() -> None:
    plain = finish(private(seed=5))
    loaded = finish(private(seed=5, num_workers=1, collate_fn=torch.utils.data.default_collate))
    assert torch.equal(weights(plain.model), weights(loaded.model))


@pytest.mark.slow
def test_learning_happens_and_empty_batches_are_steps() -> None:
    options = {"batch_size": 200, "steps": 60, "target_epsilon": 8.0, "target_delta": 1e-4}
    run = finish(private(dataset=dataset(2000), seed=1, max_physical_batch_size=300, **options))
    assert pmlf.evaluate(run.model, dataset(2000)) > 0.9
    rare = finish(private(batch_size=0.5, steps=20, seed=1))
    assert rare.steps_done == 20


def test_a_batch_is_stepped_once_in_order_and_only_if_issued() -> None:
    run, other = private(seed=1), private(seed=1)
    batches = run.batches()
    first = next(batches)
    foreign = next(other.batches())
    for wrong in (foreign, [torch.zeros(3, 5)], None):
        with pytest.raises(ValueError, match=r"was not issued by run\.batches"):
            run.step(wrong)  # type: ignore[arg-type]
    run.step(first)
    with pytest.raises(ValueError, match="used already"):
        run.step(first)
    skipped = next(batches)
    with pytest.raises(RuntimeError, match="step 1 was drawn but not stepped"):
        next(batches)
    with pytest.raises(ValueError, match="was not issued"):
        run.step(first)
    assert run.steps_done == 1 and not skipped.used
    read = next(run.batches())
    list(read)
    with pytest.raises(ValueError, match="used already"):
        run.step(read)


class Numbered(TensorDataset):
    """Remembers which records were asked for."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.asked: list[int] = []
        self.broken: type[BaseException] | None = None

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if self.broken is not None:
            raise self.broken
        return super().__getitem__(index)


def asked_for(records: Numbered, action: Callable[[], object]) -> list[int]:
    records.asked.clear()
    action()
    return list(records.asked)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("opened", [False, True])
def test_a_draw_cannot_be_drawn_again_until_a_wanted_record_is_in(seed: int | None, opened: bool) -> None:
    """By asking for batches anew, after looking at the records or not, or by a round trip of the state."""
    records = Numbered(*dataset().tensors)
    run = private(dataset=records, batch_size=4, seed=seed)
    for _ in range(3):
        draws = set()
        for trial in range(6):
            batch = next(run.batches())
            if opened:
                draws.add(tuple(asked_for(records, lambda batch=batch: list(batch))))
            if trial % 2:
                run.load_state_dict(run.state_dict())
        stepped = asked_for(records, lambda: run.step(next(run.batches())))
        assert not draws or draws == {tuple(stepped)}


def test_a_step_that_failed_is_taken_again_with_the_same_records_and_no_others() -> None:
    """Whoever decides to try again can have seen which records made it fail."""
    records = Numbered(*dataset().tensors)
    run = private(dataset=records)
    run.step(next(run.batches()))
    before = []
    for stop in (OSError, KeyboardInterrupt, OSError):
        records.broken = stop
        with pytest.raises(stop):
            run.step(next(run.batches()))
        before.append(records.asked[-1])
    records.broken = None
    stepped = asked_for(records, lambda: run.step(next(run.batches())))
    assert run.steps_done == 2 and before == [stepped[0]] * 3
    assert asked_for(records, lambda: run.step(next(run.batches()))) != stepped


def test_a_run_is_neither_copied_nor_pickled_and_its_step_copies_with_the_model() -> None:
    run = private()
    for one_of_a_kind in (run, run.budget):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(one_of_a_kind)
    model, step = copy.deepcopy((run.model, run.private_step))
    assert step.model is model is not run.model


@pytest.mark.parametrize("by", ["environment", "group"])
def test_one_of_several_processes_is_refused_before_anything_is_drawn(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("WORLD_SIZE", "4")
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr("pmlf.mechanism.noise.os.urandom", lambda count: pytest.fail("something was drawn"))
    with pytest.raises(ValueError, match="is called in one of 4 processes"):
        private(group=None)


def test_a_single_process_may_be_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert private().steps_done == 0


def test_samples_that_the_sampler_did_not_draw_are_refused() -> None:
    run = private(seed=1)
    batches = run.batches()
    batch = next(batches)
    run.private_step.accumulate((torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(RuntimeError, match=r"accumulated outside run\.step"):
        run.step(batch)
    run.private_step.discard()
    run.step(batch)
    assert run.steps_done == 1


def test_the_mechanism_cannot_be_changed_on_the_way() -> None:
    run = private(seed=1)
    names = ("noise_multiplier", "clip_norm", "expected_batch_size", "clipping", "method", "randomness")
    plan = run.budget.plan
    others = [(run, "steps"), (run.budget, "plan"), (plan, "delta"), (plan, "target_epsilon"), (plan, "event")]
    for owner, name in [(run.private_step, name) for name in names] + others:
        with pytest.raises(AttributeError):
            setattr(owner, name, getattr(owner, name))


def test_a_failing_step_spends_nothing_and_the_run_goes_on() -> None:
    fail = True

    def sometimes(model: Any, batch: Any) -> torch.Tensor:
        if fail:
            raise RuntimeError("out of memory")
        return loss(model, batch)

    run = private(seed=2, loss_fn=sometimes)
    before = weights(run.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.step(next(run.batches()))
    assert run.steps_done == 0 and run.epsilon() == 0.0 and torch.equal(weights(run.model), before)
    fail = False
    assert torch.equal(weights(finish(run).model), weights(finish(private(seed=2)).model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* has a momentum of")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_resume_from_state_yields_identical_results(optimizer: str) -> None:
    def start() -> PrivateRun:
        model = small()
        made: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.05)
            if optimizer == "adam"
            else torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        method = methods.dp_pmlf(k=3, beta=0.5, a=(-0.7, -0.2), b=(0.05, 0.05))
        return private(model, optimizer=made, scheduler=scheduler, method=method, seed=9)

    whole = finish(start())
    cut = finish(start(), until=3)
    state = cut.state_dict()
    finish(cut)  # a saved state does not follow the run
    for _ in range(2):  # and loading it does not tie it to the run that goes on from it
        resumed = start()
        resumed.load_state_dict(state)
        assert resumed.steps_done == 3
        assert torch.equal(weights(finish(resumed).model), weights(whole.model))


def test_a_state_of_another_mechanism_is_refused_by_name() -> None:
    state = finish(private(seed=1), until=1).state_dict()
    with pytest.raises(ValueError, match=r"the state has clip_norm=1\.0 and this run has 2\.0"):
        private(clip_norm=2.0).load_state_dict(state)
    with pytest.raises(ValueError, match="expected_batch_size"):
        private(batch_size=20, noise_multiplier=None).load_state_dict(state)


def test_the_state_holds_nothing_drawn_and_no_key() -> None:
    run = finish(private(), until=2)
    batch = next(run.batches())
    text = str(run.state_dict())
    assert "seed" not in text and "key" not in text and batch is not None


def test_evaluation_restores_the_mode_and_needs_no_gradient() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(5, 2))
    accuracies = {pmlf.evaluate(model, dataset(), batch_size=50) for _ in range(3)}
    assert len(accuracies) == 1 and model.training
    x, y = dataset().tensors
    with torch.no_grad():
        expected = float((model.eval()(x).argmax(-1) == y).float().mean())
    assert accuracies.pop() == pytest.approx(expected)
    with pytest.raises(ValueError, match="the dataset is empty"):
        pmlf.evaluate(model, [])


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(small().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_epsilon": 0.0}, "epsilon=0.0"),
        ({"target_epsilon": -1.0}, "epsilon=-1.0"),
        ({"target_epsilon": float("nan")}, "epsilon=nan"),
        ({"target_delta": 0.0}, r"target_delta=0.0 is not in \(0, 1\)"),
        ({"target_delta": 1.0}, r"target_delta=1.0 is not in \(0, 1\)"),
        ({"batch_size": 121}, r"batch_size=121 is not in \(0, 120\]"),
        ({"batch_size": 0}, "batch_size=0 is not"),
        ({"steps": 0}, "steps=0 is not a whole number"),
        ({"steps": None, "epochs": 0.0}, "epochs=0.0 is not positive"),
        ({"epochs": 1.0}, "give epochs or steps"),
        ({"noise_multiplier": 1.0}, "give target_epsilon or noise_multiplier"),
        ({"target_epsilon": None, "noise_multiplier": 0.0}, "noise_multiplier=0.0 is not positive"),
        ({"dataset": TensorDataset(torch.zeros(0, 5))}, "the dataset is empty"),
        ({"optimizer": other_optimizer()}, "the optimizer holds parameters that are not the model's"),
        ({"seed": 1.5}, "seed=1.5 is not a whole number"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"),
        ({"method": "pmlf"}, "method='pmlf' is not known"),
    ],
)
def test_bad_input_is_one_clear_sentence_and_nothing_is_trained(options: Any, message: str) -> None:
    model = small()
    before = weights(model)
    with pytest.raises(ValueError, match=message) as error:
        private(model, **options)
    assert "\n" not in str(error.value)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("where", [(PrivateStep, "release"), (FilterMemory, "apply")], ids=["before it", "in it"])
def test_an_interrupted_release_is_counted_and_the_way_out_is_named(where: tuple[type, str]) -> None:
    run = finish(private(), until=2)
    saved = run.state_dict()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(run)
    assert run.budget.run_events == 3
    with pytest.raises(RuntimeError, match="a release was interrupted, and its event is spent: load a saved state"):
        finish(run)
    run.load_state_dict(saved)
    assert finish(run).steps_done == 5 and run.budget.run_events == 6  # the lost one was paid for


def test_a_scheduler_that_follows_the_loss_is_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        private(model, optimizer=optimizer, scheduler=plateau)


def test_a_large_delta_warns() -> None:
    with pytest.warns(UserWarning, match="target_delta=0.01 is not below 1/n"):
        private(target_delta=0.01)


def test_noise_is_calibrated_to_the_run() -> None:
    run = private(target_epsilon=3.0, steps=11)
    assert pmlf.accounting.epsilon(
        noise_multiplier=run.private_step.settings.noise_multiplier, sample_rate=0.25, steps=11, delta=1e-3
    ) == pytest.approx(3.0, rel=0.01)


@pytest.mark.slow
def test_samples_are_numbered_by_their_index_for_augmentation() -> None:
    """A record has the same uniforms in one step, however the draw is cut into micro-batches."""

    def uniforms_of_each_record(physical: int) -> dict[float, set[float]]:
        seen: dict[float, set[float]] = {}

        def record(batch: Any, uniforms: torch.Tensor) -> Any:
            for row, value in zip(batch[0][:, 0].tolist(), uniforms[:, 0].tolist(), strict=True):
                seen.setdefault(row, set()).add(value)  # those of checks too
            return batch

        augmentation = pmlf.Augmentation(function=record, draws=1)
        finish(private(seed=4, steps=1, max_physical_batch_size=physical, augmentation=augmentation))
        return seen

    three, fifty = uniforms_of_each_record(3), uniforms_of_each_record(50)
    common = [three[row] & fifty[row] for row in three]
    assert set(three) == set(fifty) and len(common) > 10 and all(common)
    assert np.std([value for values in common for value in values]) > 0.1


def test_hardened_noise_is_part_of_the_mechanism_and_named_in_the_certificate() -> None:
    plain, hardened = finish(private(seed=5)), finish(private(seed=5, secure_noise=True))
    assert not torch.equal(weights(plain.model), weights(hardened.model))
    assert "half the sum of four" in hardened.certificate()["randomness"]
    assert "half the sum of four" not in plain.certificate()["randomness"]
    with pytest.raises(ValueError, match="secure_noise"):
        private(seed=5).load_state_dict(hardened.state_dict())
