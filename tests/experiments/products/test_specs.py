"""Specs: every mistake in a file of conf/ is one line when it is loaded, before any training."""

import copy
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products import specs
from experiments.products.checks import checked
from experiments.products.specs import everything, load_spec, spec_path

EVERY = list(everything())
FREE = (
    "runs",
    "labels",
    "search",
    "columns",
    "paper",
    "best",
)  # keys below these are names of the author


def raw_spec(kind, name):
    return OmegaConf.to_container(OmegaConf.load(spec_path(kind, name)), resolve=True)


def keys(node, place=()):
    """The place of every key of a spec that the schema knows."""
    if isinstance(node, dict):
        if place[-1:] not in [(name,) for name in FREE]:
            yield from ((*place, key) for key in node)
        for key, value in node.items():
            yield from keys(value, (*place, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from keys(value, (*place, index))


def misspelt(raw, place):
    """A copy in which one key lacks its last but one letter, and the path of that key."""
    changed = node = copy.deepcopy(raw)
    for key in place[:-1]:
        node = node[key]
    typo = place[-1][:-2] + place[-1][-1]
    items = [(typo if key == place[-1] else key, value) for key, value in node.items()]
    node.clear()
    node.update(items)
    steps = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*place[:-1], typo)]
    return changed, "".join(steps).removeprefix(".")


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_spec_is_valid(kind, name):
    load_spec(kind, name)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_misspelt_key_anywhere_is_reported_with_its_path_and_what_is_allowed(kind, name):
    raw = raw_spec(kind, name)
    places = list(keys(raw))
    assert {"title", "seeds"} < {place[-1] for place in places} and len(places) > 15
    for place in places:
        changed, path = misspelt(raw, place)
        with pytest.raises(ConfigError) as error:
            checked(changed)
        assert str(error.value).startswith(f"{path} is unknown; allowed are {place[-1]}, ")
        assert "\n" not in str(error.value)


def test_a_misspelt_key_stops_before_torch_is_imported(tmp_path):
    (tmp_path / "conf/figure").mkdir(parents=True)
    text = spec_path("figure", "04").read_text().replace("metric: test_acc", "metrc: test_acc")
    (tmp_path / "conf/figure/04.yaml").write_text(text)
    code = f"""
import pathlib, sys, time
from experiments.__main__ import main
from experiments.config.errors import ConfigError
from experiments.products import specs
specs.CONF = pathlib.Path({str(tmp_path / "conf")!r})
try:
    main(["figure", "4", "tracking=off"])
except ConfigError as error:
    print(error)
print("torch" in sys.modules, time.process_time() < 3)
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stderr == "" and out.stdout.splitlines() == [
        "conf/figure/04.yaml: panels[1].metrc is unknown; allowed are metric, smooth, runs, "
        "draw, axes, title, orders, legend",
        "False True",
    ]


FIGURE = """
title: Figure 1. A small one
seeds: 3
once: [adam]
base: [experiment=counterexample_stochastic]
runs: {adam: [optimizer=adam], adashift: [optimizer=adashift], grid: [GRID]}
panels:
  - {title: (a) θ, draw: curves, metric: theta, runs: [adam, adashift], axes: {ylabel: θ}}
  - {title: (b) C, draw: heatmap, metric: critical_c, contours: exact, runs: [grid]}
claims:
  - id: F1
    place: here
    text: It falls.
    metric: theta
    statistic: tail_mean
    parts: [{left: adam, relation: near, right: [adam, adashift], margin: 0.1}]
""".replace("GRID", "experiment=critical_c_sequential, optimizer=adam")


def load(tmp_path, monkeypatch, kind, text):
    (tmp_path / "conf" / kind).mkdir(parents=True)
    (tmp_path / "conf" / kind / "01.yaml").write_text(text)
    monkeypatch.setattr(specs, "CONF", tmp_path / "conf")
    return load_spec(kind, "01")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "runs: [adam, a",
            "runs: [adm, a",
            "panels[0] names adm, which is unknown; the runs are adam, adashift",
        ),
        (
            "once: [adam]",
            "once: [adan]",
            "once names adan, which is unknown; the runs are adam",
        ),
        (
            "left: adam",
            "left: adma",
            "claims[0].parts[0] names adma, which is unknown; the runs are adam",
        ),
        ("right: [adam, ", "right: [ada, ", "claims[0].parts[0] names ada, which"),
        (
            "metric: theta, runs",
            "metric: thta, runs",
            "reads thta, but conf/experiment/counterexample_stochastic.yaml declares theta",
        ),
        (
            "contours: exact",
            "contours: exat",
            "panels[1] reads exat, but conf/experiment/critical_c_sequential.yaml declares exact, ",
        ),
        ("[grid]}", "[adam]}", "panels[1] reads critical_c, but conf/experiment/counterexample_"),
        (
            "margin: 0.1",
            "margin: 0.1, metric: w",
            "claims[0].parts[0] reads w, but conf/experiment/counter",
        ),
        ("tail_mean", "tail_meen", "claims[0].statistic: tail_meen is unknown; allowed are tail_m"),
        ("tail_mean", "tail", "claims[0].statistic: tail is unknown; allowed are "),
        ("tail_mean", "falls_along_beta1", "claims[0].parts[0] reads beta1, but conf/experiment/"),
        (
            "margin: 0.1",
            "margin: wide",
            "claims[0].parts[0].margin=wide is invalid: input should be a valid number",
        ),
        (
            "relation: near",
            "relation: like",
            "claims[0].parts[0].relation=like is invalid: input should be 'above', 'below'",
        ),
        ("parts: [{", "parts: [] #", "claims[0].parts=[] is invalid: list should have at least 1"),
        ("    place: here\n", "", "claims[0].place is missing: add it"),
        (
            "draw: curves",
            "draw: curve",
            "panels[0].draw=curve is invalid: expected one of 'curves', 'heatmap'",
        ),
        ("draw: curves", "smooth: much", "panels[0].smooth=much is invalid: input should be a val"),
        (
            "draw: curves",
            "smooth: 0",
            "panels[0].smooth=0 is invalid: input should be greater than or equal to 1",
        ),
        (
            "draw: curves",
            "legend: uper left",
            "panels[0].legend=uper left is invalid: input should be 'best', 'upper right'",
        ),
        ("draw: heatmap", "draw: heatmap, smooth: 3", "panels[1].smooth is unknown; allowed are "),
        (
            "[grid]}",
            "[grid, adam]}",
            'panels[1].runs=["grid", "adam"] is invalid: value should have at most 1 item',
        ),
        (
            "runs: [adam, adashift]",
            "runs: []",
            "panels[0].runs=[] is invalid: value should have at least 1",
        ),
        (
            "{ylabel: θ}",
            "{yscale: ln}",
            "panels[0].axes.yscale=ln is invalid: input should be 'linear' or 'log'",
        ),
        (
            "seeds: 3\nonce: [adam]",
            "seeds: 1",
            "claim F1 compares adam and adashift with one seed: raise `seeds`",
        ),
        ("seeds: 3", "seeds: 0", "seeds=0 is invalid: input should be greater than 0"),
        (
            "experiment=counterexample_stochastic",
            "experiment=nosuch",
            "experiment=nosuch is unknown: ",
        ),
        ("panels:", "rows: []\npanles:", "panles is unknown; allowed are panels, "),
        ("panels:\n", "panels: [curves]\nnote: >\n", "panels[0]=curves is invalid: expected a map"),
        (
            "title: Figure",
            "title: [Figure",
            "line 3 is not valid YAML: expected ',' or ']', but got ':'",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_file(tmp_path, monkeypatch, old, new, message):
    assert FIGURE.count(old) == 1
    with pytest.raises(ConfigError) as error:
        load(tmp_path, monkeypatch, "figure", FIGURE.replace(old, new))
    assert str(error.value).count("conf/figure/01.yaml") == 1
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_small_figure_itself_is_valid(tmp_path, monkeypatch):
    spec = load(tmp_path, monkeypatch, "figure", FIGURE)
    assert [panel.draw for panel in spec.panels] == ["curves", "heatmap"]
    assert spec.panels[0].runs == {"adam": None, "adashift": None}


SEARCH = """
title: Table 1. A search
seeds: 2
base: [experiment=mnist_lr]
search:
  sgd:  {label: SGD, paper: [optimizer=sgd], sweeps: [n_5_to_30]}
  adam: {label: Adam, paper: [optimizer=adam], sweeps: [n_5_to_30]}
rule:
  metric: validation_accuracy
  best: highest
  beside: [classifier/loss]
  settings: [lr, betas]
  along: lr
  panels: [{title: (a) accuracy, metric: validation_accuracy, runs: [adam]}]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("along: lr", "along: n", "rule: along=n is invalid: expected one of lr, betas"),
        (
            "[lr, betas]",
            "[lr, bettas]",
            "rule.settings names bettas, which is unknown; the settings are betas",
        ),
        ("runs: [adam]", "runs: [adm]", "rule.panels[0].runs names adm, which is unkno"),
        (
            "metric: validation_accuracy, r",
            "metric: test_loss, r",
            "rule: the panel (a) accuracy draws test_loss",
        ),
        (
            "[classifier/loss]",
            "[clasifier/loss]",
            "rule reads clasifier/loss, but conf/experiment/mnist_lr.yaml declares classifier/loss",
        ),
        (
            "best: highest",
            "best: fastest",
            "rule.best=fastest is invalid: input should be 'highest' or 'lowest'",
        ),
        ("label: SGD", "lable: SGD", "search.sgd.lable is unknown; allowed are label, "),
        ("along: lr", "alnog: lr", "rule.alnog is unknown; allowed are along, "),
        (
            "[optimizer=sgd], sweeps: [n_5_to_30]",
            "[optimizer=sgd], sweeps: [nn]",
            "sweep=nn is unknown: ",
        ),
    ],
)
def test_a_mistake_in_a_search_is_one_line(tmp_path, monkeypatch, old, new, message):
    assert SEARCH.count(old) == 1
    with pytest.raises(ConfigError) as error:
        load(tmp_path, monkeypatch, "table", SEARCH.replace(old, new))
    assert str(error.value).startswith(f"conf/table/01.yaml: {message}")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("figure", "", "title is missing: add it"),
        ("figure", "[]", "[] is invalid: expected a mapping of keys to values"),
        ("figure", "title: x\nseeds: 2", "a figure needs panels: add them"),
        ("table", "title: x\nseeds: 2", "a table needs rows or search or contest: add them"),
        ("table", SEARCH.split("rule:")[0], "`search` and `rule` belong together"),
        ("claim", FIGURE.split("claims:")[0], "a claim needs claims: add them"),
    ],
)
def test_an_incomplete_spec_is_reported(tmp_path, monkeypatch, kind, text, message):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, monkeypatch, kind, text)
    assert str(error.value).startswith(f"conf/{kind}/01.yaml: {message}")


def test_an_experiment_without_metrics_says_how_to_declare_them(tmp_path, monkeypatch):
    bare = OmegaConf.create({"steps": 1})
    monkeypatch.setattr("experiments.products.checks.file_chosen", lambda *_: ("valley", bare))
    with pytest.raises(ConfigError, match=r"reads theta, but conf/experiment/valley.yaml has no `"):
        load(tmp_path, monkeypatch, "figure", FIGURE)


def test_a_run_does_not_need_every_spec_to_be_valid(tmp_path, monkeypatch):
    load(tmp_path, monkeypatch, "figure", FIGURE)
    folder = specs.CONF / "figure"
    (folder / "00.yaml").write_text(FIGURE.replace("seeds: 3", "seeds: 0"))
    run = load_spec("figure", "01").expand(["scale=smoke"])["adashift"][0]
    assert specs.figures_using(run) == ["figure-01"]
