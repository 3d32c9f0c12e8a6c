"""A trained model in use: the same predictions in a fresh process, after export, and nothing private in its folder."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import pmlf
from folders import RUN_FILES
from pmlf.cli.main import main
from pmlf.experiments import export, runner, tasks
from pmlf.experiments.options import OwnData, PretrainedOptions
from pmlf.experiments.spec import RunSpec
from twins import sentences, write_table, write_text_model, write_vision_model

PETS, STARS, WARDS = ("cat", "dog", "owl"), ("bad", "good"), ("north", "south")
COLUMNS = ("age=0:100", "ward=north,south")
SECRET = "Rumpelstiltskin"  # in the records and in no file of a run


def write_images(folder: Path) -> str:
    chance = np.random.default_rng(0)
    for split in ("train", "test"):
        for index, pet in enumerate(PETS):
            (folder / split / pet).mkdir(parents=True)
            for copy in range(6):
                pixels = (chance.integers(0, 120, (20 + copy, 24, 3)) + 40 * index).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / pet / f"{SECRET}{copy}.png")
    return str(folder)


def write_texts(folder: Path) -> str:
    folder.mkdir()
    for seed, split in enumerate(("train", "test")):
        rows = [
            {"review": f"{SECRET} {text}", "label": STARS[i % 2]} for i, text in enumerate(sentences(20, seed=seed))
        ]
        write_table(folder / f"{split}.csv", rows)
    return str(folder)


def write_rows(folder: Path) -> str:
    folder.mkdir()
    chance = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = [
            {
                "age": age,
                "ward": (*WARDS, SECRET)[age % 3],
                "ill": "yes" if age > 50 else "no",
                "signs": "a|b",
                "cost": age,
            }
            for age in chance.integers(0, 100, 30).tolist()
        ]
        write_table(folder / f"{split}.csv", rows)
    return str(folder)


class Trained:
    """A run, with the network as it was at the end of its training."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        made: list[tasks.Task] = []
        prepare = tasks.prepare

        def remembered(*given: Any) -> tasks.Task:
            made.append(prepare(*given))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks, "prepare", remembered)
            self.result = runner.run(spec, folder)
        (self.task,) = made
        self.folder, self.spec = folder, spec

    def probabilities(self, batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            return self.task.form.target.activated(self.task.form.outputs(self.task.model.eval(), batch))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    root = tmp_path_factory.mktemp("released")
    texts, network = write_texts(root / "reviews"), str(write_text_model(root / "network"))
    common: dict[str, Any] = {"steps": 2, "batch_size": 6, "noise_multiplier": 1.0, "seed": 0, "lr": 0.5, "delta": 1e-3}
    own = {
        "image": OwnData(labels=PETS, image_size=16),
        "text": OwnData(text_column="review", labels=STARS),
        "table": OwnData(columns=COLUMNS, label_column="ill", labels=("no", "yes")),
    }
    specs = {
        "image": RunSpec(dataset=write_images(root / "pets"), own=own["image"], ema=0.5, **common),
        "text": RunSpec(
            dataset=texts, model=network, own=own["text"], pretrained=PretrainedOptions(lora_rank=2), **common
        ),
        "table": RunSpec(dataset=write_rows(root / "rows"), own=own["table"], **common),
    }
    return {kind: Trained(root / f"run-{kind}", spec) for kind, spec in specs.items()}


def inputs_of(run: Trained) -> Path:
    test = Path(run.spec.dataset) / "test"
    return test if test.is_dir() else test.with_suffix(".csv")


@pytest.fixture(scope="module")
def elsewhere(runs: dict[str, Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fresh process in another folder predicts and evaluates, without the pretrained model of the training."""
    network = Path(runs["text"].spec.model or "")
    hidden = network.rename(network.with_name("away"))
    out = tmp_path_factory.mktemp("elsewhere")
    calls = []
    for kind, run in runs.items():
        calls.append(["predict", str(run.folder), str(inputs_of(run)), "--out", f"{kind}.csv"])
        calls.append(["evaluate", str(run.folder), "--json"])
    program = f"""
import contextlib, io, json
from pmlf.cli.main import main
for call in {calls!r}:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(call) == 0
    if call[0] == "evaluate":
        open(call[1].rpartition("-")[2] + ".json", "w").write(printed.getvalue())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], cwd=out, env=environment, capture_output=True, text=True)
    hidden.rename(network)
    assert done.returncode == 0, done.stderr
    return out


def all_records(run: Trained) -> Any:
    (records,) = run.task.judged_on.values()
    indices = records.indices if run.task.lengths is not None else None  # texts are sorted by length
    whole = records if indices is None else records.dataset
    collate = run.task.collate_fn or torch.utils.data.default_collate
    return collate([whole[index] for index in range(len(whole))])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "table"])
def test_a_fresh_process_predicts_what_the_model_did_at_the_end_of_training(
    kind: str, runs: dict[str, Trained], elsewhere: Path
) -> None:
    run = runs[kind]
    with (elsewhere / f"{kind}.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = run.probabilities(all_records(run))
    names = run.task.form.target.names
    found = torch.tensor([[float(row[f"p({name})"]) for name in names] for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # convolutions may choose other kernels
    assert [row["prediction"] for row in rows] == [names[best] for best in expected.argmax(1)]
    assert len({row["input"] for row in rows}) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "table"])
def test_a_fresh_process_evaluates_as_the_end_of_training_did(
    kind: str, runs: dict[str, Trained], elsewhere: Path
) -> None:
    last = runs[kind].result.evaluations[-1].to_json()
    assert json.loads((elsewhere / f"{kind}.json").read_text())["score"] == json.loads(
        json.dumps(last["scores"]["test"])
    )


def onnx_outputs(file: Path, batch: Any, kind: str, released: Any) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    if kind == "text":
        given = {each.name: batch[each.name].numpy() for each in session.get_inputs()}
    elif kind == "image":
        scale, shift = released.form.inputs.affine
        given = {"pixels": np.rint((batch[0].numpy() - shift) / scale).astype(np.uint8)}
    else:
        given = {"features": batch[0].numpy()}
    (found,) = session.run(None, given)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "table"])
def test_onnx_gives_the_same_probabilities_for_any_batch(kind: str, runs: dict[str, Trained], tmp_path: Path) -> None:
    run = runs[kind]
    export.write(run.folder, "onnx", tmp_path / "model.onnx")
    batch = all_records(run)
    expected = run.probabilities(batch).numpy()
    found = onnx_outputs(tmp_path / "model.onnx", batch, kind, pmlf.load(run.folder))
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-4


@pytest.mark.slow
def test_torch_export_gives_the_same_probabilities(runs: dict[str, Trained], tmp_path: Path) -> None:
    run = runs["table"]
    export.write(run.folder, "torch-export", tmp_path / "model.pt2")
    batch = all_records(run)
    found = torch.export.load(tmp_path / "model.pt2").module()(batch[0])
    torch.testing.assert_close(found, run.probabilities(batch))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "table"])
def test_the_hub_folder_states_the_guarantee_and_works_alone(
    kind: str, runs: dict[str, Trained], tmp_path: Path
) -> None:
    run = runs[kind]
    described = export.write(run.folder, "hub", tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    certificate = json.loads((run.folder / "certificate.json").read_text())
    assert described["guarantee"] in card and f"{certificate['records']:,} training records" in card
    assert float(card.split("epsilon ")[1].split()[0]) >= certificate["epsilon"]
    assert "Not for release" in card  # it was seeded
    files = {path.name for path in (tmp_path / "hub").iterdir()}
    assert not files & {"spec.json", "metrics.jsonl", "ledger.jsonl", "result.json"}
    test = Path(run.spec.dataset) / "test.csv"
    if kind == "image":
        inputs: Any = sorted((Path(run.spec.dataset) / "test").glob("*/*"))
    elif kind == "text":
        inputs = [line.partition(",")[0] for line in test.read_text().splitlines()[1:]]
    else:
        inputs = {"age": [3, 80], "ward": ["north", None]}
    first, second = (pmlf.load(folder).probabilities(inputs) for folder in (tmp_path / "hub", run.folder))
    assert torch.equal(first, second)


@pytest.mark.slow
def test_no_record_is_in_the_files_of_a_model(runs: dict[str, Trained]) -> None:
    for run in runs.values():
        files = [path for path in run.folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= set(RUN_FILES)
        assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_neighbouring_dataset_gives_the_same_form(runs: dict[str, Trained], tmp_path: Path) -> None:
    """A record of its own size, of extreme values or without a class changes no file but weights and evidence."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "test"):
        text = (Path(runs["table"].spec.dataset) / f"{split}.csv").read_text()
        (folder / f"{split}.csv").write_text(text + ("1e9,nowhere,no,,3\n" if split == "train" else ""))
    task = tasks.prepare(RunSpec(**{**vars(runs["table"].spec), "dataset": str(folder)}))
    assert task.form == runs["table"].task.form and task.records == runs["table"].task.records + 1
    pets = tmp_path / "pets"
    write_images(pets)
    Image.fromarray(np.zeros((500, 3), np.uint8)).save(pets / "train" / "cat" / "tall.png")
    task = tasks.prepare(RunSpec(**{**vars(runs["image"].spec), "dataset": str(pets)}))
    assert task.form == runs["image"].task.form and task.records == runs["image"].task.records + 1


def test_the_average_is_loaded_on_request(runs: dict[str, Trained]) -> None:
    inputs = sorted((Path(runs["image"].spec.dataset) / "test").glob("*/*"))[:2]
    last, average = (pmlf.load(runs["image"].folder, average=each).probabilities(inputs) for each in (False, True))
    assert not torch.equal(last, average)
    with pytest.raises(ValueError, match="kept no average, so leave `average` out"):
        pmlf.load(runs["table"].folder, average=True)


def test_images_of_pillow_and_files_are_alike(runs: dict[str, Trained]) -> None:
    path = next(iter((Path(runs["image"].spec.dataset) / "test").glob("*/*")))
    released = pmlf.load(runs["image"].folder)
    assert released.names == PETS
    assert released.predict([path]) == released.predict([Image.open(path)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "columns"),
    [
        (OwnData(columns=COLUMNS, label_column="cost", task="regression", target_range=(0, 100)), ["prediction"]),
        (
            OwnData(columns=COLUMNS, label_column="signs", task="multilabel", labels=("a", "b")),
            ["prediction", "p(a)", "p(b)"],
        ),
    ],
    ids=["regression", "multilabel"],
)
def test_numbers_and_several_labels_are_learned_and_predicted(
    own: OwnData, columns: list[str], runs: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"own": own, "steps": 60, "batch_size": 30, "noise_multiplier": 0.5, "method": "dpsgd"}
    run = Trained(tmp_path / "run", RunSpec(**{**vars(runs["table"].spec), **changes}))
    score = run.result.evaluations[-1].scores["test"]
    assert score.accuracy > 0.7  # R2, or the part of the labels that is right
    assert main(["evaluate", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == json.loads(json.dumps(score.to_json()))
    assert main(["predict", str(run.folder), str(Path(run.spec.dataset) / "test.csv")]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0]) == ["input", *columns] and len(rows) == 30
    if own.task == "regression":
        assert all(0 <= float(row["prediction"]) <= 100 for row in rows)
    else:
        assert {row["prediction"] for row in rows} == {"a|b"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"head_only": True}, {"lora_rank": 2}], ids=["whole", "head", "lora"])
def test_a_pretrained_image_model_is_tuned_and_used(
    options: dict[str, Any], runs: dict[str, Trained], tmp_path: Path
) -> None:
    network = write_vision_model(tmp_path / "vit")
    changes = {"model": str(network), "own": OwnData(labels=PETS), "ema": None}
    spec = RunSpec(**{**vars(runs["image"].spec), **changes, "pretrained": PretrainedOptions(**options)})
    run = Trained(tmp_path / "run", spec)
    trained = [name for name, each in run.task.model.named_parameters() if each.requires_grad]
    assert any("classifier" in name for name in trained)
    if options:
        assert all("classifier" in name or "lora_" in name for name in trained)
    network.rename(tmp_path / "away")
    paths = sorted((Path(spec.dataset) / "test").glob("*/*"))
    released = pmlf.load(run.folder)
    assert released.form.inputs.size == 24 and released.form.inputs.mean == (0.4, 0.4, 0.4)
    torch.testing.assert_close(released.probabilities(paths), run.probabilities(all_records(run)), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_of_the_table_that_it_was_trained_on_only_held_out_records_are_scored(
    runs: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Path(runs["table"].spec.dataset) / "train.csv"
    run = Trained(tmp_path / "run", RunSpec(**{**vars(runs["table"].spec), "dataset": str(table), "holdout": 0.3}))
    for given in ([], ["--dataset", str(table)]):
        assert main(["evaluate", str(run.folder), *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["split"] == "holdout" and found["score"]["records"] == 9
        assert found["score"] == json.loads(json.dumps(run.result.evaluations[-1].scores["holdout"].to_json()))


def refusals(runs: dict[str, Trained], folder: Path) -> Iterator[tuple[list[object], str]]:
    image, table, text = (runs[kind].folder for kind in ("image", "table", "text"))
    rows = Path(runs["table"].spec.dataset)
    yield ["predict", folder / "none", "a.png"], "none' does not exist: give the folder of a run"
    yield ["predict", folder, "a.png"], "holds no model, because it has no model.json"
    yield ["predict", image], "there is nothing to predict"
    yield ["predict", image, "--text", "a film"], "--text is for models of texts"
    yield ["predict", image, folder / "none.png"], "none.png' does not exist"
    yield ["predict", image, rows / "test.csv"], "is no image and no folder of images"
    yield (
        ["predict", table, Path(runs["text"].spec.dataset) / "test.csv"],
        "has no column 'age', only 'review', 'label'",
    )
    yield ["predict", text, folder], "is not a file that the model takes: give a .txt"
    yield ["evaluate", table, "--dataset", folder / "none.csv"], "none.csv' does not exist"
    yield ["evaluate", table, "--label-column", "age "], "has no column 'age ', only 'age', 'ward'"
    yield ["evaluate", table, "--split", "dev"], "is not a table"
    yield ["export", image, "--out", image], "already exists: give another --out"


def test_mistakes_are_said_in_one_line(
    runs: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, sentence in refusals(runs, tmp_path):
        assert main([str(each) for each in arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert sentence in captured.err and captured.err.count("\n") == 1, captured.err
        assert captured.out == "" and SECRET not in captured.err


def test_weights_of_another_model_are_refused(runs: dict[str, Trained], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.json").write_bytes((runs["table"].folder / "model.json").read_bytes())
    (other / "model.safetensors").write_bytes((runs["image"].folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not fit the model in"):
        pmlf.load(other)
    (other / "model.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"model.json' is damaged"):
        pmlf.load(other)
