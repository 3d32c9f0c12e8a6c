"""Runs of `prior-linear`: one plan, one folder, resumable, and no setting of networks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import pmlf
from pmlf import data
from pmlf.experiments import export, linear_features, prior_linear
from pmlf.experiments.linear_model import SYNTHETIC, LinearForm
from pmlf.experiments.options import OwnData, PretrainedOptions
from pmlf.experiments.results import SilentObserver
from pmlf.experiments.spec import RunSpec
from pmlf.priors import ColourSpec, PatchSpec, PriorSpec, ScatteringSpec
from twins import write_glue, write_images, write_text_model, write_vision_model

SPEC = RunSpec(model="prior-linear", epsilon=8.0, delta=1e-4, records=1500, seed=0, steps=6)


@pytest.fixture(scope="module", autouse=True)
def small_prior(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMLF_CACHE", str(tmp_path_factory.mktemp("cache")))
        blocks = (PatchSpec(name="patches", weight=1.0, filters=12, grid=3),)
        patch.setattr(linear_features, "PriorSpec", partial(PriorSpec, images=60, blocks=blocks))
        yield


def test_the_file_of_a_form_gives_the_form_with_blocks_of_every_kind() -> None:
    kinds = (PatchSpec, ColourSpec, ScatteringSpec)
    prior = PriorSpec(image_size=28, blocks=tuple(kind(name=kind.__name__, weight=0.3) for kind in kinds))
    form = LinearForm(kind=SYNTHETIC, blocks=((0, 5, 0.5), (5, 9, 0.5)), prior=prior)
    assert LinearForm.from_json(json.loads(json.dumps(form.to_json()))) == form


class _Stopper(SilentObserver):
    def stepped(self, step: int, training_loss: float | None) -> None:
        if step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_stays_within_its_epsilon_and_learns(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = prior_linear.run(SPEC, tmp_path / "run", extracting=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (1500, 1500)
    assert result.steps == 6 and not result.interrupted
    assert result.certified_epsilon is not None and result.certified_epsilon <= 8.0
    assert result.test_accuracy is not None and result.test_accuracy > 0.5
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert [query["name"] for query in certificate["queries"]] == ["mean", "second moments"]
    assert certificate["records"] == 1500
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    stopped = prior_linear.run(SPEC, tmp_path / "stopped", observer=_Stopper())
    assert stopped.interrupted_by == stopped.signalled_by == "SIGINT" and stopped.steps == 2
    resumed = prior_linear.run(stopped.spec, tmp_path / "stopped", resume=True)
    prior_linear.run(SPEC, tmp_path / "whole")
    assert resumed.steps == 6 and not resumed.interrupted
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert weights[0] == weights[1]
    assert prior_linear.run(resumed.spec, tmp_path / "stopped", resume=True).test_accuracy == resumed.test_accuracy


@pytest.mark.slow
def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    spec = RunSpec(model="prior-linear", epsilon=8.0, records=1000, seed=0, steps=2, holdout=0.2)
    result = prior_linear.run(spec, tmp_path / "run")
    assert result.split == "holdout"
    assert result.evaluations[-1].scores["holdout"].records == 200
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["records"] == 800


@pytest.mark.parametrize(
    "given", [{"lr": 3.0}, {"ema": 0.9}, {"augment": True}, {"method": "disk"}, {"batch_size": 10}]
)
def test_a_setting_of_networks_is_refused(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leave (it|them) out"):
        prior_linear.run(RunSpec(model="prior-linear", **given), tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_is_loaded_predicts_and_scores_as_it_did(tmp_path: Path) -> None:
    result = prior_linear.run(SPEC, tmp_path / "run")
    model = pmlf.load(tmp_path / "run")
    again = model.evaluate("fashion-mnist-small")
    assert again.records == 2000
    images = data.load("fashion-mnist-small").test
    truth = images.labels[:1500].tolist()
    pictures = [Image.fromarray(image[0].numpy()) for image in images.images[:1500]]
    guessed = [model.names.index(row["prediction"]) for row in model.predict(pictures)]
    accuracy = sum(a == b for a, b in zip(guessed, truth, strict=True)) / 1500
    assert accuracy == pytest.approx(result.test_accuracy)
    assert model.certificate is not None and model.certificate["epsilon"] <= 8.0


@pytest.mark.slow
def test_an_export_of_a_linear_model_is_a_folder_and_no_graph(tmp_path: Path) -> None:
    prior_linear.run(SPEC, tmp_path / "run")
    export.write(tmp_path / "run", "hub", tmp_path / "hub")
    shirt = [Image.new("L", (28, 28), 200)]
    one, other = (pmlf.load(tmp_path / name).probabilities(shirt) for name in ("run", "hub"))
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match="format='hub'"):
        export.write(tmp_path / "run", "torch-export", tmp_path / "model.pt2")


@pytest.mark.slow
def test_embeddings_of_texts_train_resume_load_and_predict(tmp_path: Path) -> None:
    write_glue(tmp_path, "sst2", records=60)
    encoder = write_text_model(tmp_path / "bert", "bert")
    spec = RunSpec(
        dataset="sst2",
        model=str(encoder),
        pretrained=PretrainedOptions(prior="sentence-embedding"),
        epsilon=8.0,
        seed=0,
        steps=4,
    )
    stopped = prior_linear.run(spec, tmp_path / "run", data_dir=tmp_path, observer=_Stopper())
    result = prior_linear.run(stopped.spec, tmp_path / "run", data_dir=tmp_path, resume=True)
    assert result.steps == 4 and result.split == "validation"
    assert result.certified_epsilon is not None and result.certified_epsilon <= 8.0
    shutil.rmtree(encoder)  # the folder of the run is enough
    model = pmlf.load(tmp_path / "run")
    assert model.evaluate("sst2", split="validation", data_dir=tmp_path).accuracy == result.test_accuracy
    (row,) = model.predict(["what a film"])
    assert row["prediction"] in ("negative", "positive")


@pytest.mark.slow
def test_embeddings_of_images_train_and_load(tmp_path: Path) -> None:
    write_images(tmp_path, "cifar10", labels=list(range(10)) * 3)
    spec = RunSpec(
        dataset="cifar10",
        model=str(write_vision_model(tmp_path / "vit")),
        pretrained=PretrainedOptions(prior="image-embedding"),
        epsilon=8.0,
        seed=0,
        steps=2,
    )
    result = prior_linear.run(spec, tmp_path / "run", data_dir=tmp_path)
    model = pmlf.load(tmp_path / "run")
    assert model.evaluate("cifar10", data_dir=tmp_path).accuracy == result.test_accuracy


@pytest.mark.slow
def test_a_resumed_run_refuses_other_records(tmp_path: Path) -> None:
    encoder = write_text_model(tmp_path / "bert", "bert")
    write_glue(tmp_path, "sst2", records=60)
    given = PretrainedOptions(prior="sentence-embedding")
    spec = RunSpec(dataset="sst2", model=str(encoder), pretrained=given, epsilon=8.0, steps=4)
    stopped = prior_linear.run(spec, tmp_path / "run", data_dir=tmp_path, observer=_Stopper())
    write_glue(tmp_path, "sst2", records=60, labels=[1] * 60)
    with pytest.raises(ValueError, match="have changed since the run started"):
        prior_linear.run(stopped.spec, tmp_path / "run", data_dir=tmp_path, resume=True)


def test_an_embedding_needs_an_encoder(tmp_path: Path) -> None:
    spec = RunSpec(dataset="sst2", pretrained=PretrainedOptions(prior="sentence-embedding"))
    with pytest.raises(ValueError, match="needs an encoder"):
        prior_linear.run(spec, tmp_path / "run")


@pytest.mark.slow
def test_your_own_images_train_and_predict(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name, level in (("dark", 30), ("light", 200)):
            folder = tmp_path / "own" / split / name
            folder.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 32), (level, level + number, level)).save(folder / f"{number}.png")
    own = OwnData(labels=("dark", "light"))
    spec = RunSpec(dataset=str(tmp_path / "own"), model="prior-linear", own=own, epsilon=8.0, steps=1, seed=0)
    assert prior_linear.run(spec, tmp_path / "run").steps == 1
    (row, *_) = pmlf.load(tmp_path / "run").predict_files([tmp_path / "own" / "test"])
    assert row["prediction"] in own.labels
    several = OwnData(labels=("dark", "light"), task="multilabel")
    with pytest.raises(ValueError, match="takes classes"):
        prior_linear.run(replace(spec, own=several), tmp_path / "other")
