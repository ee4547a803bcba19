"""Requests to stop: Ctrl-C and SIGTERM. A training stops after its current step."""

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
from typing import NoReturn

from experiments.progress import drop_output, message

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that asked this process to stop; never reset, so that no other run begins."""

    received: signal.Signals | None = None
    ignored = False  # by followers under torchrun: one that stops alone blocks the others

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.ignored:
            return
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if parent_process() is None:
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            message(f"stopping after this step{again}")


stop_request = StopRequest()


@contextmanager
def answered_after_a_step() -> Iterator[None]:
    """Inside, a signal only sets `stop_request.received`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return
    before = {number: signal.signal(number, stop_request) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def closed_pipe() -> Iterator[None]:
    """Inside, a closed pipe, as in `… | head`, ends the command without an error."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


@contextmanager
def answered_at_once() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        stop_request.received = signal.Signals(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_interrupted() -> NoReturn:
    """End the process with the exit code that a shell gives to the signal."""
    print("interrupted; rerun the same command to resume", file=sys.stderr)
    sys.exit(128 + (stop_request.received or signal.SIGINT))


@cache
def end_with_parent() -> None:
    """End this worker when its parent is killed; it would wait for work forever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:  # joblib's workers cannot wait for their parent
            time.sleep(1)
        while True:  # a training stops at the first signal, a worker without one at the next
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
