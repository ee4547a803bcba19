"""How a process ends with an error: one line, also in the processes that torchrun starts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

PATIENCE = 10  # seconds for the first process to report the same error


def exit_with(error: BaseException) -> NoReturn:
    """Print the error and exit; of several processes on a machine, only the first prints it."""
    line = f"error: {text_of(error)}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ["LOCAL_RANK"] != "0":
            time.sleep(PATIENCE)  # torchrun ends this process when the first one has ended
        add_to_summary(line)
    sys.exit(line)


def text_of(error: BaseException) -> str:
    """The message of an error; the system's own has its number first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def add_to_summary(line: str) -> None:
    """Let torchrun repeat the line below its own traceback, which cannot be turned off."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": about}}))
