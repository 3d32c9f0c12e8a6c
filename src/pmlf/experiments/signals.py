"""SIGINT and SIGTERM noted while a step runs, and acted on when it is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Which signal has asked the run to end, if any has."""

    def __init__(self) -> None:
        self.by: str | None = None


@contextmanager
def noted_signals() -> Iterator[Interruption]:
    """Signals that would end the process are noted; a second one acts at once, as it would without this."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield interruption
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _STOPPING}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        interruption.by = signal.Signals(number).name
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        restore()
