"""`PrivateProbe`: what it learns, what it spends, what it writes down first, and scikit-learn's conventions."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from pmlf.evidence import certificate, certificate_page, ledger
from pmlf.mechanism.noise import Stream
from pmlf.probe import FeatureBlock, FeatureRows, PrivateProbe, advance_together

N, D = 3000, 12


def classified(classes: int = 3, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=N)
    centres = np.eye(D)[:classes] * 3
    return (rng.normal(size=(N, D)) + centres[y]).astype(np.float32), y


@pytest.fixture(scope="module")
def fitted() -> PrivateProbe:
    return PrivateProbe(classes=3, epsilon=2.0, random_state=1).fit(*classified())


@pytest.mark.slow
def test_three_classes_are_learned_within_the_budget(fitted: PrivateProbe) -> None:
    assert fitted.score(*classified(seed=5)) > 0.85
    assert 1.99 < fitted.epsilon_ <= 2.0
    assert fitted.predict_proba(classified()[0]).shape == (N, 3)


def test_the_certificate_names_every_query_and_is_recomputed(fitted: PrivateProbe) -> None:
    document = fitted.certificate_
    assert [(q["name"], q["planned"], q["released"]) for q in document["queries"]] == [
        ("mean", 1, 1),
        ("second moments", 1, 1),
    ]
    assert document["released_steps"] == 30
    claims, reason = certificate.examined(document)
    assert reason is None and claims
    page = certificate_page.page(document)
    assert "second moments" in page and "Released before the steps" in page


@pytest.mark.parametrize(
    "forged",
    [
        {"queries": []},
        {"queries": [{"name": "mean", "noise_multiplier": 1e9, "sample_rate": 1.0, "planned": 1, "released": 1}]},
        {"epsilon": 1.5},
    ],
)
def test_a_certificate_that_hides_a_query_is_refused(fitted: PrivateProbe, forged: dict[str, Any]) -> None:
    document = certificate.sealed({**fitted.certificate_, **forged})
    assert certificate.examined(document)[1] is not None


@pytest.mark.slow
def test_two_labels_several_labels_and_numbers_are_learned() -> None:
    X, y = classified(2)
    assert PrivateProbe(head="sigmoid", classes=2, epsilon=4.0, random_state=0).fit(X, y).score(X, y) > 0.85
    both = np.stack([X[:, 0] > 1, X[:, 1] > 1], axis=1).astype(int)
    several = PrivateProbe(head="sigmoid", classes=2, epsilon=8.0, intercept=0.2, random_state=0).fit(X, both)
    assert several.predict(X).shape == (N, 2) and np.mean(several.predict(X) == both) > 0.8
    numbers = X[:, 0] / np.linalg.norm(X, axis=1) * 40 + 50
    line = PrivateProbe(head="least-squares", target_range=(0, 100), epsilon=8.0, intercept=0.2, random_state=0)
    assert line.fit(X, numbers).score(X, numbers) > 0.5


@pytest.mark.slow
def test_blocks_with_public_eigenvalues_and_poisson_batches_are_one_plan() -> None:
    X, y = classified()
    blocks = (
        FeatureBlock(start=0, stop=6, weight=2.0, eigenvalues=np.linspace(1, 2, 6)),
        FeatureBlock(start=6, stop=D),
    )
    probe = PrivateProbe(classes=3, epsilon=4.0, blocks=blocks, batch_size=500, steps=40, averaging=0.3, random_state=0)
    assert probe.fit(X, y).score(X, y) > 0.8
    assert [query["planned"] for query in probe.certificate_["queries"]] == [2, 2]
    assert certificate.examined(probe.certificate_)[1] is None
    assert 3.99 < probe.epsilon_ <= 4.0


@pytest.mark.slow
def test_every_event_is_in_the_ledger_before_its_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, counted = tmp_path / "ledger.jsonl", []
    draw = Stream.add_gaussian_

    def watched(self: Stream, *arguments: Any, **options: Any) -> None:
        counted.append(sum(ledger.read(book).events.values()))
        draw(self, *arguments, **options)

    monkeypatch.setattr(Stream, "add_gaussian_", watched)
    PrivateProbe(classes=3, steps=4, ledger=book, dataset="patients").fit(*classified())
    assert counted == [1, 2, 3, 4, 5, 6]


def test_probes_on_one_ledger_share_its_budget(tmp_path: Path) -> None:
    book = tmp_path / "ledger.jsonl"
    first = PrivateProbe(classes=3, steps=4, epsilon=1.0, ledger=book).fit(*classified())
    second = PrivateProbe(classes=3, steps=4, epsilon=4.0, ledger=book).fit(*classified())
    assert first.epsilon_ <= 1.0 and second.epsilon_ == 4.0
    assert certificate.examined(second.certificate_)[1] is None
    assert second.certificate_["composition"].startswith("RDP filter")
    with pytest.raises(ValueError, match="spent already"):
        PrivateProbe(classes=3, steps=4, epsilon=1.0, ledger=book).fit(*classified())


def test_an_interrupted_fit_leaves_its_events_in_the_ledger(tmp_path: Path) -> None:
    book = tmp_path / "ledger.jsonl"
    with ledger.Ledger(book, dataset="patients") as opened:
        training = PrivateProbe(classes=3, steps=4).begin(*classified(), ledger=opened)
        training.advance()
        training.advance()
    (trial,) = ledger.read(book).starts
    assert ledger.read(book).parts_of(trial) == (1, 1, 0)


def test_a_resumed_seeded_training_ends_with_the_same_weights() -> None:
    probe = PrivateProbe(classes=3, steps=6, averaging=0.5, batch_size=300, random_state=4)
    whole, first = probe.begin(*classified()), probe.begin(*classified())
    while whole.advance():
        pass
    for _ in range(5):
        first.advance()
    second = probe.begin(*classified(), resumed=first.state_dict())
    while second.advance():
        pass
    assert torch.equal(second.model().weights, whole.model().weights)
    assert second.budget.run_events == 8


@pytest.mark.slow
def test_trainings_side_by_side_end_as_each_does_alone() -> None:
    """With different plans, also one that is shorter, one without queries, and one with batches of its own."""
    X, y = classified()
    probes = [
        PrivateProbe(classes=3, epsilon=1.0, steps=6, random_state=1),
        PrivateProbe(classes=3, epsilon=8.0, steps=4, clip_norm=1.0, intercept=0.1, random_state=2),
        PrivateProbe(classes=3, epsilon=2.0, steps=5, mean_share=0.0, moments_share=0.0, random_state=3),
        PrivateProbe(classes=3, epsilon=2.0, steps=5, batch_size=200, random_state=4),
    ]
    rows = FeatureRows(X)
    together = [probe.begin(rows, y) for probe in probes]
    while advance_together(together):
        pass
    for probe, training in zip(probes, together, strict=True):
        alone = clone(probe).fit(X, y)
        found = probe.finish(training)
        np.testing.assert_allclose(found.coef_, alone.coef_, atol=1e-5 * np.abs(alone.coef_).max())
        assert found.epsilon_ == alone.epsilon_ <= probe.epsilon
        assert found.n_iter_ == probe.steps


def test_an_event_lost_in_a_crash_is_paid_again_and_never_past_the_target(tmp_path: Path) -> None:
    """Without a seed: the resumed run repeats the event with fresh noise, and stops a step early."""
    probe, book = PrivateProbe(classes=3, steps=4), tmp_path / "ledger.jsonl"
    with ledger.Ledger(book, dataset="patients", run="one") as opened:
        training = probe.begin(*classified(), ledger=opened)
        for _ in range(3):
            training.advance()
        state = training.state_dict()
        training.advance()  # released, and lost
    with ledger.Ledger(book, dataset="patients", run="one") as opened:
        resumed = probe.begin(*classified(), ledger=opened, resumed=state)
        while resumed.advance():
            pass
        probe.finish(resumed)
        assert resumed.steps_done == 3 and resumed.budget.epsilon() <= 1.0
    assert sum(ledger.read(book).events.values()) == 6
    assert probe.epsilon_ <= 1.0 and certificate.examined(probe.certificate_)[1] is None


def test_noise_is_fresh_without_a_seed_and_the_same_with_one() -> None:
    X, y = classified()
    secure = [PrivateProbe(classes=3, steps=2).fit(X, y).coef_ for _ in range(2)]
    seeded = [PrivateProbe(classes=3, steps=2, random_state=3).fit(X, y).coef_ for _ in range(2)]
    assert not np.array_equal(*secure)
    assert np.array_equal(*seeded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": None}, "declare all possible classes"),
        ({"classes": (0, 1)}, "declare all possible classes"),
        ({"head": "least-squares", "classes": None}, "target_range=None"),
        ({"head": "softmx"}, "Did you mean 'softmax'"),
        ({"mean_share": 0.6, "moments_share": 0.5}, "budget for the steps"),
        ({"blocks": (FeatureBlock(start=0, stop=5),)}, "cover all"),
        ({"blocks": (FeatureBlock(start=0, stop=2, eigenvalues=(1, 0)),)}, "2 eigenvalues, of which 1 are positive"),
        ({"epsilon": 0.0}, "privacy budget"),
        ({"batch_size": N + 1}, "more than the"),
        ({"random_state": "x"}, "whole number"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateProbe(**{"classes": 3, **options}).fit(*classified())


def test_an_undeclared_label_is_not_shown() -> None:
    X, y = classified()
    with pytest.raises(ValueError) as refused:
        PrivateProbe(classes=("a", "b")).fit(X, np.where(y == 0, "a secret", "b"))
    assert "secret" not in str(refused.value)


def test_a_text_among_the_features_is_not_shown() -> None:
    X, y = classified()
    people = X.astype(object)
    people[7, 1] = "a secret"
    for features in (people, people.astype(str)):
        with pytest.raises(ValueError, match="are not all numbers") as refused:
            PrivateProbe(classes=3).fit(features, y)
        assert "secret" not in str(refused.value)


def test_classes_that_are_taken_from_the_labels_are_named_in_the_certificate() -> None:
    document = PrivateProbe(classes="from-labels", steps=2, random_state=0).fit(*classified()).certificate_
    assert document["not_accounted_for"][-1] == "the set of classes, which was taken from the labels"
    assert certificate.examined(document)[1] is None


def test_a_fitted_probe_holds_no_record(fitted: PrivateProbe) -> None:
    """Its pickle does not grow with the number of records."""
    X, y = classified()
    few = PrivateProbe(classes=3, epsilon=2.0, random_state=1).fit(X[:100], y[:100])
    assert abs(len(pickle.dumps(few)) - len(pickle.dumps(fitted))) < 100


@pytest.mark.slow
def test_it_clones_and_works_in_a_pipeline_and_in_cross_validation() -> None:
    X, y = classified()
    probe = PrivateProbe(classes=3, epsilon=4.0, steps=10, random_state=0)
    assert clone(probe).get_params() == probe.get_params()
    pipeline = make_pipeline(FunctionTransformer(), probe)
    assert pipeline.set_params(privateprobe__steps=5).fit(X, y).score(X, y) > 0.7
    assert cross_val_score(probe, X, y, cv=2).mean() > 0.7
    assert is_classifier(probe) and is_regressor(PrivateProbe(head="least-squares", target_range=(0, 1)))


# Refused by privacy, or answered differently because of it.
FORBIDDEN = {
    "check_supervised_y_no_nan": "an error about a record's target would reveal the record: it contributes nothing",
}


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small data sets with large delta
        yield


@pytest.mark.slow
@pytest.mark.parametrize("head", ["softmax", "least-squares"])
def test_scikit_learns_checks_pass_where_privacy_allows(head: str, quiet: None) -> None:
    """With public labels and a large epsilon: some checks ask for accuracy on fifty records."""
    common: dict[str, Any] = {"head": head, "epsilon": 1e4, "clip_norm": 1.0, "intercept": 0.1, "steps": 40}
    declared = {"target_range": (-300, 300)} if head == "least-squares" else {"classes": "from-labels"}
    results = check_estimator(
        PrivateProbe(**common, **declared), on_fail=None, expected_failed_checks=FORBIDDEN if declared else None
    )
    failed = {r["check_name"]: repr(r["exception"]) for r in results if r["status"] == "failed"}
    assert failed == {}
    assert {r["check_name"] for r in results if r["status"] == "xfail"} <= set(FORBIDDEN)
