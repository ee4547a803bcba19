"""The W&B report, as far as it can be tested without an account."""

import pytest

from experiments import __main__ as cli
from experiments.config.errors import ConfigError
from experiments.products.specs import load_spec, specs


def test_it_needs_an_account():
    with pytest.raises(ConfigError, match="wandb login"):
        cli.main(["dashboard"])


def test_a_section_for_every_figure_with_its_curves_by_setting():
    pytest.importorskip("wandb_workspaces", reason="make setup-cluster installs it")
    from experiments.products.dashboard import make_report

    figures = {f"figure-{path.stem}": load_spec("figure", path.stem) for path in specs("figure")}
    report = make_report(figures, "someone", "adashift")
    headings = [block.text for block in report.blocks if type(block).__name__ == "H2"]
    assert headings == [spec.title for spec in figures.values()]
    grid = report.blocks[2 * list(figures).index("figure-04") + 2]
    (runs,) = grid.runsets
    assert "figure-04" in str(runs.filters) and runs.groupby == ["group"]
    loss, accuracy, picture = grid.panels
    assert loss.groupby_rangefunc == "stddev" and picture.media_keys == ["figure-04"]
    assert "classifier/loss" in str(loss.y) and "test_accuracy" in str(accuracy.y)
