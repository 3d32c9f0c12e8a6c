"""The audit of your own model: in a correct one a record moves the sum by at most C; broken ones are refuted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from pmlf import audit, data, methods, models
from pmlf.audit.neighbours import AuditedModel, Releases, RunRandomness
from pmlf.basics.batches import tensors_of
from pmlf.cli.main import main

LIMIT = 1 + 1e-4
SEARCH = audit.ModelSettings(restarts=2, tries=12, runs=0, seed=0)


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


class DropPath(nn.Module):
    """Drops whole samples twice, with one random number per sample: the second draws depend on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def dropped(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.8) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropped(torch.relu(self.first(self.dropped(x)))))


class MixedFromFourOn(DropPath):
    """Random, and centred over the batch in training mode if it has four samples or more."""

    def dropped(self, x: Tensor) -> Tensor:
        x = super().dropped(x)
        return x - x.mean(0) if self.training and len(x) >= 4 else x


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)
    )


def without_checks(audited: AuditedModel) -> AuditedModel:
    return audited.without_checks()


UNCHECKED = audit.ModelControl(name="unchecked", broken="by itself", breaks=without_checks)


# --- correct models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn5", "roberta", "bag"])
def test_no_record_moves_the_sum_of_a_correct_model_by_more_than_the_clip_norm(name: str) -> None:
    case, settings = zoo.CASES[name], replace(SEARCH, restarts=2, tries=5, seed=0)
    report = audit.audit_model(zoo.make(name), case.loss, case.batch(4), settings=settings)
    assert 0.99 < report.sensitivity.multiple <= LIMIT  # and the search reaches it
    assert not report.refuted and report.privacy is None


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.NAMES)
def test_it_holds_for_every_method_on_the_packaged_records(name: str) -> None:
    records = data.load().test.__getitems__([0, 1, 2, 3, 4])
    model = models.build("linear", in_channels=1, image_size=28, classes=10, seed=0)
    settings = replace(SEARCH, clip_norm=0.3)
    report = audit.audit_model(model, zoo.classify, data.collate(records), method=name, settings=settings)
    assert 0.99 < report.sensitivity.multiple <= LIMIT and not report.refuted


@pytest.mark.slow
@pytest.mark.parametrize("make", [dropout, DropPath])
def test_random_draws_that_shift_with_the_batch_size_are_not_a_fault(make: Any) -> None:
    report = audit.audit_model(make(), zoo.classify, rows(), settings=SEARCH)
    assert report.sensitivity.multiple <= LIMIT


@pytest.mark.slow
def test_the_model_and_torch_s_generator_stay_unchanged() -> None:
    model, batch = dropout(), rows()
    before, kept, state = [p.clone() for p in model.parameters()], batch[0].clone(), torch.get_rng_state()
    audit.audit_model(model, zoo.classify, batch, settings=replace(SEARCH, restarts=1, tries=3, runs=100, steps=1))
    assert all(map(torch.equal, before, model.parameters())) and torch.equal(kept, batch[0])
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- broken ones


@pytest.mark.slow
@pytest.mark.parametrize("control", audit.MODEL_CONTROLS, ids=lambda control: control.name)
def test_every_broken_variant_of_a_model_is_refuted(control: audit.ModelControl) -> None:
    settings = replace(SEARCH, restarts=3, tries=25, seed=0)
    report = audit.audit_model_control(control, nn.Linear(6, 4), zoo.classify, rows(8), settings=settings)
    assert report.refuted and report.sensitivity.multiple > 1.3, report.sensitivity
    assert report.sensitivity.exact == pytest.approx(report.sensitivity.multiple, rel=1e-3)  # no rounding


@pytest.mark.slow
def test_samples_mixed_behind_random_draws_are_found() -> None:
    report = audit.audit_model_control(UNCHECKED, MixedFromFourOn(), zoo.classify, rows(), settings=SEARCH)
    assert report.refuted and report.sensitivity.training and report.sensitivity.multiple > 2


def test_the_multiple_is_that_of_plain_autograd_one_sample_at_a_time() -> None:
    """Class weights of the batch, by definition: the clipped gradient of every sample, with and without the last."""
    model, batch = nn.Linear(6, 4).double(), (rows()[0].double(), torch.tensor([0, 0, 0, 1, 1, 2]))
    audited = audit.MODEL_CONTROLS[1].breaks(
        AuditedModel(model=model, loss_fn=zoo.classify, examples=batch, method=methods.dpsgd(), clip_norm=0.5)
    )

    def clipped_sum(count: int) -> Tensor:
        labels, total = batch[1][:count], torch.zeros(28, dtype=torch.float64)
        frequency = [int((labels == label).sum()) for label in labels]
        for index, times in enumerate(frequency):
            loss = F.cross_entropy(model(batch[0][index : index + 1]), labels[index : index + 1])
            grads = torch.autograd.grad(loss * count / (len(labels.unique()) * times), list(model.parameters()))
            gradient = torch.cat([grad.flatten() for grad in grads])
            total += gradient * min(1.0, 0.5 / float(gradient.norm()))
        return total

    releases = Releases(audited, training=True, randomness=RunRandomness(0))
    start = releases.now
    moved = releases.with_last(batch, start) - releases.without_last(batch, start, "left out")
    torch.testing.assert_close(moved, clipped_sum(6) - clipped_sum(5))


@pytest.mark.slow
def test_a_record_that_the_loss_rejects_is_counted_and_skipped() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        # raises for targets outside [0, 1]
        return F.binary_cross_entropy(batch[1], model(batch[0]).squeeze(1).sigmoid(), reduction="none")

    report = audit.audit_model(nn.Linear(6, 1), loss, (rows()[0], torch.rand(6)), settings=SEARCH)
    assert 0 < report.sensitivity.refused < report.sensitivity.evaluations and not report.refuted


def test_what_the_library_refuses_is_refused_before_the_search() -> None:
    with pytest.raises(ValueError, match="mixes the samples of a batch"):
        audit.audit_model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)), zoo.classify, rows(), settings=SEARCH)


# --- epsilon


@pytest.mark.slow
def test_the_bound_on_epsilon_is_below_the_claim_and_close_to_it() -> None:
    report = audit.audit_model(nn.Linear(6, 4), zoo.classify, rows(), settings=replace(SEARCH, runs=240, steps=2))
    assert report.privacy is not None and not report.refuted
    measured = {bound.name: bound.epsilon for bound in report.privacy.bounds}
    assert list(measured) == ["Gaussian DP", "Clopper-Pearson"] and 0.25 * 8 < measured["Gaussian DP"] < 8


@pytest.mark.slow
def test_the_bound_on_epsilon_refutes_the_claim_of_a_broken_variant() -> None:
    centred = audit.MODEL_CONTROLS[0]
    settings = replace(SEARCH, tries=30, runs=100, steps=1, epsilon=1.0)
    report = audit.audit_model_control(centred, nn.Linear(6, 4), zoo.classify, rows(8), settings=settings)
    assert report.privacy is not None and report.privacy.refuted


@pytest.mark.slow
def test_runs_with_sampling_get_no_gaussian_bound() -> None:
    settings = replace(SEARCH, restarts=1, runs=100, steps=1, sample_rate=0.5)
    report = audit.audit_model(nn.Linear(6, 4), zoo.classify, rows(), method="dpsgd", settings=settings)
    assert report.privacy is not None and [bound.name for bound in report.privacy.bounds] == ["Clopper-Pearson"]
    assert not report.refuted


# --- the report


@pytest.mark.slow
def test_the_report_names_the_moves_and_shows_no_value_of_the_record() -> None:
    report = audit.audit_model(nn.Linear(6, 4), zoo.classify, rows(), settings=SEARCH)
    document = report.to_json()
    assert set(document["sensitivity"]) == {
        "multiple", "multiple_in_float64", "limit", "holds", "mode", "neighbour", "example", "others",
        "releases_before", "moves", "evaluations", "refused",
    }  # fmt: skip
    assert document["sensitivity"]["moves"] and all(type(move) is str for move in document["sensitivity"]["moves"])
    assert "tensor" not in repr(report)
    assert tensors_of(report.sensitivity.batch)[0].shape == (document["sensitivity"]["others"] + 1, 6)
    again = audit.audit_model(nn.Linear(6, 4), zoo.classify, rows(), settings=replace(SEARCH, seed=1)).to_json()
    assert again["sensitivity"]["moves"] != document["sensitivity"]["moves"]


# --- the command

QUICK = ["--model", "linear", "--seed", "1", "--restarts", "2", "--tries", "4", "--examples", "4"]


@pytest.mark.slow
def test_the_command_audits_a_model_on_the_packaged_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *QUICK, "--runs", "100", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "1.000000 C" in shown and "Gaussian DP" in shown and "REFUTED" not in shown
    assert (
        "The search found no record that moves the sum by more than the clip norm; no bound is above its claim" in shown
    )


@pytest.mark.slow
def test_the_command_s_document_follows_from_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for _ in range(2):
        assert main(["audit", *QUICK, "--runs", "0", "--method", "dpsgd", "disk", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    first, second = documents
    assert first == second and first["ok"] and (first["model"], first["dataset"]) == ("linear", "fashion-mnist-small")
    assert [found["subject"] for found in first["audits"]] == ["dpsgd", "disk"]
    assert first["audits"][0]["sensitivity"]["multiple"] <= LIMIT and first["audits"][0]["privacy"] is None


@pytest.mark.slow
def test_the_command_refutes_the_broken_variants_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "linear", "--seed", "0", "--restarts", "2", "--tries", "20", "--runs", "0"]
    assert main(["audit", *options, "--controls"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  REFUTED") == len(audit.MODEL_CONTROLS) and "Every broken variant is refuted" in shown


@pytest.mark.slow
def test_ctrl_c_ends_the_audit_of_a_model_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(audit, "audit_model", interrupted)
    assert main(["audit", *QUICK]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "pmlf: interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "cnn6"], "unknown model 'cnn6': give one of cnn5"),
        (["--model", "linear", "--dataset", "mnits"], "dataset 'mnits' does not exist"),
        (["--model", "linear", "--examples", "1"], "--examples=1 is not a whole number of at least 2"),
        (["--model", "linear", "--runs", "7"], "--runs=7 is too few for a bound: give 100 or more, or 0"),
        (["--model", "linear", "--restarts", "0"], "--restarts=0 is not a whole number of at least 1"),
        (["--model", "linear", "--tries", "0"], "--tries=0 is not a whole number of at least 1"),
        (["--model", "linear", "--clip-norm", "0"], "--clip-norm=0.0 is not positive"),
        (["--model", "linear", "--epsilon", "0"], "--epsilon=0.0 is not positive"),
        (["--model", "linear", "--canaries", "500"], "--canaries cannot be used with --model"),
        (["--model", "linear", "--runs", "0", "--plot", "x.png"], "--plot draws the scores of runs"),
        (["--model", "linear", "--method", "dpsgd", "--controls", "--restarts", "1", "--tries", "1", "--runs", "0"],
         "clip-per-point needs a method with several evaluation points"),
        (["--runs", "100"], "--runs needs --model: add it, as in --model cnn5"),
    ],
)  # fmt: skip
def test_the_command_explains_what_it_cannot_audit(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""
