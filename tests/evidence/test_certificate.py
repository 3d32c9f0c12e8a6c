"""Certificates: complete, recomputable, and never believed when they say too little."""

from __future__ import annotations

import html.parser
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pmlf
from pmlf.cli.main import main
from pmlf.evidence import certificate, certificate_page
from pmlf.evidence.ledger import Ledger
from pmlf.evidence.statement import read_statement
from pmlf.mechanism import accounting
from pmlf.run.private_run import PrivateRun
from small_runs import dataset, finish, loss, small


def begun(ledger: Ledger | None = None, **options: Any) -> PrivateRun:
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
    return pmlf.make_private(
        model=model, optimizer=optimizer, dataset=dataset(), loss_fn=loss, ledger=ledger, **options
    )


def made(ledger: Ledger | None = None, **options: Any) -> dict[str, Any]:
    return finish(begun(ledger, **options), until=4).certificate()


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


@pytest.mark.slow
def test_numbers_of_numpy_go_into_ledger_and_certificate_like_any_other(tmp_path: Path) -> None:
    given = {"batch_size": np.int64(30), "steps": np.int64(6), "noise_multiplier": np.float32(1.0)}
    with Ledger(tmp_path / "ledger", dataset="patients") as ledger:
        document = made(ledger, target_delta=np.float64(1e-3), **given)
    assert json.loads(json.dumps(document)) == document and document["planned_steps"] == 6


@pytest.mark.slow
def test_a_certificate_holds(alone: dict[str, Any], shared: dict[str, Any], check: Checked) -> None:
    for document in (alone, shared):
        code, report, err = check(document)
        assert code == 0 and report["holds"] and err == "" and len(report["claims"]) == 5


@pytest.mark.parametrize("seed", [None, 1])
def test_an_unseeded_run_that_resumed_without_a_ledger_says_what_it_cannot_know(seed: int | None) -> None:
    saved = finish(begun(seed=seed), until=2).state_dict()
    resumed = begun(seed=seed)
    resumed.load_state_dict(saved)
    document = finish(resumed).certificate()
    assert (certificate.RESUMED_UNSEEN in document["not_accounted_for"]) == (seed is None)
    assert certificate.examined(document)[1] is None


def test_a_certificate_that_lists_more_that_is_not_accounted_for_holds(alone: dict[str, Any]) -> None:
    more = certificate.sealed({**alone, "not_accounted_for": [*alone["not_accounted_for"], "the training loss"]})
    assert certificate.examined(more)[1] is None
    less = certificate.sealed({**alone, "not_accounted_for": more["not_accounted_for"][1:]})
    with pytest.raises(ValueError, match="not_accounted_for="):
        certificate.examined(less)


def test_the_epsilon_that_always_holds_is_that_of_all_planned_steps(alone: dict[str, Any]) -> None:
    expected = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.25, steps=6, delta=1e-3)
    assert alone["epsilon"] == alone["epsilon_at_planned_steps"]["pld"] == expected
    assert (alone["planned_steps"], alone["released_steps"], alone["steps_of_the_model"]) == (6, 4, 4)
    assert alone["composition"] == certificate.PLD and not alone["reproducible_noise"]


@pytest.mark.slow
def test_runs_of_one_ledger_are_listed_and_composed_by_a_filter(shared: dict[str, Any]) -> None:
    assert shared["composition"] == certificate.FILTER and shared["dataset"] == "patients"
    assert [(trial["run"], trial["events"]) for trial in shared["trials"]] == [("first", 4), ("second", 4)]
    assert shared["epsilon"] == shared["target_epsilon"] == 8.0  # what was spent by then holds for no stop at will
    assert shared["reproducible_noise"]


@pytest.mark.slow
def test_a_run_begun_again_without_a_target_states_no_epsilon(unbounded: dict[str, Any], check: Checked) -> None:
    assert unbounded["epsilon"] is None and unbounded["composition"] == certificate.CAPPED
    assert [trial["events"] for trial in unbounded["trials"]] == [4, 4]
    assert len({trial["beginning"] for trial in unbounded["trials"]}) == 2
    code, report, _ = check(unbounded)
    assert code == 1 and report["reason"] == certificate.UNBOUNDED
    text = certificate_page.page(unbounded)
    assert "&epsilon; = none" in text and "This certificate states no guarantee: the amount spent" in text


@pytest.mark.slow
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
    assert code == 1 and not report["holds"]
    assert "larger epsilon" in report["reason"] or "contradicts itself" in report["reason"]


def _trial(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["trials"][0].update(changes)


def _two_beginnings(d: dict[str, Any]) -> None:
    d["trials"].append({**d["trials"][0], "beginning": "another"})


def _two_runs(d: dict[str, Any]) -> None:
    d["trials"].append({**d["trials"][0], "run": "another"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_trial(events=500), "released_steps=4 is the number of steps of no run"),
        (_trial(noise_multiplier=2.0), "has another mechanism"),
        (_trial(planned_steps=600), "has another mechanism"),
        (_trial(delta=1e-2), "has another mechanism"),
        (_trial(target_epsilon=1.0), "has another mechanism"),
        (_two_beginnings, "released_steps=4 is the number of steps of no run"),
        (_two_runs, "lists trials of several runs"),
        (lambda d: (_two_runs(d), d.update(dataset="patients")), "4 released steps in 2 trials"),
        (lambda d: d.update(trials=[]), "the model has 4 steps, of 6 planned and 0 events in the trials"),
        (lambda d: d.update(trials=[], steps_of_the_model=0), "released_steps=4 is the number of steps of no run"),
        (lambda d: d.update(trials=[], steps_of_the_model=0, released_steps=0, epsilon=None), "states none"),
        (lambda d: d.update(released_steps=3), "released_steps=3 is the number of steps of no run"),
        (lambda d: d.update(steps_of_the_model=5), "the model has 5 steps"),
        (lambda d: d.update(planned_steps=3), "the model has 4 steps, of 3 planned"),
        (lambda d: (d.update(target_epsilon=1.0), _trial(target_epsilon=1.0)(d)), "is above target_epsilon"),
        (lambda d: d.update(composition=certificate.CAPPED), "is not target_epsilon=None"),
        (lambda d: d.update(composition=certificate.FILTER), "its trials have only its own"),
        (lambda d: d.update(records=1200), "is not expected_batch_size / records"),
        (lambda d: d.update(reproducible_noise=True), "is not what its randomness says"),
    ],
)
def test_a_certificate_that_contradicts_itself_does_not_hold(
    alone: dict[str, Any], check: Checked, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    document = json.loads(json.dumps(alone))
    change(document)
    code, report, _ = check(certificate.sealed(document))
    assert code == 1 and not report["holds"] and reason in report["reason"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(epsilon=True), "epsilon=True"),
        (lambda d: d.update(epsilon="8"), "epsilon='8'"),
        (lambda d: d.update(epsilon=float("inf")), "epsilon=inf"),
        (lambda d: d.update(delta=float("nan")), "delta=nan"),
        (lambda d: d.update(released_steps=-4), "released_steps=-4"),
        (lambda d: d.update(released_steps=4.0), "released_steps=4.0"),
        (_trial(events=-4), "events=-4"),
        (_trial(events=0), "events=0"),
        (_trial(events=True), "events=True"),
        (_trial(note="x"), "has 'note'"),
        (lambda d: d.update(trials={}), "trials={}"),
        (lambda d: d["trials"][0].pop("beginning"), "has no 'beginning'"),
        (lambda d: d["epsilon_at_planned_steps"].pop("pld"), "has no 'pld'"),
        (lambda d: d["epsilon_at_planned_steps"].update(prv=0.1), "has 'prv'"),
        (lambda d: d.update(real_epsilon=0.1), "has 'real_epsilon'"),
        (lambda d: d.update(adjacency="replace one record"), "adjacency='replace one record'"),
        (lambda d: d.update(not_accounted_for=[]), "not_accounted_for=[]"),
        (lambda d: d.update(certificate=True), "certificate=True"),
        (lambda d: d["method"].update(points=[{"weight": 1.0}]), "has no 'coefficients'"),
        (lambda d: d["method"]["filter"].update(a=["x"]), "a='x'"),
        (lambda d: d.update(records=10**400), "records=1000"),
    ],
)
def test_a_certificate_of_another_form_is_refused_by_name(
    alone: dict[str, Any], check: Checked, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    document = json.loads(json.dumps(alone))
    change(document)
    code, report, err = check(certificate.sealed(document))
    assert code == 2 and report == {} and reason in err and err.count("\n") == 1


def test_a_certificate_that_says_a_thing_twice_is_refused(alone: dict[str, Any], check: Checked) -> None:
    text = json.dumps(alone)
    twice = text.replace('"delta": 0.001', '"delta": 0.5, "delta": 0.001', 1).encode()
    code, _, err = check(twice)
    assert code == 2 and "cannot be read as JSON" in err


@pytest.fixture(scope="module")
def written(
    alone: dict[str, Any], shared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """A certificate of every composition with an epsilon."""
    path = tmp_path_factory.mktemp("ledger") / "patients.ledger"
    for _ in range(2):
        with Ledger(path, dataset="patients", run="again") as ledger:
            capped = made(ledger, noise_multiplier=None, target_epsilon=8.0)
    return [alone, made(noise_multiplier=None, target_epsilon=2.0), capped, shared]


@pytest.mark.slow
def test_what_the_library_writes_is_accepted(written: list[dict[str, Any]], tmp_path: Path) -> None:
    assert {document["composition"] for document in written} == {
        certificate.PLD,
        certificate.CAPPED,
        certificate.FILTER,
    }
    path = tmp_path / "ledger"
    with Ledger(path, dataset="patients", run="one") as ledger:
        early = [unstarted(ledger)]
        early.append(made(ledger, noise_multiplier=None, target_epsilon=8.0))
        early.append(unstarted(ledger))  # begun again under its name, and no step yet
    with Ledger(path, dataset="patients") as ledger:
        early.append(unstarted(ledger, target_epsilon=20.0))  # another run, and no step yet
    for document in (*written, *early):
        assert certificate.examined(json.loads(json.dumps(document)))[1] is None


def unstarted(ledger: Ledger, target_epsilon: float = 8.0) -> dict[str, Any]:
    return begun(ledger, noise_multiplier=None, target_epsilon=target_epsilon).certificate()


STORED = sorted((Path(__file__).parents[2] / "docs" / "results").glob("**/*.json"))


def certificates_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "certificate" in value and "digest" in value:
            yield value
        else:
            for part in value.values():
                yield from certificates_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from certificates_in(part)


@pytest.mark.slow
def test_the_certificates_of_the_stored_results_hold() -> None:
    found = [document for path in STORED for document in certificates_in(json.loads(path.read_bytes()))]
    present = [document for document in found if all("beginning" in trial for trial in document["trials"])]
    assert len(present) > 3
    for document in present[:: max(len(present) // 8, 1)]:
        assert certificate.examined(document)[1] is None


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Where in a document something stands, the parts of parts too."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield (*path, name)
        yield from places(part, *path, name)


def changed(value: Any) -> st.SearchStrategy[Any]:
    """A value of the same type that is near, or any other."""
    other: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, False, 0, 1, -1, 3, 4, 10**9, 0.5, 1e-3, 1e-9, 2.0, 1e30, math.nan, math.inf, "", "x", [], {}]
    )
    if isinstance(value, int) and not isinstance(value, bool):
        other |= st.integers(0, 2 * abs(value) + 2)
    if isinstance(value, float):
        other |= st.floats(0.3, 3.0).map(lambda factor: factor * value)
    if value in (certificate.PLD, certificate.CAPPED, certificate.FILTER):
        other |= st.sampled_from([certificate.PLD, certificate.CAPPED, certificate.FILTER])
    if isinstance(value, list) and value:
        other |= st.just(value[1:]) | st.just(value + value[:1])
    return other


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_makes_a_certificate_hold_below_what_its_events_cost(
    written: list[dict[str, Any]], data: st.DataObject
) -> None:
    """One or two changes anywhere, sealed again."""
    true = data.draw(st.sampled_from(written))
    document = json.loads(json.dumps(true))
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(places(document))))
        *path, name = where
        owner = document
        for part in path:
            owner = owner[part]
        if isinstance(owner, dict) and data.draw(st.integers(0, 9)) == 0:
            del owner[name]
        else:
            owner[name] = data.draw(changed(owner[name]))
    try:
        _, reason = certificate.examined(certificate.sealed(document))
    except ValueError:
        return
    if reason is None:
        spent = read_statement(true)
        if true["composition"] == certificate.FILTER:
            cost = accounting.filter_epsilon(spent.events, delta=true["delta"])
        else:
            (count,) = spent.events.values()
            cost = accounting.finest_epsilon(spent.plan.event, steps=count, delta=true["delta"])
        assert document["epsilon"] >= cost * (1 - 1e-9) and document["delta"] == true["delta"]


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
    path, randomness = tmp_path / "certificate.json", random.Random(0)
    content = json.dumps(alone, indent=2).encode()
    believed = 0
    for _ in range(1000):
        mutated = bytearray(content)
        where = randomness.randrange(len(mutated))
        match randomness.randrange(3):
            case 0:
                mutated[where] = randomness.randrange(256)
            case 1:
                mutated[where:where] = bytes([randomness.randrange(256)])
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
