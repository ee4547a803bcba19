"""The W&B report, as it is sent to a stand-in for the server."""

import json

import pytest
import wandb

from experiments import __main__ as cli
from experiments.config.errors import ConfigError
from experiments.products.specs import load_spec, specs
from experiments.records.tracking.wandb import answers
from tests.experiments.wandb_server import WandbServer


@pytest.fixture
def server(monkeypatch):
    wandb.teardown()  # W&B reads the environment once per process
    answers.cache_clear()
    with WandbServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
    wandb.teardown()


def test_it_needs_an_account():
    with pytest.raises(ConfigError, match="wandb login"):
        cli.main(["dashboard"])


def test_it_needs_a_server_that_answers(server):
    server.status = 503
    with pytest.raises(ConfigError, match=f"does not answer at {server.address}"):
        cli.main(["dashboard"])


def test_it_needs_a_project_with_runs(server):
    server.projects.clear()
    with pytest.raises(ConfigError, match=r"someone/adashift.*upload runs first") as caught:
        cli.main(["dashboard"])
    assert "\n" not in str(caught.value)


def test_a_section_for_every_figure_with_its_curves_by_setting(server, capsys):
    cli.main(["dashboard"])
    (sent,) = [given for name, given in server.operations if name == "upsertView"]
    assert (sent["entityName"], sent["projectName"]) == ("someone", "adashift")
    assert capsys.readouterr().out.strip().endswith("--Vmlldzox")  # the id of the report
    blocks = json.loads(sent["spec"])["blocks"]
    figures = {f"figure-{path.stem}": load_spec("figure", path.stem) for path in specs("figure")}
    headings = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
    assert headings == [spec.title for spec in figures.values()]
    grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    assert len(grids) == len(figures)
    check_figure_04(grids[list(figures).index("figure-04")])


def check_figure_04(grid):
    (runs,) = grid["runSets"]
    assert runs["project"]["name"] == "adashift"
    assert "figure-04" in json.dumps(runs["filters"]) and runs["grouping"][0]["name"] == "group"
    loss, accuracy, picture = (
        panel["config"] for panel in grid["panelBankSectionConfig"]["panels"]
    )
    assert loss["metrics"] == ["classifier/loss"] and accuracy["metrics"] == ["test_accuracy"]
    assert loss["groupArea"] == "stddev" and loss["xAxis"] == "step"
    assert picture["mediaKeys"] == ["figure-04"]
