"""The typed config: composition, identity, and one-line errors."""

import re
import subprocess
import sys
from itertools import cycle
from math import inf

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from experiments.config import compose as composing
from experiments.config import errors, gpus, paths, schema
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import CONF
from tests.experiments.command_line import run_py

PAIR = ["experiment=counterexample_stochastic", "optimizer=adam"]
EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
SCALES = ["paper", "desktop", "laptop", "smoke"]
TUNED = sorted((p.parent.name, p.stem) for p in (CONF / "tuned").glob("*/*.yaml"))


def hydra_compose(overrides):
    """The config of run.py, composed by Hydra's documented function."""
    with errors.one_line_errors(), composing.config_source():
        cfg = hydra.compose("run", overrides, return_hydra_config=True)
    choices = cfg.hydra.runtime.choices
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    return composing.resolve(cfg, choices)


@pytest.mark.parametrize(("pair", "scale"), [*zip(TUNED[::3], cycle(SCALES))])
def test_compose_equals_hydra(pair, scale):
    """Composing another experiment in between must not change the result."""
    words = [f"experiment={pair[0]}", f"optimizer={pair[1]}", f"scale={scale}"]
    compose(["experiment=nmt_by_heart", "optimizer=adashift"])
    words += ["seed=3", "+optimizer.foreach=true"]
    assert compose(words) == hydra_compose(words)


def test_values_come_from_the_experiment_optimizer_and_tuned_files():
    config = compose([*PAIR, "scale=paper"])
    assert config.experiment == "counterexample_stochastic"
    assert config.optimizer_name == "adam"
    assert config.steps == 10_000_000
    assert config.optimizer["lr"] == 0.001
    assert config.optimizer["betas"] == [0, 0.999]


def test_the_command_line_overrides_the_files():
    config = compose([*PAIR, "optimizer.lr=0.5", "steps=7", "seed=3"])
    assert (config.optimizer["lr"], config.steps, config.seed) == (0.5, 7, 3)


def test_tuned_values_do_not_leak_into_the_next_optimizer():
    compose([*PAIR[:1], "optimizer=adashift"])
    assert "n" not in compose(PAIR).optimizer


@pytest.mark.parametrize(
    ("gpu", "cpu_scale", "scale"),
    [
        (True, "paper", "paper"),
        (True, "laptop", "paper"),
        (False, "paper", "paper"),
        (False, "laptop", "laptop"),
    ],
)
def test_auto_scale_is_paper_on_a_gpu_and_cpu_scale_elsewhere(monkeypatch, gpu, cpu_scale, scale):
    monkeypatch.setattr(composing, "uses_gpu", lambda device: gpu)
    assert compose([*PAIR, f"cpu_scale={cpu_scale}"]).scale == scale


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=nonsense"], ["experiment=nonsense", "run.py --help"]),
        (["optimizer=nonsense"], ["optimizer=nonsense", "run.py --help"]),
        (["scale=huge"], ["scale=huge", "desktop, laptop, paper, smoke"]),
        (["sede=1"], ["sede", "did you mean seed"]),
        (["optimizer.lrr=1"], ["optimizer.lrr", "did you mean lr"]),
        (["optimizer.zzzz=1"], ["optimizer.zzzz is unknown: adam takes lr, betas, eps, "]),
        (["schedule.zzzz=1"], ["schedule.zzzz is unknown: ", "has no schedule"]),
        (["epochs=3"], ["epochs is an unknown key: expected one of best, "]),
        (["data=x"], ["data is an unknown key here: +data=… adds it"]),
        (["+optimizer_nam=x"], ["optimizer_nam", "expected one of"]),
        (["seed=-1"], ["seed=-1 is invalid: expected a value greater than or equal to 0"]),
        (["seed=one"], ["seed=one", "integer"]),
        (["steps=0"], ["steps=0", "greater than 0"]),
        (["steps=many"], ["steps=many", "integer"]),
        (["optimizer.betas=[1.2,0.9]"], ["optimizer.betas=[1.2, 0.9]", "0 <= beta < 1"]),
        (["optimizer.betas=0.9"], ["optimizer.betas=0.9", "a list of numbers"]),
        (["optimizer.lr=-1"], ["optimizer.lr=-1 is invalid: expected a number that is 0 or more"]),
        (["optimizer.lr=fast"], ["optimizer.lr=fast", "a number"]),
        (["optimizer=adashift", "optimizer.n=0"], ["optimizer.n=0", "1 or more"]),
        (["optimizer=adashift", "optimizer.n=inf"], ["optimizer.n=", "numbers up to 1e+20"]),
        (["optimizer=adashift", "optimizer.m=-inf"], ["optimizer.m=", "numbers up to 1e+20"]),
        (["optimizer.lr=inf"], ["optimizer.lr=", "numbers up to 1e+20"]),
        (["device=abacus"], ["device=abacus is invalid: expected auto, cpu, cuda, "]),
        (["tracking.mode=sometimes"], ["tracking.mode=sometimes is invalid: expected 'auto'"]),
        (["optimizer.betas=[0.9"], ["cannot parse optimizer.betas=[0.9", "check its brackets"]),
        (["experiment=mnist_lr", "+task.data.limit=5"], ["task.data", "data is a top-level key"]),
        (["experiment=lemma_2", "optimizer=sgd"],
         ["optimizer.lr has no value", "conf/tuned/lemma_2/sgd.yaml", "set optimizer.lr=…"]),
    ],
)  # fmt: skip
def test_an_invalid_override_is_a_one_line_error_with_key_and_fix(overrides, words):
    groups = {o.split("=")[0] for o in overrides}
    with pytest.raises(ConfigError) as error:
        compose([p for p in PAIR if p.split("=")[0] not in groups] + overrides)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("m", "built"), [("2", 2), ("null", None), ("inf", inf)])
def test_m_may_be_an_integer_null_or_inf(m, built):
    config = compose([*PAIR[:1], "optimizer=adashift", "optimizer.n=3", f"optimizer.m={m}"])
    optimizer = build(config.optimizer, "optimizer")([torch.zeros(1)])
    assert optimizer.param_groups[0]["m"] == built


def test_a_warning_of_an_optimizer_is_shown_once_and_the_run_finishes(tmp_path):
    words = ["optimizer=adashift_ema", "optimizer.n=5", "optimizer.betas=[0.9,0.999]"]
    words += ["scale=smoke", "tracking=off"]
    with pytest.warns(UserWarning, match="m=inf .* use n=44 or more") as warned:
        assert not run_py(*PAIR[:1], *words, f"results={tmp_path}")
    assert sum("m=inf" in str(w.message) for w in warned) == 1
    assert '"m": "inf"' in next(tmp_path.rglob("run.json")).read_text()


@pytest.mark.parametrize("word", ["+tracking.zzzz=1", "zzzz.yyyy=1"])
def test_an_unknown_key_of_a_node_gets_no_advice_that_does_not_work(word):
    with pytest.raises(ConfigError) as error:
        compose([*PAIR, word])
    assert str(error.value) == f"{word.strip('+').split('=')[0]} is an unknown key"


def test_a_key_with_an_underscore_gets_no_guess():
    with pytest.raises(ConfigError, match=r"^optimizer\._target is unknown") as error:
        compose([*PAIR, "optimizer._target=x"])
    assert "did you mean" not in str(error.value)


def test_several_runs_need_multirun():
    error = run_py("runs=figure-1")
    assert error.startswith(
        "error: runs=figure-1 is for more than one run: add -m, as in run.py -m"
    )


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": "torch.optim.Adam", "lr": 0.1, "typo": 1}, ["optimizer.typo", "amsgrad"]),
        ({"_target_": "torch.optim.Adam", "lr": "fast"}, ["optimizer.lr=fast"]),
        ({"_target_": "torch.optim.NoSuch", "lr": 0.1}, ["torch.optim.NoSuch", "imported"]),
        ({"_target_": "no.such.Module", "lr": 0.1}, ["no.such.Module", "imported"]),
    ],
)
def test_arguments_are_checked_against_the_signature_of_the_target(node, words):
    with pytest.raises(ConfigError) as error:
        build(node | {"_partial_": True}, "optimizer")
    assert all(word in str(error.value) for word in words), error.value


def test_arguments_of_nested_targets_are_checked():
    config = compose([*PAIR, "task.problem.C=much"])
    with pytest.raises(ConfigError, match=r"task\.problem\.C=much"):
        build(config.task, "task", seed=0, device=None)


def test_an_error_raised_by_the_target_is_reported():
    config = compose([*PAIR, "task.problem.delta=200"])
    with pytest.raises(ConfigError, match="delta is 200"):
        build(config.task, "task", seed=0, device=None)


def test_parts_of_a_task_are_top_level_keys():
    config = compose(["experiment=resnet_cifar10", "optimizer=adam", "data.limit=7"])
    assert config.task["data"]["limit"] == 7
    assert config.digest() != compose(["experiment=resnet_cifar10", "optimizer=adam"]).digest()


def test_a_top_level_null_is_not_part_of_the_identity():
    """A new setting that is off by default must not change the identity of old runs."""
    assert "schedule" not in compose(PAIR).identity()
    assert "schedule" in compose(["experiment=resnet_cifar10", "optimizer=adam"]).identity()


def test_lists_depend_on_the_scale():
    blocks = [
        compose(["experiment=densenet_cifar10", "optimizer=adam", f"scale={scale}"]).task["model"]
        for scale in ("paper", "smoke")
    ]
    assert [node["blocks"] for node in blocks] == [[6, 12, 48, 32], [1, 1]]


def test_seed_device_tracking_and_results_are_not_part_of_the_identity():
    same = compose(
        [*PAIR, "seed=5", "device=cpu", "tracking=off", "results=/elsewhere", "force=true"]
    )
    assert same.digest() == compose(PAIR).digest()


@pytest.mark.parametrize(
    "change",
    ["optimizer.lr=0.01", "steps=1000", "task.problem.C=50", "scale=smoke", "optimizer.eps=0"],
)
def test_every_other_setting_is_part_of_the_identity(change):
    assert compose([*PAIR, change]).digest() != compose(PAIR).digest()


def test_an_integer_and_the_equal_float_are_the_same_setting():
    digests = {compose([*PAIR, f"optimizer.betas=[{b},0.999]"]).digest() for b in ("0", "0.0")}
    assert len(digests) == 1


def test_unset_fused_is_the_default_of_the_class():
    """One file turns the kernel on for AdaShift; where nothing is stepped, it is turned off."""
    node = {"_target_": "adashift.AdaShift", "lr": 1.0, "m": None}
    assert schema.canonical(node | {"fused": None}) == schema.canonical(node)
    assert schema.canonical(node | {"fused": False}) != schema.canonical(node)
    assert schema.canonical(node) != schema.canonical({"_target_": "adashift.AdaShift", "lr": 1.0})


def test_module_paths_and_hydra_flags_are_not_part_of_the_identity():
    node = {"_target_": "a.b.Thing", "size": 1, "inner": {"_target_": "c.load_it"}}
    moved = {"_target_": "x.Thing", "size": 1.0, "inner": {"_target_": "y.z.load_it"}}
    flags = {"_partial_": True, "_convert_": "all", "_version_": 1}
    assert schema.canonical(node) == schema.canonical(moved) == schema.canonical(node | flags)
    assert schema.canonical(node) != schema.canonical(node | {"_target_": "a.b.Other"})


def test_the_version_is_part_of_the_identity_and_not_an_argument():
    assert compose([*PAIR, "+optimizer._version_=1"]).digest() == compose(PAIR).digest()
    second = compose([*PAIR, "+optimizer._version_=2", "+task.problem._version_=2"])
    assert second.digest() != compose([*PAIR, "+optimizer._version_=2"]).digest()
    build(second.task, "task", seed=0, device=torch.device("cpu"))
    assert "_version_" not in build(second.optimizer, "optimizer").keywords
    for wrong in ("0", "abc", "null"):
        config = compose([*PAIR, f"+optimizer._version_={wrong}"])
        assert config.digest() != compose(PAIR).digest()
        with pytest.raises(ConfigError, match=rf"optimizer\._version_={wrong}"):
            build(config.optimizer, "optimizer")
    assert compose([*PAIR, f"steps={10**400}"]).digest()


def test_every_target_has_a_unique_name():
    """The digest has only the name: two functions called `load` would give the same run."""
    found = {}
    for path in CONF.rglob("*.yaml"):
        for text in re.findall(r"_target_: *(.+)", path.read_text()):
            for name in re.findall(r"[a-z_0-9]+(?:\.\w+)+", text.split("#")[0]):
                found.setdefault(name.rpartition(".")[2], set()).add(name)
    assert len(found) > 30
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# Published records are found by their digest: if one changes, its records are lost.
DIGESTS = {
    ("counterexample_stochastic", "adashift", "paper"): "363d2b95",
    ("mnist_mlp", "adam", "paper"): "aad19e6e",
    ("resnet_cifar10", "adashift", "laptop"): "6bb4ab96",
    ("nmt", "amsgrad", "laptop"): "1b32afab",
    ("ill_conditioned_exponential", "sgd", "paper"): "f21082af",
}


@pytest.mark.parametrize("words", DIGESTS)
def test_digests_do_not_change(words):
    keys = ("experiment", "optimizer", "scale")
    found = compose([f"{key}={word}" for key, word in zip(keys, words, strict=True)]).digest()
    assert found == DIGESTS[words]


def test_the_digest_is_the_same_in_every_process(monkeypatch):
    code = f"from experiments.config.compose import compose; print(compose({PAIR}).digest())"
    found = set()
    for order in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", order)
        out = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True)
        found.add(out.stdout.decode().strip())
    assert found == {compose(PAIR).digest()}


@pytest.mark.parametrize("group", ["experiment", "optimizer", "scale"])
def test_a_config_group_cannot_be_null(group):
    with pytest.raises(ConfigError, match="cannot be null"):
        compose([p for p in PAIR if not p.startswith(group)] + [f"{group}=null"])


def test_the_results_folder_is_relative_to_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose([*PAIR, "results=out"]).results == tmp_path / "out"
    assert compose([*PAIR, f"results={tmp_path}/x"]).results == tmp_path / "x"
    assert compose(PAIR).results == paths.ROOT / "results"
    with pytest.raises(ConfigError, match="empty"):
        compose([*PAIR, "results="])


@pytest.mark.parametrize(("scale", "steps"), list(zip(SCALES, [9, 9, 5, 5], strict=True)))
def test_a_scale_without_a_value_has_that_of_the_next_larger_one(scale, steps):
    words = [f"scale={scale}", 'steps="${at_scale:{paper:9,laptop:5}}"']
    assert compose([*PAIR, *words]).steps == steps


@pytest.mark.parametrize("values", ["1,2,3", "{laptop:1}", "{paper:1,huge:2}", ""])
def test_values_at_unknown_scales_raise(values):
    with pytest.raises(ConfigError, match=r"paper, desktop, laptop, smoke"):
        compose([*PAIR, f'steps="${{at_scale:{values}}}"'])


def test_desktop_has_all_data_and_smaller_networks():
    configs = {
        scale: compose(["experiment=resnet_cifar10", "optimizer=adashift", f"scale={scale}"])
        for scale in ("paper", "desktop")
    }
    paper, desktop = (configs[scale].task for scale in ("paper", "desktop"))
    assert desktop["data"] == paper["data"] and desktop["trainer"]["epochs"] >= 10
    assert 2 * desktop["model"]["width"] == paper["model"]["width"]
    assert configs["desktop"].schedule == configs["paper"].schedule


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_experiment_composes_at_every_scale(experiment, scale):
    optimizer = next(o for e, o in TUNED if e == experiment)
    config = compose([f"experiment={experiment}", f"optimizer={optimizer}", f"scale={scale}"])
    assert config.steps or config.task["trainer"]["epochs"]


def test_every_tuned_value_has_a_comment_with_its_source():
    for path in (CONF / "tuned").glob("*/*.yaml"):
        lines = [
            line for line in path.read_text().splitlines() if line and not line.startswith("#")
        ]
        assert all("#" in line for line in lines), path


def test_every_tuned_file_belongs_to_an_experiment_and_an_optimizer():
    for experiment, optimizer in TUNED:
        assert (CONF / "experiment" / f"{experiment}.yaml").exists()
        assert (CONF / "optimizer" / f"{optimizer}.yaml").exists()


def test_experiment_files_do_not_set_optimizer_values():
    for path in (CONF / "experiment").glob("*.yaml"):
        assert "optimizer" not in yaml.safe_load(path.read_text().replace("${", "x{")), path


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "set runs_per_gpu=1 or reduce the sizes"),
        (MemoryError("no memory"), "reduce the sizes"),
    ],
)
def test_out_of_memory_is_reported_with_a_fix(error, advice):
    message = rf"^out of memory \({error}\): {advice} of this run$"
    with pytest.raises(ConfigError, match=message), errors.one_line_errors():
        raise error


# -- engines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "listed", "count"),
    [(None, 4, 4), ("0,2", 4, 2), ("", 4, 0), ("-1", 4, 0), (None, 0, 0)],
)
def test_gpus_are_counted_without_torch(monkeypatch, tmp_path, visible, listed, count):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "echo GPU\n" * listed)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == count and gpus.has_gpu() == (count > 0)


@pytest.mark.parametrize("name", paths.choices_of("engine"))
def test_an_engine_is_not_part_of_the_identity(name):
    """Without make setup-cluster its launcher is missing: then the error names that command."""
    text = (CONF / "engine" / f"{name}.yaml").read_text()
    assert f"# python run.py -m engine={name} " in text
    assert not set(yaml.safe_load(text)) - {"defaults", "hydra"}
    try:
        assert hydra_compose([f"engine={name}"]) == compose([])
    except ConfigError as error:
        assert str(error) == "the launcher of this engine is not installed: run make setup-cluster"
