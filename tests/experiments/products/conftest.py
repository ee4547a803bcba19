import pytest
from matplotlib import rcParams

from experiments.products import figures  # noqa: F401 - sets rcParams when it is imported


@pytest.fixture(autouse=True)
def type_3_fonts(monkeypatch):
    """Embedding TrueType fonts in a PDF takes longer than drawing it."""
    monkeypatch.setitem(rcParams, "pdf.fonttype", 3)
