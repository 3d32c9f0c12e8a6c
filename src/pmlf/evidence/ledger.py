"""The privacy ledger: what is about to be spent on a dataset, on the disk before it is spent.

One line an event, one event a noisy gradient. A line is JSON and a digest chained to the line before, so that
nothing in the middle can change or go missing unnoticed:

    {"ledger": 2, "dataset": "patients"} 5f0c...
    {"run": "b1946ac9", "beginning": "77de68da", "sample_rate": 0.01, "noise_multiplier": 1.1, ...} 02d4...
    {"step": 0} 9d5e...
    {"step": 1} 4c1b...

The events that follow a run's line are that run's; a resumed run writes its line again. The digests have no key: they
detect accidents, not forgers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from pmlf.basics.files import sync_folder, unwritable
from pmlf.evidence.tally import Session, Tally

_VERSION = 2
_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a ledger: so many lines, the last with this digest."""

    lines: int
    digest: str


class Ledger:
    """A ledger open for one run, which alone may write to it until `close`.

    `spend` returns when the event is on the disk, in the file that the path names: release after it, never before. A
    file that was deleted, replaced or changed by others in the meantime is refused. A last line that was cut short (the
    machine stopped while it was written) counts as an event; damage anywhere else is refused.

    A new file is its owner's alone (0600): it holds no records, but who writes to it decides what may be spent. To
    share it is a choice (`chmod`), which is kept. The path may be a symbolic link that keeps leading to the same file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
    >>> session = Session(run="first", beginning="only", sample_rate=0.1, noise_multiplier=1.0, planned_steps=9,
    ...                   target_epsilon=None, delta=1e-5, replayable=False, first_step=0)
    >>> with Ledger(path, dataset="patients") as ledger:
    ...     ledger.spend(session, step=0)
    >>> read(path, dataset="patients").events
    Counter({Event(noise_multiplier=1.0, sample_rate=0.1): 1})
    """

    def __init__(self, path: Path | str, *, dataset: str, run: str | None = None) -> None:
        self.path = Path(path)
        self._place = self.path.absolute()  # whatever the working folder is later
        self.dataset = dataset
        self.run = run or secrets.token_hex(8)
        self._session: Session | None = None
        self._broken = True  # until it is open
        self._size = 0
        self._descriptor = self._open()
        try:
            self._require_place()
            content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
            header = _line(_header(dataset), "")
            if header.startswith(content):  # a new file, or one whose maker was stopped at its first line
                self._write(header)
                content = header
                sync_folder(self.path.parent)
            contents = _parse(content, self.path, dataset)
            self.tally, self._digests = contents.tally, contents.digests
            os.lseek(self._descriptor, contents.whole_bytes, os.SEEK_SET)
            if contents.cut_short:
                self._complete()
            self._size = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            self._broken = False
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> None:
        raise TypeError("a ledger is one open file: it cannot be copied or pickled, open it again by its path")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another run write; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def position(self) -> Position:
        return Position(lines=len(self._digests), digest=self._digests[-1])

    def require(self, position: Position) -> None:
        """Refuse a ledger that is not the one, or a continuation of it, that had this position."""
        if position.lines > len(self._digests):
            raise ValueError(
                f"the ledger {str(self.path)!r} has {len(self._digests)} lines where the saved state saw "
                f"{position.lines}: events are missing, so put the ledger back as it was"
            )
        if position.lines < 1 or self._digests[position.lines - 1] != position.digest:
            raise ValueError(
                f"the ledger {str(self.path)!r} is not the one that the saved state was written with: give that one"
            )

    def spend(self, session: Session, *, step: int) -> None:
        """Record that `step` of a session is about to be released; it is on the disk when this returns.

        Raises:
            RuntimeError: the path no longer names the file that this run has open and left as it is.
        """
        if self._broken or self._descriptor < 0:
            raise RuntimeError(
                f"the ledger {str(self.path)!r} could not be written to, or is closed: open it again before spending"
            )
        self._require_unchanged()
        texts = [json.dumps({"step": step})]
        begins = not session.continues(self._session)
        if begins:
            texts.insert(0, json.dumps(asdict(replace(session, first_step=step))))
        digests = self._digests[-1:]
        for text in texts:
            digests.append(_digest(text, digests[-1]))
        self._write(b"".join(_line(text, before) for text, before in zip(texts, digests, strict=False)))
        self._require_unchanged(last=digests[-1])
        if begins:
            self._session = session
            self.tally.begin(session)
        self.tally.add(step)
        self._digests += digests[1:]
        self._broken = False

    def _open(self) -> int:
        try:
            descriptor = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{str(self.path)!r} is not a regular file, so it keeps no events: give another path")
        return _locked(self.path, descriptor)

    def _require_place(self) -> None:
        """Refuse to go on if the path names no file, or another one than is open."""
        try:
            named = os.stat(self._place)
        except OSError:
            named = None
        held = os.fstat(self._descriptor)
        if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise RuntimeError(
                f"the ledger {str(self.path)!r} was deleted, moved or replaced while this run had it open, so the next "
                "run there would not see what this one spends: put the file back in its place; the step is not released"
            )

    def _require_unchanged(self, *, last: str | None = None) -> None:
        """Refuse to go on if the file is not where it was, or somebody else has written to it."""
        self._require_place()
        end = f"{last or self._digests[-1]}\n".encode()
        same_end = os.pread(self._descriptor, len(end), max(self._size - len(end), 0)) == end
        if os.fstat(self._descriptor).st_size != self._size or not same_end:
            self._broken = True
            raise RuntimeError(
                f"the ledger {str(self.path)!r} was changed by somebody else while this run had it open: put it back "
                "as it was, and go on from a saved state; the step is not released"
            )

    def _complete(self) -> None:
        """Write the event that a line cut short stood for over what there is of it."""
        step = self.tally.unfinished_step()
        if step is not None:
            text = json.dumps({"step": step})
            self._write(_line(text, self._digests[-1]))
            self._digests.append(_digest(text, self._digests[-1]))
            self.tally.add(step)
        os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR))
        os.fsync(self._descriptor)

    def _write(self, content: bytes) -> None:
        self._broken = True  # until all of it is on the disk and counted, whatever stops it
        size = self._size + len(content)
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._size = size


def refuse_in_use(path: Path) -> None:
    """Raise if another run holds this ledger now."""
    os.close(_locked(path, os.open(path, os.O_RDWR)))


def _locked(path: Path, descriptor: int) -> int:
    """The descriptor, once it holds the file's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f"the ledger {str(path)!r} is in use by another run: wait until that one has ended") from error
    return descriptor


def read(path: Path | str, *, dataset: str | None = None) -> Tally:
    """What a ledger says was spent, without writing to it; `dataset` refuses a ledger of another one."""
    contents = _parse(Path(path).read_bytes(), Path(path), dataset)
    step = contents.tally.unfinished_step()
    if contents.cut_short and step is not None:
        contents.tally.add(step)
    return contents.tally


@dataclass(frozen=True, kw_only=True)
class _Contents:
    tally: Tally
    digests: list[str]
    whole_bytes: int  # up to the end of the last line that is whole
    cut_short: bool  # whether something follows it


def _parse(content: bytes, path: Path, dataset: str | None) -> _Contents:
    tally, digests, whole_bytes = Tally(), [""], 0
    for number, (line, last) in enumerate(_lines(content), start=1):
        document = _document(line, digests[-1])
        if document is None:
            if last and number > 1 and _is_one_line(line):
                break
            raise ValueError(
                f"line {number} of the ledger {str(path)!r} is damaged: put the file back as it was, since what was "
                "spent cannot be told from it"
            )
        try:
            _apply(document, tally, first=number == 1, dataset=dataset)
        except _Refused as refused:
            raise ValueError(f"line {number} of the ledger {str(path)!r} {refused}") from refused
        digests.append(line[-2 * _DIGEST_BYTES - 1 : -1].decode())
        whole_bytes += len(line)
    if whole_bytes == 0:
        raise ValueError(f"{str(path)!r} is empty, and no ledger: give another file")
    return _Contents(tally=tally, digests=digests[1:], whole_bytes=whole_bytes, cut_short=whole_bytes < len(content))


def _lines(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Each line with its end, and whether it is the last."""
    lines = content.split(b"\n")
    rest = lines.pop()
    whole = [line + b"\n" for line in lines] + ([rest] if rest else [])
    for number, line in enumerate(whole, start=1):
        yield line, number == len(whole)


def _is_one_line(damaged: bytes) -> bool:
    """Whether this can be what is left of one line, and not of two that have lost the end of the first."""
    return damaged.count(b"{") <= 1 and len(damaged.partition(b"} ")[2]) <= 2 * _DIGEST_BYTES + 1


def _document(line: bytes, before: str) -> dict[str, Any] | None:
    """A line's JSON object; None if the line is not whole and as it was written."""
    try:
        text, space, digest = line.decode().rpartition(" ")
        if not space or digest != _digest(text, before) + "\n":
            return None
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


class _Refused(Exception):
    """Why a line cannot stand where it stands."""


def _apply(document: Mapping[str, Any], tally: Tally, *, first: bool, dataset: str | None) -> None:
    if first:
        if set(document) != {"ledger", "dataset"} or document["ledger"] != _VERSION:
            raise _Refused("is not the first line of a ledger of this version: give another file")
        if dataset is not None and document["dataset"] != dataset:
            raise _Refused(
                f"says that it is of the dataset {document['dataset']!r}, not of {dataset!r}: a dataset has its own"
            )
    elif set(document) == {"step"}:
        if tally.unfinished_step() is None or not _is_count(document["step"]):
            raise _Refused("is not an event of a run that has begun")
        tally.add(document["step"])
    else:
        tally.begin(_session(document))


def _session(document: Mapping[str, Any]) -> Session:
    try:
        session = Session(**document)
    except TypeError as error:
        raise _Refused("is neither a run nor an event") from error
    target = () if session.target_epsilon is None else (session.target_epsilon,)
    numbers = (session.sample_rate, session.noise_multiplier, session.delta, *target)
    if not (
        isinstance(session.run, str)
        and isinstance(session.beginning, str)
        and isinstance(session.replayable, bool)
        and all(isinstance(number, (int, float)) and math.isfinite(number) and number > 0 for number in numbers)
        and session.sample_rate <= 1
        and session.delta < 1
        and _is_count(session.planned_steps)
        and _is_count(session.first_step)
    ):
        raise _Refused("is a run with impossible numbers")
    return session


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _header(dataset: str) -> str:
    return json.dumps({"ledger": _VERSION, "dataset": dataset})


def _line(text: str, before: str) -> bytes:
    return f"{text} {_digest(text, before)}\n".encode()


def _digest(text: str, before: str) -> str:
    return hashlib.blake2b((before + text).encode(), digest_size=_DIGEST_BYTES).hexdigest()
