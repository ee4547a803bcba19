"""`run.py` in this process: the same answers, without the seconds that imports take."""

import sys

import pytest
from hydra.core.global_hydra import GlobalHydra

with pytest.MonkeyPatch.context() as environment:  # run.py changes it when it is imported
    environment.setenv("HYDRA_FULL_ERROR", "")
    import run as program


def run_py(*words):
    """Run one command line; return its exit status: None or 0 on success, else its error."""
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", *words])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # as run.py sets it: Hydra raises its errors
        try:
            program.start()
        except SystemExit as leaving:
            return leaving.code
        finally:
            GlobalHydra.instance().clear()
    return None
