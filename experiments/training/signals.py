"""How a process is asked to end: Ctrl-C and SIGTERM, which a training answers after its step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import parent_process
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """Whether this process was asked to end; it stays so, for then no other run may begin."""

    by: signal.Signals | None = None
    follows = False  # the first process of a team says when: alone in a step it would fail

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.follows:
            return
        if self.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number)
        if parent_process() is None:
            again = ", again to leave at once" if number == signal.SIGINT else ""
            print(f"\nstopping after this step{again}", file=sys.stderr)


ASKED = Asked()


@contextmanager
def answered_after_a_step() -> Iterator[None]:
    """Inside, a signal is only noted: look at ASKED.by."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may catch signals
        return
    before = {number: signal.signal(number, ASKED) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def answered_at_once() -> Iterator[None]:
    """Inside, SIGTERM is what Ctrl-C is."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        ASKED.by = signal.Signals(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def end_with_parent() -> None:
    """For a worker: without it, one whose parent was killed waits for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:  # in joblib's workers it cannot be waited for
            time.sleep(1)
        while True:  # a training ends after its step; then the signal finds nobody to catch it
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
