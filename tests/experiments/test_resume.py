"""Resumed runs: the same bits with a seed, every event counted without one, changed settings refused."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.optim.lr_scheduler import StepLR

import pmlf
from pmlf import data
from pmlf.cli.display import run_summary
from pmlf.evidence import ledger
from pmlf.experiments import runner, tasks
from pmlf.experiments.folder import RunFolder
from pmlf.experiments.results import SilentObserver
from pmlf.experiments.spec import MethodOptions, RunSpec
from pmlf.mechanism import accounting, noise
from pmlf.run.making import PrivateRun
from small_runs import finish, private, small

SPEC = RunSpec(
    model="linear",
    optimizer="adam",
    lr=0.01,
    ema=0.9,
    options=MethodOptions(k=3, a=(-0.7, -0.2), b=(0.05, 0.05)),
    steps=6,
    batch_size=20,
    noise_multiplier=1.0,
    seed=0,
)
BUDGETED = replace(SPEC, noise_multiplier=None, epsilon=2.0, seed=None)


class CutOff(BaseException):
    """Ends a run as a power cut does: nothing is cleaned up."""


class StopAfter(SilentObserver):
    def __init__(self, step: int, error: BaseException) -> None:
        self._step, self._error = step, error

    def stepped(self, step: int, training_loss: float | None) -> None:
        if step == self._step:
            raise self._error


class Refuse(SilentObserver):
    def started(self, spec: RunSpec, steps: int) -> None:
        raise AssertionError("nothing should be trained")


def cut_off(spec: RunSpec, out: Path, *, after: int, checkpoint_every: int = 2, shared: Path | None = None) -> None:
    with pytest.raises(CutOff):
        observer = StopAfter(after, CutOff())
        runner.run(spec, out, observer=observer, checkpoint_every=checkpoint_every, resume=True, ledger=shared)


def weights(out: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / name)


def same(first: Path, second: Path) -> bool:
    return all(
        torch.equal(weights(first, name)[key], value)
        for name in ("model.safetensors", "model-ema.safetensors")
        for key, value in weights(second, name).items()
    )


def events(out: Path) -> int:
    return sum(ledger.read(out / "ledger.jsonl").events.values())


def certificate(out: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((out / "certificate.json").read_text())
    return document


@pytest.mark.slow
def test_a_seeded_run_killed_several_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = runner.run(SPEC, tmp_path / "whole")
    for after in (1, 3, 3, 5):  # the second and the third time in the same place
        cut_off(SPEC, tmp_path / "cut", after=after)
    pieces = runner.run(SPEC, tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert pieces.evaluations == whole.evaluations and pieces.epsilon == whole.epsilon
    assert events(tmp_path / "cut") == 6  # a repeated step is the same event
    assert certificate(tmp_path / "cut")["reproducible_noise"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_spends_nothing_twice(tmp_path: Path) -> None:
    interrupted = runner.run(BUDGETED, tmp_path / "run", observer=StopAfter(4, KeyboardInterrupt()))
    assert interrupted.interrupted and events(tmp_path / "run") == 4
    result = runner.run(BUDGETED, tmp_path / "run", resume=True)
    assert (result.steps, result.interrupted, result.budget_spent) == (6, False, False)
    assert events(tmp_path / "run") == 6 and result.epsilon <= 2.0


@pytest.mark.slow
def test_a_run_resumes_after_its_folder_was_moved(tmp_path: Path) -> None:
    runner.run(SPEC, tmp_path / "whole")
    cut_off(SPEC, tmp_path / "begun", after=4)
    (tmp_path / "begun").rename(tmp_path / "moved")
    runner.run(SPEC, tmp_path / "moved", resume=True)
    assert same(tmp_path / "whole", tmp_path / "moved")
    assert events(tmp_path / "moved") == 6 and not (tmp_path / "begun").exists()


@pytest.mark.slow
def test_without_a_seed_lost_steps_are_charged_again_and_the_target_holds(tmp_path: Path) -> None:
    cut_off(BUDGETED, tmp_path / "run", after=5, checkpoint_every=4)
    result = runner.run(BUDGETED, tmp_path / "run", resume=True)
    assert events(tmp_path / "run") == 6 and result.steps == 5 and result.budget_spent
    assert result.epsilon <= 2.0
    assert certificate(tmp_path / "run")["released_steps"] == 6


@pytest.mark.slow
def test_no_key_of_noise_or_sampler_is_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []
    stream = noise.Stream.__init__

    def noted(self: noise.Stream, key: bytes) -> None:
        keys.append(key)
        stream(self, key)

    monkeypatch.setattr(noise.Stream, "__init__", noted)
    cut_off(BUDGETED, tmp_path / "run", after=5)
    assert len(keys) > 10
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert not any(key in content or key.hex().encode() in content for key in keys)


@pytest.mark.slow
def test_resume_starts_what_is_new_and_returns_what_is_finished(tmp_path: Path) -> None:
    first = runner.run(SPEC, tmp_path / "run", resume=True)
    again = runner.run(SPEC, tmp_path / "run", resume=True, observer=Refuse())
    assert replace(again, seconds=0) == replace(first, seconds=0)
    with pytest.raises(ValueError, match="already exists"):
        runner.run(SPEC, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "spec.json").write_text(SPEC.resolved(12_000).to_json())
    (out / "ledger.jsonl").write_text('{"ledger": 2, "data')
    (out / ".checkpoint.safetensors.partial").write_bytes(b"half")
    assert runner.run(SPEC, out, resume=True).steps == 6
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds neither a complete run nor a checkpoint"):
        runner.run(SPEC, tmp_path / "other", resume=True)
    (tmp_path / "other" / "thesis.tex").rename(tmp_path / "other" / ".thesis.tex")
    with pytest.raises(ValueError, match="holds neither a complete run nor a checkpoint"):
        runner.run(SPEC, tmp_path / "other", resume=True)
    assert (tmp_path / "other" / ".thesis.tex").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.5}, "`lr` is 0.5, but the run started with 0.01"),
        ({"seed": 1}, "`seed` is 1, but the run started with 0"),
        ({"max_physical_batch_size": 8}, "`max_physical_batch_size` is 8, but the run started with 256"),
        ({"options": MethodOptions(k=2)}, "`k` is 2, but the run started with 3"),
        ({"noise_multiplier": 2.0}, "`noise_multiplier` is 2.0, but the run started with 1.0"),
        ({"steps": 12}, "no target epsilon"),
    ],
)
def test_a_changed_setting_is_refused_by_name(tmp_path: Path, change: dict[str, object], said: str) -> None:
    cut_off(SPEC, tmp_path / "run", after=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=said):
        runner.run(replace(SPEC, **change), tmp_path / "run", resume=True)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.slow
def test_the_spec_is_the_checkpoint_s_whatever_is_written_beside_it(tmp_path: Path) -> None:
    whole = runner.run(SPEC, tmp_path / "whole")
    cut_off(SPEC, tmp_path / "run", after=3)
    written = (tmp_path / "run" / "spec.json").read_text()
    for changed in (written.replace('"lr": 0.01', '"lr": 9.0'), "[]", ""):
        (tmp_path / "run" / "spec.json").write_text(changed)
        cut_off(SPEC, tmp_path / "run", after=4)
        (tmp_path / "run" / "spec.json").write_text(changed)
    assert runner.run(SPEC, tmp_path / "run", resume=True).spec == whole.spec
    assert same(tmp_path / "whole", tmp_path / "run")
    assert (tmp_path / "run" / "spec.json").read_text() == written
    (tmp_path / "run" / "spec.json").write_text("[]")
    with pytest.raises(ValueError, match=r"is damaged|is not a spec"):
        runner.run(SPEC, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    cut_off(SPEC, tmp_path / "run", after=3)
    path = tmp_path / "run" / "checkpoint.safetensors"
    for part, name in (("progress", "threads"), ("run", "optimizer")):
        saved = pmlf.checkpoint.load(path)
        kept = saved[part].pop(name)
        pmlf.checkpoint.save(path, saved)
        with pytest.raises(ValueError, match=name):
            runner.run(SPEC, tmp_path / "run", resume=True)
        saved[part][name] = kept
        pmlf.checkpoint.save(path, saved)
    assert runner.run(SPEC, tmp_path / "run", resume=True).steps == 6


@pytest.mark.slow
def test_changed_records_are_refused(tmp_path: Path) -> None:
    cut_off(SPEC, tmp_path / "run", after=1)
    records = tasks.prepare(SPEC).train  # in memory, shared with later runs
    assert isinstance(records, data.ImageDataset)
    records.images[7, 0, 3, 3] += 1
    try:
        with pytest.raises(ValueError, match="the training records, their units or their order have changed"):
            runner.run(SPEC, tmp_path / "run", resume=True)
    finally:
        records.images[7, 0, 3, 3] -= 1
    assert runner.run(SPEC, tmp_path / "run", resume=True).steps == 6


@pytest.mark.slow
def test_the_digest_of_the_records_stays_in_the_checkpoint(tmp_path: Path) -> None:
    cut_off(SPEC, tmp_path / "run", after=1)
    keyed = [path.name for path in (tmp_path / "run").iterdir() if b"records_digest" in path.read_bytes()]
    assert keyed == ["checkpoint.safetensors"]
    runner.run(SPEC, tmp_path / "run", resume=True)
    assert not any(b"records_digest" in path.read_bytes() for path in (tmp_path / "run").iterdir())


@pytest.mark.slow
def test_a_ledger_that_lost_events_or_is_another_s_is_refused(tmp_path: Path) -> None:
    cut_off(SPEC, tmp_path / "run", after=4)
    path = tmp_path / "run" / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(ValueError, match="has 3 lines and had 4 when the state was saved: events are missing"):
        runner.run(SPEC, tmp_path / "run", resume=True)
    path.unlink()
    with pytest.raises(ValueError, match="events are missing"):
        runner.run(SPEC, tmp_path / "run", resume=True)
    cut_off(SPEC, tmp_path / "other", after=4)
    path.write_bytes((tmp_path / "other" / "ledger.jsonl").read_bytes())
    with pytest.raises(ValueError, match="is not the one that the saved state belongs to"):
        runner.run(SPEC, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_longer_plan_is_held_to_the_target_by_an_rdp_filter(tmp_path: Path) -> None:
    spec = replace(BUDGETED, records=600, batch_size=600, steps=12)
    cut_off(spec, tmp_path / "run", after=2, checkpoint_every=1)
    result = runner.run(replace(spec, steps=30), tmp_path / "run", resume=True)
    assert 2 < result.steps < 12 and result.budget_spent and result.planned_steps == 30
    spent = ledger.read(tmp_path / "run" / "ledger.jsonl").events
    (event,) = spent
    assert result.epsilon == accounting.filter_epsilon(spent, delta=1e-5) <= 2.0 == result.certified_epsilon
    assert accounting.filter_epsilon({event: spent[event] + 1}, delta=1e-5) > 2.0
    cut_off(spec, tmp_path / "late", after=11, checkpoint_every=1)
    with pytest.raises(ValueError, match="no room for another step"):
        runner.run(replace(spec, steps=30), tmp_path / "late", resume=True)
    assert runner.run(spec, tmp_path / "late", resume=True).steps == 11  # one step was lost


@pytest.mark.slow
def test_runs_that_share_a_ledger_share_a_budget(tmp_path: Path) -> None:
    shared = tmp_path / "fashion.ledger"
    spec = replace(BUDGETED, batch_size=600, max_physical_batch_size=700)
    first = runner.run(replace(spec, epsilon=1.0), tmp_path / "first", ledger=shared)
    second = runner.run(replace(spec, epsilon=3.0), tmp_path / "second", ledger=shared)
    assert not (tmp_path / "second" / "ledger.jsonl").exists()
    assert first.epsilon <= 1.0 < second.epsilon <= 3.0 and second.steps == 6
    assert second.epsilon == accounting.filter_epsilon(ledger.read(shared).events, delta=1e-5)
    assert second.certified_epsilon == 3.0 and first.certified_epsilon == first.epsilon
    said = "3 at delta 1e-05, for adding or removing one training record"
    assert f"{said}\n" in run_summary(second)
    cut = replace(second, spec=replace(second.spec, largest_batch=700))
    assert "for zeroing out one training record\n" in run_summary(cut)
    assert f"{said}; 1.5 spent so far" in run_summary(replace(second, epsilon=1.5))
    assert "1.5 spent at delta 1e-05; no epsilon is certified" in run_summary(
        replace(second, epsilon=1.5, certified_epsilon=None)
    )
    before = shared.read_bytes()
    with pytest.raises(ValueError, match=r"target_epsilon=2\.0 is spent already"):
        runner.run(replace(spec, epsilon=2.0), tmp_path / "third", ledger=shared)
    assert not (tmp_path / "third").exists() and shared.read_bytes() == before
    shared.write_bytes(before.replace(b'"step": 1}', b'"step": 7}', 1))
    with pytest.raises(ValueError, match=r"line 4 of the ledger .* is damaged"):
        runner.run(replace(spec, epsilon=9.0), tmp_path / "third", ledger=shared)
    assert not (tmp_path / "third").exists()


class FullDisk(SilentObserver):
    """After a step, no file can grow beyond a few bytes."""

    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, step: int, training_loss: float | None) -> None:
        if step == self._step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.slow
def test_a_full_disk_is_one_clear_error_and_the_run_resumes_when_there_is_room(tmp_path: Path) -> None:
    runner.run(SPEC, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"cannot be written \(File too large\)") as error:
            runner.run(SPEC, tmp_path / "run", observer=FullDisk(3), checkpoint_every=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoint.safetensors" in str(error.value) and "\n" not in str(error.value)
    assert runner.run(SPEC, tmp_path / "run", resume=True).steps == 6
    assert same(tmp_path / "whole", tmp_path / "run")


@contextmanager
def powerless() -> Iterator[None]:
    """Without root's right to write into read-only folders."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.slow
def test_a_read_only_folder_is_one_clear_error_and_the_checkpoint_is_intact() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        cut_off(SPEC, out, after=3)
        before = {path: path.read_bytes() for path in out.iterdir()}
        for path in (*out.iterdir(), out, Path(folder)):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with powerless():
            with pytest.raises(OSError, match=r"cannot be written \(Permission denied\)"):
                runner.run(SPEC, out, resume=True)
            with pytest.raises(OSError, match="Permission denied"):
                runner.run(SPEC, out.with_name("new"))
        assert {path: path.read_bytes() for path in out.iterdir()} == before
        for path in (Path(folder), out):
            path.chmod(0o755)
        assert runner.run(SPEC, out, resume=True).steps == 6


def own_loop(folder: Path, *, seed: int | None, until: int | None = None) -> PrivateRun:
    """A training loop with a checkpoint every second step."""
    path = folder / "checkpoint"
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.0, 0.9))
    with pmlf.Ledger(folder / "ledger", dataset="patients", run="a-name") as book:
        run = private(model, optimizer=optimizer, scheduler=StepLR(optimizer, 2, 0.5), seed=seed, ledger=book)
        if path.exists():
            run.load_state_dict(pmlf.checkpoint.load(path))
        for batch in run.batches():
            run.step(batch)
            if run.steps_done % 2 == 0:
                pmlf.checkpoint.save(path, run.state_dict())
            if run.steps_done == until:
                break
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, None])
def test_your_own_loop_resumes_from_its_checkpoint_and_ledger(tmp_path: Path, seed: int | None) -> None:
    (tmp_path / "whole").mkdir()
    whole = own_loop(tmp_path / "whole", seed=seed)
    own_loop(tmp_path, seed=seed, until=3)
    own_loop(tmp_path, seed=seed, until=5)
    run = own_loop(tmp_path, seed=seed)
    if seed is None:  # two steps of the six were lost
        assert run.steps_done == 4 and run.budget.run_events == 6
    else:
        assert run.steps_done == 6 and run.budget.run_events == 6
        assert all(map(torch.equal, run.model.parameters(), whole.model.parameters()))
    assert run.epsilon() == whole.epsilon() <= 2.0


def test_a_state_and_a_ledger_go_together(tmp_path: Path) -> None:
    with pmlf.Ledger(tmp_path / "ledger", dataset="patients") as book:
        run = private(ledger=book)
        with pytest.raises(ValueError, match="was saved without a ledger"):
            run.load_state_dict(finish(private(), until=2).state_dict())
        state = finish(run, until=2).state_dict()
    with pytest.raises(ValueError, match="was saved with a ledger"):
        private().load_state_dict(state)


def test_going_back_to_an_earlier_state_spends_again_without_a_seed() -> None:
    """In one process, without a ledger: what was released stays released."""
    run = finish(private(), until=2)
    state = run.state_dict()
    finish(run, until=5)
    run.load_state_dict(state)
    assert finish(run).steps_done == 3 and run.budget.run_events == 6 and run.epsilon() <= 2.0
    seeded = finish(private(seed=1), until=2)
    state = seeded.state_dict()
    finish(seeded, until=5)
    seeded.load_state_dict(state)
    assert finish(seeded).steps_done == 6 and seeded.budget.run_events == 6


def test_only_a_state_of_the_same_beginning_replays(tmp_path: Path) -> None:
    own_loop(tmp_path, seed=3, until=2)
    state = pmlf.checkpoint.load(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").unlink()
    with pmlf.Ledger(tmp_path / "ledger", dataset="patients", run="a-name") as book:
        with pytest.raises(ValueError, match="differ in seed: build the run with the same seed"):
            private(seed=4, ledger=book).load_state_dict(state)
        with pytest.raises(ValueError, match=r"the state has target_epsilon=2\.0"):
            private(seed=3, target_epsilon=2.5, ledger=book).load_state_dict(state)
        begun_anew = private(seed=3, max_physical_batch_size=4, ledger=book)  # as like as it may be, it is another run
        finish(begun_anew, until=2)
        assert begun_anew.budget.run_events == 4


@pytest.mark.slow
def test_a_seeded_run_resumes_with_its_micro_batches() -> None:
    whole = finish(private(seed=1, max_physical_batch_size=7))
    state = finish(private(seed=1, max_physical_batch_size=7), until=2).state_dict()
    for seed, size in ((1, 7), (None, 20)):
        run = private(seed=seed, max_physical_batch_size=20)
        run.load_state_dict(state if seed else finish(private(), until=2).state_dict())
        assert run.max_physical_batch_size == size
        if seed:
            assert all(map(torch.equal, finish(run).model.parameters(), whole.model.parameters()))


def test_a_step_interrupted_after_its_release_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = finish(private(), until=2)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.optimizer, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        finish(run)
    assert not run.between_steps and run.budget.run_events == 3
    with pytest.raises(RuntimeError, match="between its release and the optimizer"):
        run.state_dict()


@pytest.mark.slow
def test_resume_does_not_delete_the_folder_of_a_run_that_has_just_begun_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "spec.json").write_text(SPEC.to_json())
    with ledger.Ledger(out / "ledger.jsonl", dataset=SPEC.dataset):  # no event, no checkpoint, and a process at work
        with pytest.raises(ValueError, match="is in use by another run"):
            runner.run(SPEC, out, resume=True)
        assert sorted(entry.name for entry in out.iterdir()) == ["ledger.jsonl", "spec.json"]
    assert runner.run(SPEC, out, resume=True).steps == 6


def test_a_run_that_fails_leaves_a_shared_ledger_and_takes_its_own_away(tmp_path: Path) -> None:
    wrong = replace(SPEC, device="a device that is not there")
    shared = tmp_path / "patients.ledger"
    for given in (shared, None):
        with pytest.raises(ValueError, match="is not available"):
            runner.run(wrong, tmp_path / "run", ledger=given)
        assert not (tmp_path / "run").exists()
    assert ledger.read(shared, dataset=SPEC.dataset).events == {}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return found


def test_weights_that_are_shared_between_layers_are_written_at_the_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    run = finish(private(model, loss_fn=lambda m, b: m(b[0]).square().sum(1), ema=0.5))
    RunFolder(tmp_path).write_models(run)
    for name in ("model.safetensors", "model-ema.safetensors"):
        stored = safetensors.torch.load_file(tmp_path / name)
        assert set(stored) == set(model.state_dict()) and torch.equal(stored["one.weight"], stored["two.weight"])


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_ends_as_by_a_signal_and_goes_on(tmp_path: Path) -> None:
    asked: list[str | None] = [None, None, "SIGTERM"]
    stopped = runner.run(SPEC, tmp_path / "asked", asked_to_stop=lambda: asked.pop(0))
    assert stopped.steps == 3 and stopped.interrupted_by == stopped.signalled_by == "SIGTERM"
    runner.run(SPEC, tmp_path / "asked", resume=True)
    runner.run(SPEC, tmp_path / "whole")
    assert same(tmp_path / "asked", tmp_path / "whole")
