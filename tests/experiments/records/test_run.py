"""Runs and specs: identity, folders, the runs of a figure, and the figures of a run."""

import json
import shlex

import pytest

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import CONF
from experiments.products import specs
from experiments.products.specs import Spec, figures_using, load_spec
from experiments.records.run import Run

CUSTOM = ["experiment=mnist_lr", "optimizer=custom", "optimizer._target_=torch.optim.SGD"]
CUSTOM += ["optimizer.lr=0.01", "steps=20"]
STOCHASTIC = ["experiment=counterexample_stochastic", "optimizer=adam", "scale=paper"]


def test_the_folder_names_experiment_optimizer_settings_and_seed(tmp_path):
    run = Run(compose([*STOCHASTIC, f"results={tmp_path}", "seed=7"]))
    digest = run.config.digest()
    path = f"runs/counterexample_stochastic/adam-{digest}/seed=7"
    assert run.folder == tmp_path / path


def test_the_command_of_a_run_trains_that_run():
    for overrides in (
        STOCHASTIC,
        [*STOCHASTIC, "optimizer.betas=[0.9,0.999]", "seed=3"],
        [*STOCHASTIC, "task.bounds=[-1,1]", "steps=500"],
        [*STOCHASTIC, "+optimizer.weight_decay=0.1"],
        ["experiment=lemma_2", "optimizer=sgd", "optimizer.lr=0.5", "scale=smoke"],
        CUSTOM,
        ["experiment=nmt", "scale=smoke", "schedule=null"],
        ["experiment=mnist_lr", "scale=smoke", "log_every=null"],
        ["experiment=mnist_lr", "scale=smoke", "optimizer=adashift", "~optimizer.n"],
        [*STOCHASTIC[:1], "optimizer=adashift", "optimizer.m=inf", "optimizer.n=44"],
        [*STOCHASTIC[:1], "optimizer=adashift_ema", "optimizer.m=null"],
        [*STOCHASTIC, "task.bounds=[-inf,1]"],
    ):
        run = Run(compose(overrides))
        words = shlex.split(run.command())
        assert words[:2] == ["python", "run.py"]
        assert Run(compose(words[2:])).folder == run.folder, run.command()


def test_infinity_is_named_in_the_command_and_in_json():
    run = Run(compose([*STOCHASTIC[:1], "optimizer=adashift", "optimizer.m=inf"]))
    assert " optimizer.m=inf " in run.command()
    assert json.loads(json.dumps(run.config.identity(), allow_nan=False)) == run.config.identity()
    window = compose([*STOCHASTIC[:1], "optimizer=adashift", "optimizer.m=null"])
    assert run.config.digest() != window.digest()


def test_the_command_of_a_custom_optimizer_omits_the_settings_of_the_experiment():
    command = Run(compose(CUSTOM)).command()
    assert " steps=20 " in command and "task" not in command and "data" not in command


def test_figures_using_lists_the_figures_of_a_run():
    assert figures_using(Run(compose(STOCHASTIC))) == ["figure-01"]
    assert figures_using(Run(compose([*STOCHASTIC, "seed=99"]))) == ["figure-01"]
    assert figures_using(Run(compose([*STOCHASTIC, "optimizer.lr=0.1"]))) == []
    assert figures_using(Run(compose(["experiment=critical_c_sequential", "optimizer=adam"]))) == [
        "figure-08"
    ]


def test_a_spec_expands_to_one_run_per_seed_and_one_for_a_deterministic_run():
    spec = Spec(
        title="t",
        seeds=3,
        once=["still"],
        base=["optimizer=adam"],
        runs={"moving": STOCHASTIC[:1], "still": ["experiment=counterexample_sequential"]},
    )
    groups = spec.expand(["scale=smoke"])
    assert [r.config.seed for r in groups["moving"]] == [0, 1, 2]
    assert [r.config.seed for r in groups["still"]] == [0]
    assert {r.config.scale for rs in groups.values() for r in rs} == {"smoke"}


def test_a_figure_without_a_spec_names_the_missing_file(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.products.specs.CONF", tmp_path)
    with pytest.raises(
        ConfigError, match=r"figure 7 is not built yet: conf/figure/07.yaml is missing"
    ):
        load_spec("figure", "07")


@pytest.mark.parametrize("kind", ["figure", "table", "claim"])
def test_every_spec_of_conf_composes(kind):
    for path in specs.specs(kind):
        spec = load_spec(kind, path.stem)
        assert spec.expand(["scale=smoke"]).keys() == spec.runs.keys()
        assert path.read_text().startswith("# make "), f"{path} must open with its command"


def test_every_experiment_file_starts_with_its_command():
    for path in (CONF / "experiment").glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0] == "# @package _global_"
        assert lines[1].startswith(f"# python run.py experiment={path.stem} optimizer="), path
