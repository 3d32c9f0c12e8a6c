"""Every dataset and model of the paper by the command line, on real data if it is available, else on synthetic data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import safetensors.torch

from pmlf import data
from pmlf.cli.main import main
from pmlf.models.text import load_classifier
from twins import sentences, write_glue, write_images, write_table, write_text_model

IMAGES = ["mnist", "fashion-mnist", "cifar10", "cifar100"]
SMALL = ["--steps", "3", "--batch-size", "4", "--seed", "0"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory, shared_data: Path | None) -> Path:
    """The real datasets that are available, and synthetic ones of the same form for the others."""
    root = tmp_path_factory.mktemp("data")
    for name in data.NAMES[1:]:
        hub_id = (data.IMAGE_DATASETS | data.TEXT_DATASETS)[name].hub_id
        task = data.TEXT_DATASETS[name].config if name in data.TEXT_DATASETS else ""
        if shared_data is not None and any((shared_data / hub_id / task).glob("**/train-*.parquet")):
            (root / hub_id / task).parent.mkdir(parents=True, exist_ok=True)
            (root / hub_id / task).symlink_to(shared_data / hub_id / task)
        elif task:
            write_glue(root, name)
        else:
            write_images(root, name, labels=[index % data.IMAGE_DATASETS[name].classes for index in range(40)])
    return root


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"), "roberta", positions=514)


def train(out: Path, data_dir: Path, *options: str) -> dict[str, object]:
    """Run `pmlf train` with these options, check its results and return its metrics."""
    assert main(["train", *SMALL, *options, "--data-dir", str(data_dir), "--out", str(out)]) == 0
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["released_steps"] == 3
    assert certificate["epsilon_at_released_steps"]["pld"] == pytest.approx(3.0, abs=0.01)
    weights = safetensors.torch.load_file(out / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    metrics = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    for score in metrics["scores"].values():
        low, high = score["interval"]
        assert 0 <= low <= score["accuracy"] <= high <= 1
    return metrics


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:delta=")
@pytest.mark.parametrize(
    ("dataset", "model"),
    [*((dataset, "linear") for dataset in IMAGES), ("cifar100", "cnn5"), ("mnist", "resnet18"), ("mnist", "vit")],
)
def test_images(dataset: str, model: str, data_dir: Path, tmp_path: Path) -> None:
    records = {"resnet18": 12, "vit": 20}.get(model, 40)  # the large ones take seconds a batch
    size = ["--records", str(records)]
    metrics = train(tmp_path / "run", data_dir, "--dataset", dataset, "--model", model, *size)
    (score,) = metrics["scores"].values()  # type: ignore[attr-defined]
    assert metrics["split"] == "test" and score["records"] == records
    assert len(score["per_class"]) == data.IMAGE_DATASETS[dataset].classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "rank"),
    [("sst2", []), ("qnli", ["--lora-rank", "2"]), ("qqp", []), ("mnli", ["--lora-rank", "2"])],
    ids=["sst2-full", "qnli-lora", "qqp-full", "mnli-lora"],
)
def test_texts(dataset: str, rank: list[str], data_dir: Path, text_model: Path, tmp_path: Path) -> None:
    options = ["--model", str(text_model), "--records", "40", "--optimizer", "adam", "--lr", "0.001", *rank]
    metrics = train(tmp_path / "run", data_dir, "--dataset", dataset, *options)
    spec = data.TEXT_DATASETS[dataset]
    scores = metrics["scores"]
    assert isinstance(scores, dict) and tuple(scores) == spec.judged_on
    for score in scores.values():
        assert score["records"] == 40 and len(score["per_class"]) == spec.classes
        assert ("f1" in score) == (dataset == "qqp") and not math.isnan(score.get("f1", 0.0))
    again = load_classifier(str(text_model), classes=spec.classes, lora_rank=2 if rank else None).model
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors"))


@pytest.mark.slow
def test_your_own_table(text_model: Path, tmp_path: Path) -> None:
    rows = [{"review": text, "stars": ["low", "high"][i % 2]} for i, text in enumerate(sentences(40))]
    table = write_table(tmp_path / "reviews.csv", rows)
    columns = ["--text-column", "review", "--label-column", "stars", "--labels", "low", "high"]
    options = ["--dataset", str(table), "--model", str(text_model), *columns]
    metrics = train(tmp_path / "texts", tmp_path, *options, "--holdout", "0.25")
    assert metrics["split"] == "holdout"
    out = ["--out", str(tmp_path / "none")]
    assert main(["train", *SMALL, *options, *out]) == 2  # no test split, and no holdout either
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_augmentation_ema_and_a_comparison(data_dir: Path, tmp_path: Path) -> None:
    options = ["--dataset", "cifar100", "--model", "linear", "--records", "40", "--augment-per-point", "--ema", "0.5"]
    metrics = train(tmp_path / "run", data_dir, *options)
    assert "ema_accuracy" in metrics and (tmp_path / "run" / "model-ema.safetensors").exists()
    folders = ["--data-dir", str(data_dir), "--out", str(tmp_path / "both")]
    assert main(["compare", *SMALL, *options, "--methods", "dpsgd", "dp-pmlf", *folders]) == 0
