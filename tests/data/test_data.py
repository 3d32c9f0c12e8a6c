"""Images: the packaged dataset, a folder with the hub's layout, the cache, your own images, helpful errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from pmlf import data
from twins import write_images, write_split


@pytest.fixture(scope="module")
def small() -> data.ImageData:
    return data.load()


@pytest.mark.slow
def test_packaged_data_is_balanced_shuffled_and_uint8(small: data.ImageData) -> None:
    for split, per_class in ((small.train, 1200), (small.test, 200)):
        assert split.images.dtype == torch.uint8 and split.labels.dtype == torch.int64
        assert split.images.shape == (10 * per_class, 1, 28, 28)
        assert torch.bincount(split.labels).tolist() == [per_class] * 10
        assert set(split.labels[:100].tolist()) == set(range(10))
    assert small.name == data.DEFAULT
    assert (small.classes, small.in_channels, small.image_size) == (10, 1, 28)


@pytest.mark.slow
def test_packaged_data_needs_neither_folder_nor_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setenv(data.DATA_DIR_VARIABLE, "nowhere")
    assert len(data.load("fashion-mnist-small").train) == 12000


@pytest.mark.slow
def test_packaged_images_are_the_first_of_each_class_of_the_real_data(
    small: data.ImageData, shared_data: Path | None, tmp_path: Path
) -> None:
    root = shared_data
    if root is None:  # then the packaged images themselves, followed by others of classes that are already full
        root = tmp_path
        for split, part in (("train", small.train), ("test", small.test)):
            images = np.concatenate([part.images[:, 0].numpy(), np.zeros((3, 28, 28), np.uint8)])
            write_split(
                root / "zalando-datasets/fashion_mnist/fashion_mnist",
                split,
                images,
                [*part.labels.tolist(), 0, 5, 9],
                columns=("image", "label"),
                encoding="PNG",
            )
    whole = data.load("fashion-mnist", root)
    for kept, original, per_class in ((small.train, whole.train, 1200), (small.test, whole.test, 200)):
        one_hot = torch.nn.functional.one_hot(original.labels, 10)
        rank = (one_hot.cumsum(0) * one_hot).sum(1)  # position of an image within its class, from 1
        first = rank <= per_class
        assert torch.equal(kept.images, original.images[first])
        assert torch.equal(kept.labels, original.labels[first])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_folder_in_the_hubs_layout_gives_the_same_pixels_and_labels(name: str, tmp_path: Path) -> None:
    spec = data.IMAGE_DATASETS[name]
    labels = [0, spec.classes - 1, 3]
    images = write_images(tmp_path, name, labels=labels)
    loaded = data.load(name, tmp_path)
    assert (loaded.classes, loaded.in_channels, loaded.image_size) == (
        spec.classes,
        spec.in_channels,
        spec.image_size,
    )
    for split in (loaded.train, loaded.test):
        assert torch.equal(split.images, torch.from_numpy(images.copy()))
        assert split.images.is_contiguous()
        assert split.labels.tolist() == labels


def test_environment_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_images(tmp_path, "mnist", labels=[1, 2])
    monkeypatch.setenv(data.DATA_DIR_VARIABLE, str(tmp_path))
    assert data.load("mnist").train.labels.tolist() == [1, 2]


def test_images_are_normalised_by_the_published_constants(small: data.ImageData) -> None:
    image, label = small.train[5]
    expected = (small.train.images[5].float() / 255 - 0.2860) / 0.3530
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-6)
    assert image.dtype == torch.float32 and label == int(small.train.labels[5])


@pytest.mark.parametrize("indices", [[3, 0, 11999, 3], [7], list(range(100))])
def test_batch_fetch_equals_item_fetch(small: data.ImageData, indices: list[int]) -> None:
    images, labels = data.collate(small.train.__getitems__(indices))
    one_by_one_images, one_by_one_labels = data.collate([small.train[index] for index in indices])
    assert torch.equal(images, one_by_one_images)
    assert torch.equal(labels, one_by_one_labels)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64


def test_no_indices_give_an_empty_batch_of_the_right_shape(small: data.ImageData) -> None:
    images, labels = data.collate(small.train.__getitems__([]))
    assert images.shape == (0, 1, 28, 28) and images.dtype == torch.float32
    assert labels.shape == (0,) and labels.dtype == torch.int64


def test_fetching_leaves_the_stored_images_alone(small: data.ImageData) -> None:
    before = small.test.images.clone()
    small.test.__getitems__([0, 1])
    small.test[0][0].zero_()
    assert torch.equal(small.test.images, before)


def test_loaders_subsets_and_the_default_collate_all_agree(small: data.ImageData) -> None:
    part = Subset(small.test, range(50, 60))
    fast = next(iter(DataLoader(part, batch_size=10, collate_fn=data.collate)))
    default = next(iter(DataLoader(part, batch_size=10)))
    direct = data.collate(small.test.__getitems__(range(50, 60)))
    for images, labels in (fast, default):
        assert torch.equal(images, direct[0])
        assert torch.equal(labels, direct[1])


def test_fetched_items_are_a_sequence(small: data.ImageData) -> None:
    items = small.test.__getitems__([4, 5, 6])
    assert len(items) == 3 and items[1][1] == small.test[5][1]
    assert torch.equal(items[1:].images, small.test.__getitems__([5, 6]).images)


def test_iteration_ends(small: data.ImageData) -> None:
    with pytest.raises(IndexError):
        small.test[2000]


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match="'svhn' does not exist: give one of fashion-mnist-small, mnist,"):
        data.load("svhn")
    with pytest.raises(ValueError, match=r"dataset 'cifar-10' does not exist.* Did you mean 'cifar10'"):
        data.load("cifar-10")


def test_folder_without_the_dataset_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no parquet file under uoft-cs/cifar10: put the files from the hub there"):
        data.load("cifar10", tmp_path)


def test_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_images(tmp_path, "mnist", labels=[0])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'dp-pmlf\[data\]'"):
        data.load("mnist", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_folder_or_network_the_error_comes_soon_and_says_what_to_do(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
import time, datasets, huggingface_hub
from pmlf import data
start = time.perf_counter()
try:
    data.load("cifar100")
except ValueError as error:
    print(f"{time.perf_counter() - start:.1f} {error}")
"""
    variables = {key: value for key, value in os.environ.items() if key != data.DATA_DIR_VARIABLE}
    variables |= {"PYTHONPATH": str(Path(data.__file__).parents[2]), "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=variables | {"NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seconds, sentence = result.stdout.split(" ", 1)
    assert float(seconds) < 8
    assert "cannot reach 'uoft-cs/cifar100'" in sentence
    assert "give data_dir or PMLF_DATA" in sentence and "'fashion-mnist-small'" in sentence


@pytest.mark.parametrize("label", [-1, 10])
def test_label_out_of_range_is_an_error(label: int, tmp_path: Path) -> None:
    write_images(tmp_path, "mnist", labels=[0, label])
    with pytest.raises(
        ValueError, match=r"has a label that is not one of 0, 1, 2, .*: download the files from the hub again"
    ):
        data.load("mnist", tmp_path)


def test_image_of_another_size_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path, "cifar10", labels=[0, 1], size=28)
    with pytest.raises(ValueError, match="has size 28x28, not 32x32"):
        data.load("cifar10", tmp_path)


def test_missing_split_missing_column_and_missing_rows_are_errors(tmp_path: Path) -> None:
    folder = tmp_path / "ylecun/mnist/mnist"
    images = np.zeros((2, 28, 28), np.uint8)
    write_split(folder, "train", images, [0, 1], columns=("image", "label"), encoding="PNG")
    with pytest.raises(ValueError, match="has no split 'test', only 'train'"):
        data.load("mnist", tmp_path)
    write_split(folder, "test", images[:0], [], columns=("image", "label"), encoding="PNG")
    with pytest.raises(ValueError, match="a file of 'ylecun/mnist' cannot be read"):
        data.load("mnist", tmp_path)
    for split in data.SPLITS:
        write_split(folder, split, images, [0, 1], columns=("image", "digit"), encoding="PNG")
    with pytest.raises(
        ValueError, match="has no column 'label', only 'image', 'digit': download the files from the hub again"
    ):
        data.load("mnist", tmp_path)


def test_broken_files_are_errors(tmp_path: Path) -> None:
    write_images(tmp_path, "mnist", labels=[0])
    file = tmp_path / "ylecun/mnist/any_config/train-00000-of-00001.parquet"
    table = pq.read_table(file)
    broken = pa.array([{"bytes": b"not an image", "path": None}], table.column("image").type)
    pq.write_table(table.set_column(0, "image", broken), file)
    with pytest.raises(ValueError, match="an image of 'ylecun/mnist' cannot be decoded"):
        data.load("mnist", tmp_path)
    file.write_bytes(b"not a parquet file")
    with pytest.raises(
        ValueError, match="a file of 'ylecun/mnist' cannot be read: download the files from the hub again"
    ):
        data.load("mnist", tmp_path)


def test_a_second_start_reads_the_cache_and_changed_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_images(tmp_path, "mnist", labels=[3, 4])
    data.load("mnist", tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)  # so nothing can be read
        again = data.load("mnist", tmp_path)
    assert torch.equal(again.train.images, torch.from_numpy(images.copy()))
    write_images(tmp_path, "mnist", labels=[5, 6])
    assert data.load("mnist", tmp_path).train.labels.tolist() == [5, 6]


def test_a_broken_record_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    write_images(tmp_path, "mnist", labels=[0, 77])
    with pytest.raises(ValueError, match="has a label that is not one of"):
        data.load("mnist", tmp_path)
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "pmlf-arrays").iterdir())


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path, "mnist", labels=[0])
    (tmp_path / "ylecun/mnist/any_config/train-00000-of-00001.parquet").rename(
        tmp_path / "ylecun/mnist/any_config/train-00000-of-00002.parquet"
    )
    with pytest.raises(ValueError, match="has 1 of the 2 files of 'train'"):
        data.load("mnist", tmp_path)


@pytest.mark.slow
def test_the_hubs_own_cache_is_read_offline(tmp_path: Path) -> None:
    """An earlier download, in the layout of the cache of huggingface_hub."""
    revision = "0" * 40
    hub = tmp_path / "hub" / "datasets--ylecun--mnist"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(revision)
    write_images(tmp_path, "mnist", labels=[7, 8])
    (hub / "snapshots").mkdir()
    (tmp_path / "ylecun" / "mnist").rename(hub / "snapshots" / revision)
    code = "from pmlf import data; print(data.load('mnist').train.labels.tolist())"
    variables = {key: value for key, value in os.environ.items() if key != data.DATA_DIR_VARIABLE}
    variables |= {"PYTHONPATH": str(Path(data.__file__).parents[2]), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[7, 8]\n", result.stderr


def write_folder(folder: Path, sizes: dict[str, int]) -> None:
    """Your own images: two images of one colour for each class in both splits."""
    for split in data.SPLITS:
        for index, (name, size) in enumerate(sizes.items()):
            (folder / split / name).mkdir(parents=True)
            for copy in range(2):
                pixels = np.full((size, size, 3), 50 * index + copy, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{copy}.png")


PETS = data.Classes(names=("cat", "dog", "owl"))


def test_the_classes_of_your_own_folder_are_those_you_declare(tmp_path: Path) -> None:
    write_folder(tmp_path / "own", {"cat": 16, "dog": 16, "owl": 16})
    form = data.ImageForm.plain(16)
    loaded = data.load(str(tmp_path / "own"), form=form, target=PETS)
    assert (loaded.classes, loaded.in_channels, loaded.image_size) == (3, 3, 16)
    assert loaded.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert loaded.test.images[:, 0, 0, 0].tolist() == [0, 1, 50, 51, 100, 101]
    (tmp_path / "own" / "train" / "ant").mkdir()  # a folder that you did not declare changes nothing while it is empty
    assert data.load(str(tmp_path / "own"), form=form, target=PETS).test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="need `labels`: give all possible classes"):
        data.load(str(tmp_path / "own"))
    (tmp_path / "own" / "classes.txt").write_text("owl\ndog\ncat\n")
    assert data.load(str(tmp_path / "own")).train.labels.tolist() == [2, 2, 1, 1, 0, 0]


def test_your_own_images_have_any_size_and_one_that_you_declare(tmp_path: Path) -> None:
    write_folder(tmp_path / "mixed", {"cat": 16, "dog": 20, "owl": 50})
    loaded = data.load(str(tmp_path / "mixed"), target=PETS)
    assert loaded.train.images.shape == (6, 3, 32, 32)  # a public constant, not the size of the first record
    assert loaded.train.images[:, 0, 5, 5].tolist() == [0, 1, 50, 51, 100, 101]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16"])
def test_any_encoding_and_mode_is_cropped_to_the_centre_and_resized(suffix: str, mode: str, tmp_path: Path) -> None:
    pixels = np.zeros((20, 40), np.uint8)
    pixels[:, 10:30] = 200  # the central square
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels.astype(np.uint16) * 256)
    if mode not in {"png": ("RGB", "L", "P", "RGBA", "I;16"), "webp": ("RGB", "RGBA"), "jpg": ("RGB", "L")}[suffix]:
        pytest.skip("the format has no such mode")
    file = tmp_path / f"one.{suffix}"
    (image if mode == "I;16" else image.convert(mode)).save(file)
    found = data.ImageForm.plain(8).pixels(file.read_bytes(), "one")
    assert found.shape == (3, 8, 8) and abs(found[..., 1:-1].astype(int) - 200).max() <= 12


def test_an_image_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "one.png", exif=exif)
    found = data.ImageForm.plain(16).pixels((tmp_path / "one.png").read_bytes(), "one")
    assert found[0, 0, 0] == 0 and found[0, 15, 0] == 255


def test_errors_of_your_own_folder_say_what_is_wrong(tmp_path: Path) -> None:
    pets = data.Classes(names=("cat", "dog"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"'.*empty' is not a dataset of images: put train and test into it"):
        data.load(str(tmp_path / "empty"), target=pets)
    write_folder(tmp_path / "own", {"cat": 16, "dog": 16})
    (tmp_path / "own" / "train" / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="an image of 'own' cannot be decoded: correct the file"):
        data.load(str(tmp_path / "own"), target=pets)
    (tmp_path / "own" / "train" / "cat" / "0.png").unlink()
    (tmp_path / "own" / "test" / "dog").rename(tmp_path / "own" / "test" / "hog")
    with pytest.raises(ValueError, match="has a label that is not one of cat, dog: give all possible") as refused:
        data.load(str(tmp_path / "own"), target=pets)
    assert "hog" not in str(refused.value)
    with pytest.raises(ValueError, match="the classes of 'mnist' are fixed"):
        data.load("mnist", target=pets)


def test_metadata_labels_your_own_images_with_several_labels_or_numbers(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for split in data.SPLITS:
        (own / split).mkdir(parents=True)
        rows = ["file_name,signs,age"]
        for index, signs in enumerate(("mass", "", "mass|node")):
            Image.fromarray(np.full((9, 9), 40 * index, np.uint8)).save(own / split / f"{index}.png")
            rows.append(f"{index}.png,{signs},{20 * index}")
        (own / split / "metadata.csv").write_text("\n".join(rows) + "\n")
    signs = data.load(str(own), target=data.LabelSet(names=("mass", "node")), label_column="signs")
    assert signs.train.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    ages = data.load(str(own), target=data.ValueRange(low=0, high=40), label_column="age")
    assert ages.test.labels.tolist() == [-1, 0, 1]
    with pytest.raises(ValueError, match=r"has no column 'label', only 'file_name', 'signs', 'age': give one of them"):
        data.load(str(own), target=data.LabelSet(names=("mass", "node")))
    (own / "test" / "2.png").unlink()
    with pytest.raises(ValueError, match="names a file that does not exist"):
        data.load(str(own), target=data.LabelSet(names=("mass", "node")), label_column="signs")


def test_a_row_of_metadata_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metadata.csv").write_text("label,file_name\ncat\n")
    with pytest.raises(ValueError, match="has another number of cells than its header"):
        data.load(str(tmp_path), target=data.Classes(names=("cat", "dog")))


def test_a_link_to_a_folder_of_images_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "own", {"cat": 16, "dog": 16})
    (tmp_path / "own" / "train" / "cat" / "ann").symlink_to(tmp_path / "own" / "test" / "cat")
    with pytest.raises(ValueError, match="has a link to a folder in the folder of a class: put the folder itself"):
        data.load(str(tmp_path / "own"), target=data.Classes(names=("cat", "dog")))


@pytest.mark.slow
def test_packaged_data_loads_quickly() -> None:
    start = time.perf_counter()
    data.load()
    assert time.perf_counter() - start < 5
