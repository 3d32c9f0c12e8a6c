"""Certificates: complete, recomputable, and never believed when they say too little."""

from __future__ import annotations

import html.parser
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pmlf
from pmlf import accounting, certificate, certificate_page
from pmlf.cli import main
from pmlf.ledger import Ledger
from test_training import dataset, finish, loss, small


def made(ledger: Ledger | None = None, **options: Any) -> dict[str, Any]:
    model = small()
    options = {
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "batch_size": 30,
        "steps": 6,
        "method": "dp-pmlf",
        **options,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = pmlf.make_private(model=model, optimizer=optimizer, dataset=dataset(), loss_fn=loss, ledger=ledger, **options)
    return finish(run, until=4).certificate()


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return made()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The second run of a ledger."""
    path = tmp_path_factory.mktemp("ledger") / "patients.ledger"
    with Ledger(path, dataset="patients", run="first") as ledger:
        made(ledger, noise_multiplier=None, target_epsilon=4.0)
    with Ledger(path, dataset="patients", run="second") as ledger:
        return made(ledger, noise_multiplier=None, target_epsilon=8.0, seed=3)


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run begun twice under its name, with no target to end at."""
    path = tmp_path_factory.mktemp("ledger") / "patients.ledger"
    for _ in range(2):
        with Ledger(path, dataset="patients", run="again") as ledger:
            document = made(ledger)
    return document


Checked = Callable[[dict[str, Any]], tuple[int, dict[str, Any], str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Checked:
    def run(document: Any) -> tuple[int, dict[str, Any], str]:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        (tmp_path / "certificate.json").write_bytes(content)
        code = main(["account", "--certificate", str(tmp_path / "certificate.json"), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else {}, captured.err

    return run


def test_numbers_of_numpy_go_into_ledger_and_certificate_like_any_other(tmp_path: Path) -> None:
    given = {"batch_size": np.int64(30), "steps": np.int64(6), "noise_multiplier": np.float32(1.0)}
    with Ledger(tmp_path / "ledger", dataset="patients") as ledger:
        document = made(ledger, target_delta=np.float64(1e-3), **given)
    assert json.loads(json.dumps(document)) == document and document["planned_steps"] == 6


def test_a_certificate_holds(alone: dict[str, Any], shared: dict[str, Any], check: Checked) -> None:
    for document in (alone, shared):
        code, report, err = check(document)
        assert code == 0 and report["holds"] and err == "" and len(report["claims"]) == 5


def test_the_epsilon_that_always_holds_is_that_of_all_planned_steps(alone: dict[str, Any]) -> None:
    expected = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.25, steps=6, delta=1e-3)
    assert alone["epsilon"] == alone["epsilon_at_planned_steps"]["pld"] == expected
    assert (alone["planned_steps"], alone["released_steps"], alone["steps_of_the_model"]) == (6, 4, 4)
    assert alone["composition"] == certificate.PLD and not alone["reproducible_noise"]


def test_runs_of_one_ledger_are_listed_and_composed_by_a_filter(shared: dict[str, Any]) -> None:
    assert shared["composition"] == certificate.FILTER and shared["dataset"] == "patients"
    assert [(trial["run"], trial["events"]) for trial in shared["trials"]] == [("first", 4), ("second", 4)]
    assert shared["epsilon"] == shared["target_epsilon"] == 8.0  # what was spent by then holds for no stop at will
    assert shared["reproducible_noise"]


def test_a_run_begun_again_without_a_target_states_no_epsilon(unbounded: dict[str, Any], check: Checked) -> None:
    assert unbounded["epsilon"] is None and unbounded["composition"] == certificate.CAPPED
    assert [trial["events"] for trial in unbounded["trials"]] == [4, 4]
    assert len({trial["beginning"] for trial in unbounded["trials"]}) == 2
    code, report, _ = check(unbounded)
    assert code == 1 and report["reason"] == certificate.UNBOUNDED
    text = certificate_page.page(unbounded)
    assert "&epsilon; = none" in text and "This certificate states nothing" in text


@pytest.mark.parametrize(
    "lower",
    [
        lambda d: d.update(epsilon=d["epsilon"] * (1 - 1e-3)),
        lambda d: d["epsilon_at_planned_steps"].update(pld=0.1),
        lambda d: d["epsilon_at_released_steps"].update(rdp=0.1),
        lambda d: d.update(noise_multiplier=d["noise_multiplier"] * 0.9),
        lambda d: d.update(planned_steps=60),
        lambda d: d.update(released_steps=60),
        lambda d: d.update(delta=1e-6),
    ],
)
def test_an_understated_epsilon_does_not_hold_even_with_a_right_digest(
    alone: dict[str, Any], check: Checked, lower: Callable[[dict[str, Any]], None]
) -> None:
    document = json.loads(json.dumps(alone))
    lower(document)
    assert check(document)[0] == 1  # the digest tells
    code, report, _ = check(certificate.sealed(document))
    assert code == 1 and not report["holds"] and "larger epsilon" in report["reason"]


def test_an_understated_filter_does_not_hold(shared: dict[str, Any], check: Checked) -> None:
    document = json.loads(json.dumps(shared))
    document["trials"][0]["events"] += 50
    assert check(certificate.sealed(document))[0] == 1


def test_the_last_digits_of_another_accountant_are_tolerated_and_no_more(alone: dict[str, Any]) -> None:
    """Between the usual bound and a finer one a claim is true; below the finer one it is not known to be."""
    event = accounting.Event(noise_multiplier=1.0, sample_rate=0.25)
    usual, finest = alone["epsilon"], accounting.finest_epsilon(event, steps=6, delta=1e-3)
    assert finest <= usual
    for stated, holds in [(usual * 1.1, True), (usual, True), (finest, True), (finest * (1 - 1e-6), False)]:
        claim, *_ = certificate.claims(certificate.sealed({**alone, "epsilon": stated}))
        assert claim.holds == holds


def test_what_is_no_certificate_is_refused_in_one_line(alone: dict[str, Any], check: Checked) -> None:
    for wrong in (
        b"\xff\xfe",
        b"[" * 100_000,
        {},
        [],
        {"certificate": 1, "digest": 3, "x": float("nan")},
        certificate.sealed({**alone, "certificate": 2}),
        certificate.sealed({**alone, "records": 0}),
        certificate.sealed({**alone, "records": "many"}),
        certificate.sealed({**alone, "delta": 0.0}),
        certificate.sealed({**alone, "planned_steps": -1}),
        certificate.sealed({**alone, "noise_multiplier": float("nan")}),
        certificate.sealed({**alone, "sample_rate": 0.1}),
        certificate.sealed({**alone, "composition": "luck"}),
        certificate.sealed({name: value for name, value in alone.items() if name != "trials" and name != "delta"}),
    ):
        code, report, err = check(wrong)
        assert (code == 2 and err.count("\n") == 1 and "certificate" in err) or (code == 1 and not report["holds"])
        assert "Traceback" not in err


def test_a_thousand_mutations_are_never_believed(alone: dict[str, Any], tmp_path: Path) -> None:
    path, chance = tmp_path / "certificate.json", random.Random(0)
    content = json.dumps(alone, indent=2).encode()
    believed = 0
    for _ in range(1000):
        mutated = bytearray(content)
        where = chance.randrange(len(mutated))
        match chance.randrange(3):
            case 0:
                mutated[where] = chance.randrange(256)
            case 1:
                mutated[where:where] = bytes([chance.randrange(256)])
            case _:
                del mutated[where]
        path.write_bytes(mutated)
        try:
            document = certificate.read(path)
        except ValueError as error:
            assert "is not a certificate" in str(error) and "\n" not in str(error)
            continue
        if certificate.intact(document):  # white space came or went
            assert document == alone
            believed += 1
    assert believed < 300


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.open, self.links = "", list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_the_certificate_says_and_needs_nothing_else(
    alone: dict[str, Any], shared: dict[str, Any]
) -> None:
    for document in (alone, shared, {**alone, "dataset": "<script>alert(1)</script>"}):
        reader = _Reader()
        reader.feed(certificate_page.page(document))
        assert reader.open == [] and reader.links == []
        assert f"at δ = {document['delta']:g}" in reader.text and document["digest"] in reader.text
        for words in (*document["not_accounted_for"], document["randomness"], document["adjacency"]):
            assert words in reader.text
        shown = float(reader.text.split("ε = ")[1].split()[0])
        assert document["epsilon"] <= shown <= document["epsilon"] + 1e-4
        assert ("Not for release" in reader.text) == document["reproducible_noise"]
    assert "<script>" not in certificate_page.page(document)
