"""The ledger: events are on the disk before their release, and no damage to the file makes it count less."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import lock_descriptor

from pmlf.evidence import ledger
from pmlf.evidence.ledger import Ledger, Position
from pmlf.evidence.ledger_format import header, line, session_text
from pmlf.evidence.tally import PrivacyPlan, RunStart, Session
from pmlf.mechanism.accounting import Event

PLAN = PrivacyPlan(event=Event(noise_multiplier=1.5, sample_rate=0.1), steps=10, delta=1e-5, target_epsilon=None)


def session(*, run: str, beginning: str = "a beginning", plan: PrivacyPlan = PLAN, replayable: bool = False) -> Session:
    return Session(start=RunStart(run=run, beginning=beginning, plan=plan), replayable=replayable)


FRESH = session(run="fresh")
SEEDED = session(run="seeded", replayable=True)


def written(path: Path, *sessions: tuple[Session, list[int]]) -> Path:
    for each, steps in sessions:
        with Ledger(path, dataset="patients", run=each.start.run) as book:
            for step in steps:
                book.spend(each, step=step)
    return path


def total(path: Path) -> int:
    return sum(ledger.read(path, dataset="patients").events.values())


def test_what_was_spent_is_read_back(tmp_path: Path) -> None:
    event = Event(noise_multiplier=2.0, sample_rate=0.1)
    other = session(run="other", plan=replace(PLAN, event=event))
    path = written(tmp_path / "l", (FRESH, [0, 1, 2]), (other, [0, 1]), (FRESH, [3]))
    tally = ledger.read(path, dataset="patients")
    assert tally.events == {PLAN.event: 4, event: 2}
    assert [(start.run, count) for start, count in tally.starts.items()] == [("fresh", 4), ("other", 2)]


def test_a_fresh_step_done_again_counts_again_and_a_seeded_one_once(tmp_path: Path) -> None:
    assert total(written(tmp_path / "fresh", (FRESH, [0, 1, 2]), (FRESH, [1, 2, 3]))) == 6
    assert total(written(tmp_path / "seeded", (SEEDED, [0, 1, 2]), (SEEDED, [1, 2, 3]))) == 4
    longer = session(run="seeded", plan=replace(PLAN, steps=20), replayable=True)
    assert total(written(tmp_path / "longer", (SEEDED, [0, 1, 2]), (longer, [1, 2, 3]))) == 4
    stranger = session(run="stranger", replayable=True)  # the same step of another run is another event
    assert total(written(tmp_path / "two", (SEEDED, [0, 1]), (stranger, [0, 1]))) == 4
    anew = session(run="seeded", beginning="another", replayable=True)  # and so is the same step after a new beginning
    assert total(written(tmp_path / "anew", (SEEDED, [0, 1]), (anew, [0, 1]))) == 4


def test_an_event_is_on_the_disk_when_spend_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []

    def note(descriptor: int) -> None:
        synced.append(os.pread(descriptor, 1 << 20, 0))

    with Ledger(tmp_path / "l", dataset="patients", run="fresh") as book:
        monkeypatch.setattr(os, "fsync", note)
        for step in range(3):
            book.spend(FRESH, step=step)
            assert synced[-1] == (tmp_path / "l").read_bytes() and b'{"step": %d}' % step in synced[-1]


@pytest.mark.parametrize("spending", [FRESH, SEEDED])
def test_a_line_cut_short_anywhere_is_counted(tmp_path: Path, spending: Session) -> None:
    path = written(tmp_path / "l", (spending, [0, 1, 2]))
    content = path.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last + 1, len(content)):
        path.write_bytes(content[:end])
        assert total(path) == 3
        with Ledger(path, dataset="patients", run=spending.start.run) as book:  # which completes the line
            assert sum(book.tally.events.values()) == 3
            book.spend(spending, step=2)
        assert total(path) == (3 if spending.replayable else 4)


def test_a_run_s_own_line_cut_short_counts_as_an_event_of_the_run_before(tmp_path: Path) -> None:
    path = written(tmp_path / "l", (FRESH, [0]))
    path.write_bytes(path.read_bytes() + b'{"run": "fre')
    assert total(path) == 2
    path = written(tmp_path / "s", (SEEDED, list(range(10))))
    path.write_bytes(path.read_bytes() + b'{"run": "see')
    assert total(path) == 10  # a seeded run has no step beyond its plan


def test_the_maker_of_a_ledger_may_be_stopped_at_its_first_line(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", (FRESH, [])).read_bytes()
    for end in range(len(whole)):
        (tmp_path / "l").write_bytes(whole[:end])
        assert total(written(tmp_path / "l", (FRESH, [0]))) == 1


def test_only_one_run_writes_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l", dataset="patients"):
        with pytest.raises(ValueError, match="is in use by another run"):
            Ledger(tmp_path / "l", dataset="patients")
        assert total(tmp_path / "l") == 0  # reading needs no lock
    book = Ledger(tmp_path / "l", dataset="patients")
    book.close()
    book.close()
    with pytest.raises(RuntimeError, match="closed"):
        book.spend(FRESH, step=0)
    with (tmp_path / "l").open() as file:
        assert lock_descriptor(file.fileno(), blocking=False)


_HOLD = """
import sys, time
from pmlf.evidence.ledger import Ledger
with Ledger(sys.argv[1], dataset="patients"):
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_lock_holds_between_processes_and_ends_with_a_killed_one(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD, tmp_path / "l"], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match="is in use by another run"):
            Ledger(tmp_path / "l", dataset="patients")
        with pytest.raises(ValueError, match="is in use by another run"):
            ledger.refuse_in_use(tmp_path / "l")
        holder.send_signal(signal.SIGKILL)
    ledger.refuse_in_use(tmp_path / "l")
    assert total(written(tmp_path / "l", (FRESH, [0]))) == 1


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(ledger, "lock_descriptor", unsupported)
    with pytest.raises(OSError, match=r"cannot be locked \(Function not implemented\): give a path"):
        Ledger(tmp_path / "l", dataset="patients")


def test_the_ledger_needs_nothing_of_os_that_windows_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pread", "pwrite", "O_CLOEXEC", "fchmod", "fork"):
        monkeypatch.delattr(os, name)
    assert total(written(tmp_path / "l", (FRESH, [0, 1]), (SEEDED, [0]))) == 3


def test_another_dataset_s_ledger_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "l", (FRESH, [0]))
    with pytest.raises(ValueError, match="is of the dataset 'patients', not of 'customers'"):
        Ledger(path, dataset="customers")
    with pytest.raises(ValueError, match=r"line 1 .* is damaged"):
        (tmp_path / "letter").write_text("Dear Sir\n")
        Ledger(tmp_path / "letter", dataset="patients")
    assert (tmp_path / "letter").read_text() == "Dear Sir\n"


def test_a_shorter_or_another_ledger_is_refused(tmp_path: Path) -> None:
    with Ledger(written(tmp_path / "l", (FRESH, [0, 1])), dataset="patients") as book:
        there = book.position
        book.require(there)
        book.spend(FRESH, step=2)
        book.require(there)
        with pytest.raises(ValueError, match="events are missing"):
            book.require(replace(there, lines=there.lines + 3))
        for wrong in (replace(there, digest="0" * 32), Position(lines=0, digest=there.digest)):
            with pytest.raises(ValueError, match="is not the one"):
                book.require(wrong)


def test_a_full_disk_releases_nothing_and_loses_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "l", (FRESH, [0, 1]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path, dataset="patients", run="fresh") as book:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        try:
            with pytest.raises(OSError, match=r"cannot be written \(File too large\)"):
                book.spend(FRESH, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(RuntimeError, match="open it again"):  # the content of the file is unknown now
            book.spend(FRESH, step=2)
    assert total(path) == 3
    assert total(written(path, (FRESH, [2]))) == 4


def test_an_interruption_between_writing_and_counting_is_not_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    with Ledger(path, dataset="patients", run=FRESH.start.run) as book:
        book.spend(FRESH, step=0)
        with monkeypatch.context() as patched:
            patched.setattr(book.tally, "add", lambda step: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                book.spend(FRESH, step=1)
        with pytest.raises(RuntimeError, match="open it again"):
            book.spend(FRESH, step=2)
    assert ledger.read(path).events.total() == 2


def test_two_events_that_have_run_into_one_line_are_not_counted_as_one(tmp_path: Path) -> None:
    path = written(tmp_path / "l", (FRESH, [0, 1, 2]))
    *lines, before_last, last = path.read_bytes().splitlines(keepends=True)
    for joined in (before_last[:-1] + last, before_last[:-1] + b"J" + last, before_last[:-1] + last[:-1]):
        path.write_bytes(b"".join(lines) + joined)
        with pytest.raises(ValueError, match=r"line 4 of the ledger .* is damaged"):
            ledger.read(path)


@pytest.mark.slow
def test_a_thousand_mutations_never_make_it_say_less(tmp_path: Path) -> None:
    other = session(
        run="seeded", plan=replace(PLAN, event=Event(noise_multiplier=0.7, sample_rate=0.3)), replayable=True
    )
    path = written(tmp_path / "l", (FRESH, [0, 1, 2]), (other, [0, 1]), (FRESH, [3, 4]))
    content, events = path.read_bytes(), ledger.read(path).events
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        mutated = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 3])):
            where = rng.randrange(len(mutated))
            match rng.randrange(3):
                case 0:
                    mutated[where] ^= 1 << rng.randrange(8)
                case 1:
                    mutated[where:where] = bytes([rng.randrange(256)])
                case _:
                    del mutated[where]
        path.write_bytes(mutated)
        try:
            found = ledger.read(path, dataset="patients").events
        except ValueError as error:
            assert "ledger" in str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert all(found[event] >= count for event, count in events.items())
    assert 500 < refused < 1000


def test_a_line_with_a_right_digest_and_wrong_numbers_is_refused(tmp_path: Path) -> None:
    def forged(text: str) -> bytes:
        first = line(header("patients"), "")
        return first + line(text, first.decode().split()[-1])

    good = session_text(FRESH)
    (tmp_path / "l").write_bytes(forged(good))
    assert total(tmp_path / "l") == 0
    for wrong in (
        good.replace("0.1", "1.1"),
        good.replace("0.1", "NaN"),
        good.replace("1.5", "-1.5"),
        good.replace("1.5", "Infinity"),
        good.replace("false", "0"),
        good.replace('"a beginning"', "3"),
        good.replace("10", "1.5"),
        good.replace("run", "ran"),
        '{"step": 0}',
        '{"step": -1}',
        "[1]",
        "{}",
    ):
        (tmp_path / "l").write_bytes(forged(wrong) + b'{"step": 0} x\n')
        with pytest.raises(ValueError, match="line 2 of the ledger"):
            ledger.read(tmp_path / "l")


def _deleted(path: Path) -> None:
    path.unlink()


def _replaced_by_an_empty_one(path: Path) -> None:
    path.unlink()
    path.touch()


def _replaced_by_a_copy(path: Path) -> None:
    content = path.read_bytes()
    path.rename(path.with_name("moved"))
    path.write_bytes(content)


def _folder_renamed(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def _truncated(path: Path) -> None:
    os.truncate(path, path.read_bytes().find(b"\n") + 1)


def _appended_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def _restored_from_an_older_copy_of_its_length(path: Path) -> None:
    with path.open("r+b") as file:  # the same file, other content
        file.seek(-3, os.SEEK_END)
        file.write(b"00\n")


def _link_led_elsewhere(path: Path) -> None:
    """The path is a symbolic link in this test, and only in this one."""
    target = path.with_name("another")
    target.touch()
    path.unlink()
    path.symlink_to(target)


REPLACEMENTS = [
    _deleted,
    _replaced_by_an_empty_one,
    _replaced_by_a_copy,
    _folder_renamed,
    _truncated,
    _appended_to,
    _restored_from_an_older_copy_of_its_length,
    _link_led_elsewhere,
]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "folder" / "ledger"
    path.parent.mkdir()
    if "link" in request.node.name:
        (path.parent / "file").touch()
        path.symlink_to(path.parent / "file")
    return path


@pytest.mark.parametrize("replace_it", REPLACEMENTS)
def test_a_ledger_deleted_replaced_or_changed_in_mid_run_is_refused(
    place: Path, replace_it: Callable[[Path], None]
) -> None:
    with Ledger(place, dataset="patients", run="fresh") as book:
        book.spend(FRESH, step=0)
        replace_it(place)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"moved or replaced|changed by another program|open it again"):
                book.spend(FRESH, step=1)


@pytest.mark.parametrize("replace_it", REPLACEMENTS)
def test_a_ledger_replaced_while_an_event_is_written_is_refused(
    place: Path, replace_it: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(place, dataset="patients", run="fresh") as book:
        book.spend(FRESH, step=0)
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda descriptor: (fsync(descriptor), replace_it(place)))
        with pytest.raises(RuntimeError, match=r"deleted, moved or replaced|changed by another program"):
            book.spend(FRESH, step=1)


def test_a_ledger_put_back_in_its_place_can_be_used_again(place: Path) -> None:
    with Ledger(place, dataset="patients", run="fresh") as book:
        book.spend(FRESH, step=0)
        place.rename(place.with_name("moved"))
        with pytest.raises(RuntimeError, match="put the file back in its place"):
            book.spend(FRESH, step=1)
        place.with_name("moved").rename(place)
        book.spend(FRESH, step=1)
    assert total(place) == 2


def test_the_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Ledger("ledger", dataset="patients", run="fresh") as book:
        monkeypatch.chdir("/")
        book.spend(FRESH, step=0)
    assert total(tmp_path / "ledger") == 1


def test_one_file_under_two_names_is_one_ledger(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger", (FRESH, [0]))
    (tmp_path / "hard").hardlink_to(path)
    (tmp_path / "soft").symlink_to(path)
    with Ledger(tmp_path / "hard", dataset="patients") as book:
        for other in ("ledger", "soft"):
            with pytest.raises(ValueError, match="is in use by another run"):
                Ledger(tmp_path / other, dataset="patients")
        book.spend(FRESH, step=1)
    assert total(tmp_path / "soft") == 2


def test_what_keeps_no_events_is_no_ledger(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is not a regular file"):
            Ledger(path, dataset="patients")


def test_a_new_ledger_is_its_owners_alone_and_a_shared_one_stays_shared(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = written(tmp_path / "ledger", (FRESH, [0]))
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o660)
    assert written(path, (FRESH, [1])).stat().st_mode & 0o777 == 0o660
