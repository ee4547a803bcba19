import pytest
from matplotlib import rcParams

from experiments.products import (
    figures,  # noqa: F401 - sets rcParams when it is imported
    specs,
)

SMALL_FIGURE = """
title: Figure 1. A test
seeds: 2
base: [experiment=mnist_mlp]
runs: {adam: [optimizer=adam], adashift: [optimizer=adashift]}
panels: [{title: (a) test accuracy, metric: test_accuracy, runs: [adam, adashift]}]
"""


@pytest.fixture
def small_figure(tmp_path, monkeypatch):
    """Figure 1 is the only figure, with four runs."""
    (tmp_path / "figure").mkdir()
    (tmp_path / "figure/01.yaml").write_text(SMALL_FIGURE)
    monkeypatch.setattr(specs, "CONF", tmp_path)


@pytest.fixture(autouse=True)
def type_3_fonts(monkeypatch):
    """Embedding TrueType fonts in a PDF takes longer than drawing it."""
    monkeypatch.setitem(rcParams, "pdf.fonttype", 3)
