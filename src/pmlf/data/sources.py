"""Where records come from: files of the hub, of a folder laid out like it, or of one's own; read by `datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmlf.basics.hub import snapshot
from pmlf.data.cache import digest
from pmlf.data.catalogue import DEFAULT

DATA_DIR_VARIABLE = "PMLF_DATA"
ROWS_PER_READ = 1000
AGAIN = "fetch the hub's files again"
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-(?P<shards>\d{5})")
_READERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a dataset's splits, with the name and the advice that errors about them give."""

    name: str
    files: Mapping[str, Sequence[Path]]  # by split
    advice: str = AGAIN

    def files_of(self, split: str) -> Sequence[Path]:
        if split not in self.files:
            raise ValueError(f"{self.name!r} has splits {sorted(self.files)} but no {split!r}: {self.advice}")
        return self.files[split]

    def digest(self, split: str, *also: Any) -> str:
        """A name for what is made of a split's files and of the constants `also`."""
        return digest(self.files_of(split), *also)

    def tables(self, split: str, columns: Sequence[str]) -> Iterator[Any]:
        """A split's rows as Arrow tables with at least these columns; images stay encoded."""
        files = self.files_of(split)
        reader = _READERS[files[0].suffix]
        options = {"sep": "\t"} if files[0].suffix == ".tsv" else {}
        load_dataset = _load_dataset(self.name)
        try:  # streaming: read in place, without a second copy in a cache of the library
            rows = load_dataset(
                reader,
                data_files=[str(file) for file in files],
                split="train",
                streaming=True,
                trust_remote_code=False,
                **options,
            )
            yield from self._checked(split, rows.with_format("arrow").iter(batch_size=ROWS_PER_READ), columns)
        except _Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # whose class depends on the reader: Arrow's, pandas's, the library's own
            # what a reader says may quote a record
            raise ValueError(
                f"a file of {self.name!r} cannot be read: {self.advice} ({type(error).__name__})"
            ) from None

    def _checked(self, split: str, tables: Iterator[Any], columns: Sequence[str]) -> Iterator[Any]:
        rows = 0
        for table in tables:
            rows += table.num_rows
            for column in columns:
                if column not in table.column_names:
                    raise _Refused(f"{self.name!r} has columns {table.column_names} but no {column!r}: {self.advice}")
            yield table
        if rows == 0:
            raise _Refused(f"{self.name!r} has no record in {split!r}: {self.advice}")


class _Refused(Exception):
    """What was read can be read, and is not what is needed: a sentence of its own."""


def hub_source(hub_id: str, data_dir: str | Path | None = None, config: str = "") -> Source:
    """A hub dataset's parquet files: from `data_dir` or PMLF_DATA if given, otherwise from the hub or its cache."""
    root = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    folder = Path(root) / hub_id if root else _downloaded(hub_id, config)
    name = f"{hub_id}/{config}" if config else hub_id
    found = sorted((folder / config).glob("**/*.parquet"))
    if root and not found:
        raise ValueError(
            f"data folder {str(root)!r} has no parquet file under {name}: put the hub's files there, "
            f"or give neither data_dir nor {DATA_DIR_VARIABLE} to have them downloaded"
        )
    return Source(name=name, files=_by_split(name, found))


def own_source(path: Path) -> Source:
    """One's own table: a file is the split `train`; a folder has a file a split, such as train.csv and test.csv."""
    advice = f"give a {', '.join(_READERS)} file, or a folder with train and test files of one of these kinds"
    if path.is_file() and path.suffix in _READERS:
        return Source(name=path.name, files={"train": [path]}, advice="mend the file")
    files = {file.stem: [file] for file in sorted(path.glob("*")) if file.suffix in _READERS} if path.is_dir() else {}
    if "train" not in files:
        raise ValueError(f"{str(path)!r} is no table of training records: {advice}")
    return Source(name=path.name, files=files, advice="mend the files")


def _by_split(name: str, paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Files grouped as the hub names them, `train-00000-of-00002.parquet`; none of a split may be missing."""
    files: dict[str, list[Path]] = {}
    for path in paths:
        shard = _SHARD.fullmatch(path.stem)
        files.setdefault(shard["split"] if shard else path.stem, []).append(path)
    for split, found in files.items():
        shard = _SHARD.fullmatch(found[0].stem)
        expected = int(shard["shards"]) if shard else 1
        if len(found) != expected:
            raise ValueError(f"{name!r} has {len(found)} files of {split!r} where there should be {expected}: {AGAIN}")
    return files


def _load_dataset(name: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"reading {name!r} needs the package datasets: pip install 'dp-pmlf[data]', "
            f"or choose {DEFAULT!r}, which needs nothing"
        ) from error
    return load_dataset


def _downloaded(hub_id: str, config: str) -> Path:
    instead = (
        f"give data_dir or {DATA_DIR_VARIABLE}, a folder that holds {hub_id}, choose {DEFAULT!r}, which needs nothing"
    )
    patterns = [f"{config}/*.parquet" if config else "*.parquet"]
    return snapshot(hub_id, "dataset", patterns, extra="data", instead=instead)
