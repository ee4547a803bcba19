"""examples/wandb_sweep.yaml, as W&B's own agent uses it, without a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.config.compose import compose
from experiments.config.paths import ROOT

FILE = ROOT / "examples/wandb_sweep.yaml"
SWEEP = yaml.safe_load(FILE.read_text())

# What the agent does for one run, with the private method that receives it from the server.
AGENT = f"""
import sys
from wandb.sdk.launch.sweeps.utils import load_sweep_config
from wandb.wandb_agent import Agent

sweep = load_sweep_config({str(FILE)!r})
agent = Agent(None, None, sweep_id="sweep123")
agent._sweep_command = [*sweep["command"], *sys.argv[1:]]
chosen = {{"optimizer.lr": {{"value": 0.0123}}, "optimizer.n": {{"value": 5}}}}
order = {{"type": "run", "run_id": "run12345", "program": sweep["program"], "args": chosen}}
agent._command_run(order)
sys.exit(agent._run_processes["run12345"].wait())
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of a smoke run that the agent has started."""
    folder = tmp_path_factory.mktemp("agent")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "WANDB_DIR": str(folder), "WANDB_SWEEP_ID": "sweep123"}
    words = ["scale=smoke", "tracking=offline", f"results={folder}"]
    subprocess.run([sys.executable, "-c", AGENT, *words], cwd=ROOT, env=env, check=True)
    return folder


def test_the_metric_and_its_goal_are_those_of_the_experiment():
    words = [word for word in SWEEP["command"] if not word.startswith("$")]
    config = compose(words)
    goal = {"highest": "maximize", "lowest": "minimize"}[config.best]
    assert SWEEP["metric"] == {"name": config.metrics[0], "goal": goal}
    assert config.force and config.tracking.mode == "online"


def test_the_agent_trains_what_the_sweep_has_chosen(results):
    (info,) = results.glob("runs/mnist_lr/*/seed=0/run.json")
    optimizer = yaml.safe_load(info.read_text())["config"]["optimizer"]
    assert (optimizer["lr"], optimizer["n"]) == (0.0123, 5)
    assert {"optimizer.lr", "optimizer.n"} == {*SWEEP["parameters"]}


def test_the_run_reports_the_metric_as_a_run_of_the_sweep(results):
    (run,) = results.glob("wandb/offline-run-*/run-run12345.wandb")
    sent = run.read_bytes()
    assert SWEEP["metric"]["name"].encode() in sent and b"sweep123" in sent
