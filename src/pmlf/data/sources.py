"""The files of a dataset, from the hub, a folder with its layout, or your own, and the columns in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pmlf.basics.hub import snapshot
from pmlf.data.cache import digest
from pmlf.data.catalogue import DEFAULT
from pmlf.data.cells import READERS as TEXT_READERS
from pmlf.data.cells import Refused, Rows
from pmlf.data.targets import GIVE_LABELS

DATA_DIR_VARIABLE = "PMLF_DATA"
ROWS_PER_READ = 1000
AGAIN = "download the files from the hub again"
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-(?P<shards>\d{5})")
READERS = (".parquet", *TEXT_READERS)
READING = 2  # part of the cache keys of tables: increase it if the same file gives other cells


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of each split, and the name and the advice for errors about them."""

    name: str
    files: Mapping[str, Sequence[Path]]  # by split
    advice: str = AGAIN

    @property
    def label_advice(self) -> str:
        """What to do about a label that was not declared."""
        return self.advice if self.advice == AGAIN else GIVE_LABELS

    def files_of(self, split: str) -> Sequence[Path]:
        """The files of a split. Raises ValueError if there is none."""
        if split not in self.files:
            raise ValueError(f"{self.name!r} has no split {split!r}, only {_listed(sorted(self.files))}: {self.advice}")
        return self.files[split]

    def digest(self, split: str, *also: Any) -> str:
        """A cache key for what is computed from the files of a split and the constants `also`."""
        return digest(self.files_of(split), *also)

    def tables(self, split: str, columns: Mapping[str, str | None]) -> Iterator[dict[str, list[Any]]]:
        """The required columns of a split, some rows at a time. Images stay encoded.

        Args:
            split: Name of the split.
            columns: Required columns, each with the option that names it, or None if it is fixed.

        Raises:
            ValueError: If a file cannot be read, a column is missing, or there are no rows.
        """
        count = 0
        try:
            for rows in self._rows(self.files_of(split)):
                for column, option in columns.items():
                    if column not in rows.names:
                        advice = self.advice if option is None else f"give one of them as {option}"
                        raise Refused(f"{self.name!r} has no column {column!r}, only {_listed(rows.names)}: {advice}")
                count += rows.count
                yield {column: rows.column(column) for column in columns}
            if count == 0:
                raise Refused(f"{self.name!r} has no records in {split!r}: {self.advice}")
        except Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # its class depends on the reader
            # without the reader's message, which may quote a record
            raise ValueError(
                f"a file of {self.name!r} cannot be read: {self.advice} ({type(error).__name__})"
            ) from None

    def _rows(self, files: Sequence[Path]) -> Iterator[Rows]:
        if files[0].suffix == ".parquet":
            yield from self._from_parquet(files)
            return
        for file in files:
            yield from TEXT_READERS[file.suffix](file, ROWS_PER_READ)

    def _from_parquet(self, files: Sequence[Path]) -> Iterator[Rows]:
        """A parquet file states the types of its columns, so none is inferred from the records."""
        rows = _load_dataset(self.name)(
            "parquet",
            data_files=[str(file) for file in files],
            split="train",
            streaming=True,  # reads in place, without a copy in the cache of `datasets`
            trust_remote_code=False,
        )
        for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_READ):
            yield Rows(names=table.column_names, count=table.num_rows, column=partial(_arrow_cells, table))


def _arrow_cells(table: Any, name: str) -> list[Any]:
    found: list[Any] = table.column(name).to_pylist()
    return found


def hub_source(hub_id: str, data_dir: str | Path | None = None, config: str = "") -> Source:
    """The parquet files of a hub dataset: in `data_dir` or PMLF_DATA if given, otherwise from the hub or its cache.

    Args:
        hub_id: Id of the dataset, such as "ylecun/mnist".
        data_dir: Folder with the layout of the hub. None: the folder in PMLF_DATA, if it is set.
        config: Folder of a configuration within the dataset.

    Raises:
        ValueError: If files are missing, or the hub cannot be reached.
    """
    root = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    folder = Path(root) / hub_id if root else _downloaded(hub_id, config)
    name = f"{hub_id}/{config}" if config else hub_id
    found = sorted((folder / config).glob("**/*.parquet"))
    if root and not found:
        raise ValueError(
            f"data folder {str(root)!r} has no parquet file under {name}: put the files from the hub there, or give "
            f"neither data_dir nor {DATA_DIR_VARIABLE} to download them"
        )
    return Source(name=name, files=_by_split(name, found))


def own_source(path: Path, split: str = "train") -> Source:
    """Your own table. A file is the given split; a folder has one file per split, such as train.csv and test.csv.

    Raises:
        ValueError: If the path is missing, or has no table for the split.
    """
    kinds = ", ".join(READERS)
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist: give the path of a {kinds} file, or of a folder of such files")
    if path.is_file() and path.suffix in READERS:
        return Source(name=path.name, files={split: [path]}, advice="correct the file")
    files = {file.stem: [file] for file in sorted(path.glob("*")) if file.suffix in READERS} if path.is_dir() else {}
    if split not in files:
        raise ValueError(
            f"{str(path)!r} is not a table: give a {kinds} file, or a folder with train and test files of these kinds"
        )
    return Source(name=path.name, files=files, advice="correct the files")


def _by_split(name: str, paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split, from names like `train-00000-of-00002.parquet`. Raises ValueError if a shard is missing."""
    files: dict[str, list[Path]] = {}
    for path in paths:
        shard = _SHARD.fullmatch(path.stem)
        files.setdefault(shard["split"] if shard else path.stem, []).append(path)
    for split, found in files.items():
        shard = _SHARD.fullmatch(found[0].stem)
        expected = int(shard["shards"]) if shard else 1
        if len(found) != expected:
            raise ValueError(f"{name!r} has {len(found)} of the {expected} files of {split!r}: {AGAIN}")
    return files


def _load_dataset(name: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise Refused(
            f"reading {name!r} needs the package datasets: pip install 'dp-pmlf[data]', "
            f"or choose {DEFAULT!r}, which comes with pmlf"
        ) from error
    return load_dataset


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _downloaded(hub_id: str, config: str) -> Path:
    instead = (
        f"give data_dir or {DATA_DIR_VARIABLE}, a folder that holds {hub_id}, or choose {DEFAULT!r}, which comes with "
        "pmlf"
    )
    patterns = [f"{config}/*.parquet" if config else "*.parquet"]
    return snapshot(hub_id, "dataset", patterns, extra="data", instead=instead)
