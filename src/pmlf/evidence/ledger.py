"""The privacy ledger: every release on a dataset, written to the disk before the release happens.

`pmlf.evidence.ledger_format` describes the file.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from filelock import lock_descriptor

from pmlf.basics.files import sync_folder, unwritable
from pmlf.evidence.ledger_format import digest, event_text, header, line, parse, session_text
from pmlf.evidence.tally import Session, Tally

_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a ledger: the number of lines, and the digest of the last one."""

    lines: int
    digest: str


class Ledger:
    """A ledger that one run has open for writing. No other run can open it until `close`.

    Guarantees:

    - When `spend` returns, the event is on the disk, in the file that the path names. Release after it, never before.
    - A file that is deleted, replaced or changed while it is open is refused.
    - An incomplete last line (the machine stopped during the write) counts as an event. Other damage is refused.
    - A new file is readable and writable by its owner only (mode 0600): it contains no records, but whoever can write
      to it controls what may be spent. `chmod` shares it, and the ledger keeps the changed mode.

    The path may be a symbolic link, as long as it leads to the same file. The lock belongs to the file, not to its
    name, and ends with the process. On Windows no other program can read the file while a run has it open.

    Args:
        path: the file; created if it does not exist.
        dataset: the name of the dataset. A ledger of another dataset is refused.
        run: the name of the run; a random one by default.

    Raises:
        ValueError: the file is in use, damaged, of another dataset, or not a regular file.
        OSError: the file cannot be written or locked.

    >>> import tempfile
    >>> from pmlf.evidence.tally import PrivacyPlan, RunStart
    >>> from pmlf.mechanism.accounting import Event
    >>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
    >>> event = Event(noise_multiplier=1.0, sample_rate=0.1)
    >>> plan = PrivacyPlan(event=event, steps=9, delta=1e-5, target_epsilon=None)
    >>> session = Session(start=RunStart(run="first", beginning="only", plan=plan), replayable=False)
    >>> with Ledger(path, dataset="patients") as ledger:
    ...     ledger.spend(session, step=0)
    >>> read(path, dataset="patients").events
    Counter({Event(noise_multiplier=1.0, sample_rate=0.1, overflow=0.0): 1})
    """

    on_disk = True

    def __init__(self, path: Path | str, *, dataset: str, run: str | None = None) -> None:
        self.path = Path(path)
        self._place = self.path.absolute()  # the working directory may change
        self.dataset = dataset
        self.run = run or secrets.token_hex(8)
        self._session: Session | None = None
        self._broken = True  # until the file is open and read
        self._size = 0
        self._descriptor = self._open()
        try:
            self._require_place()
            content = _read(self._descriptor, os.fstat(self._descriptor).st_size, 0)
            first = line(header(dataset), "")
            if first.startswith(content):  # a new file, or one with an incomplete first line
                self._write(first)
                content = first
                sync_folder(self.path.parent)
            contents = parse(content, self.path, dataset)
            self.tally, self._digests = contents.tally, contents.digests
            self._size = contents.whole_bytes
            if contents.cut_short:
                self._complete()
            self._broken = False
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> None:
        raise TypeError("a ledger is an open file and cannot be copied or pickled: open it again by its path")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def position(self) -> Position:
        """The end of the ledger, to store in a checkpoint and to pass to `require` after a restart."""
        return Position(lines=len(self._digests), digest=self._digests[-1])

    def require(self, position: Position) -> None:
        """Verify that this ledger contains a saved position, and so every event up to it.

        Args:
            position: `position` of the ledger when the state was saved.

        Raises:
            ValueError: the ledger is shorter, or it is another ledger.
        """
        if position.lines > len(self._digests):
            raise ValueError(
                f"the ledger {str(self.path)!r} has {len(self._digests)} lines and had {position.lines} when the state "
                "was saved: events are missing, restore the complete file"
            )
        if position.lines < 1 or self._digests[position.lines - 1] != position.digest:
            raise ValueError(
                f"the ledger {str(self.path)!r} is not the one that the saved state belongs to: give that ledger"
            )

    def spend(self, session: Session, *, step: int) -> None:
        """Record an event before its release. When this returns, the event is on the disk.

        Args:
            session: the run, with its mechanism and plan.
            step: the step that is about to be released, from 0.

        Raises:
            RuntimeError: the ledger is closed, an earlier write failed, or the file was deleted, replaced or changed.
            OSError: the event cannot be written. Open the ledger again before the next event.
        """
        if self._broken or self._descriptor < 0:
            raise RuntimeError(
                f"the ledger {str(self.path)!r} is closed, or a write to it failed: open it again before spending"
            )
        self._require_unchanged()
        texts = [event_text(step)]
        begins = not session.continues(self._session)
        if begins:
            texts.insert(0, session_text(replace(session, first_step=step)))
        digests = self._digests[-1:]
        for text in texts:
            digests.append(digest(text, digests[-1]))
        self._write(b"".join(line(text, before) for text, before in zip(texts, digests, strict=False)))
        self._require_unchanged(last=digests[-1])
        if begins:
            self._session = session
            self.tally.begin(session)
        self.tally.add(step)
        self._digests += digests[1:]
        self._broken = False

    def _open(self) -> int:
        try:
            descriptor = os.open(self._place, os.O_RDWR | os.O_CREAT | _BINARY, 0o600)
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{str(self.path)!r} is not a regular file and cannot store events: give another path")
        _lock(self.path, descriptor)
        return descriptor

    def _require_place(self) -> None:
        """Raise if the path names no file, or not the open one."""
        try:
            named = os.stat(self._place)
        except OSError:
            named = None
        held = os.fstat(self._descriptor)
        if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise RuntimeError(
                f"the ledger {str(self.path)!r} was deleted, moved or replaced while this run had it open, so the next "
                "run would not see its events. The step is not released: put the file back in its place"
            )

    def _require_unchanged(self, *, last: str | None = None) -> None:
        """Raise if the file is not in its place, or if another program has written to it."""
        self._require_place()
        end = f"{last or self._digests[-1]}\n".encode()
        same_end = _read(self._descriptor, len(end), max(self._size - len(end), 0)) == end
        if os.fstat(self._descriptor).st_size != self._size or not same_end:
            self._broken = True
            raise RuntimeError(
                f"the ledger {str(self.path)!r} was changed by another program while this run had it open. The step is "
                "not released: restore the file and resume from a checkpoint"
            )

    def _complete(self) -> None:
        """Replace an incomplete last line by the event that it stands for."""
        step = self.tally.unfinished_step()
        if step is not None:
            text = event_text(step)
            self._write(line(text, self._digests[-1]))
            self._digests.append(digest(text, self._digests[-1]))
            self.tally.add(step)
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def _write(self, content: bytes) -> None:
        self._broken = True  # until everything is on the disk and counted, also after an interruption
        size = self._size + len(content)
        try:
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._size = size


def refuse_in_use(path: Path) -> None:
    """Raise ValueError if a run has this ledger open."""
    descriptor = os.open(path, os.O_RDWR | _BINARY)
    _lock(path, descriptor)
    os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    """Take the file's lock, which ends when the descriptor is closed; close it if another run holds the lock."""
    try:
        free = lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        os.close(descriptor)
        raise type(error)(
            f"{str(path)!r} cannot be locked ({error.strerror}): give a path on a file system with locks"
        ) from error
    if not free:
        os.close(descriptor)
        raise ValueError(f"the ledger {str(path)!r} is in use by another run: wait until it ends")


def _read(descriptor: int, length: int, offset: int) -> bytes:
    """Bytes at an offset, as `os.pread` reads them where there is one: not on Windows."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    pieces = []
    while length and (piece := os.read(descriptor, length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def read(path: Path | str, *, dataset: str | None = None) -> Tally:
    """Count the events of a ledger without writing to it, also while a run has it open (not on Windows).

    Args:
        path: the ledger.
        dataset: refuse a ledger of another dataset; None accepts any.

    Returns:
        The events by run and by mechanism.

    Raises:
        ValueError: the file is damaged, not a ledger, or of another dataset.
        OSError: the file cannot be read.
    """
    contents = parse(Path(path).read_bytes(), Path(path), dataset)
    step = contents.tally.unfinished_step()
    if contents.cut_short and step is not None:
        contents.tally.add(step)
    return contents.tally
