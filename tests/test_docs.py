"""README and docs match the code and the published results, and their examples run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import adashift
from experiments.config.compose import compose
from experiments.products import pages
from experiments.products.pages import filled, results, timed, with_outcome
from experiments.products.report import Place, load_products
from experiments.products.specs import spec_path
from experiments.records.run import Run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/published/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def test_every_erratum_has_a_test_and_every_test_an_erratum():
    page = (ROOT / "docs/errata.md").read_text()
    code = (ROOT / "tests/adashift/analysis/test_errata.py").read_text()
    named = set(re.findall(r"`(test_E\d+\w*)`", page))
    written = set(re.findall(r"^def (test_E\d+\w*)", code, re.MULTILINE))
    assert named == written
    errata = {int(n) for n in re.findall(r"^### E(\d+)", page, re.MULTILINE)}
    assert errata == {int(n) for n in re.findall(r"test_E(\d+)", code)} >= set(range(1, 18))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_work(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not heading or heading in anchors(linked), target


def anchors(page):
    """The link targets that GitHub gives the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)", page.read_text())
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_exist(page):
    help_text = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?m)(?:`|^)make ([a-z-]+\d*)", page.read_text())) - {"help"}:
        name = re.sub(r"-(s?\d+|valley)$", "-1", re.sub(r"^sweep-.*", "sweep-betas", target))
        assert re.search(rf"(?m)^##   .*\b{name}\b", help_text), target


def test_the_settings_name_every_optimizer():
    text = (ROOT / "docs/settings.md").read_text()
    assert all(f.stem in text for f in (ROOT / "conf/optimizer").glob("*.yaml"))


@pytest.mark.parametrize(("page", "blocks"), [("README.md", 12), ("docs/reproduction.md", 5)])
def test_pages_have_the_published_results(page, blocks):
    """`make publish` fills them in."""
    text = (ROOT / page).read_text()
    found = results(load_products(Place(ROOT / "results/published")))
    assert len(pages.BLOCK.findall(text)) == blocks and filled(text, found) == text


def test_a_block_keeps_its_lines_and_an_unknown_name_is_an_error():
    text = "<!-- a -->1<!-- /a -->, <!-- b -->\n<!-- /b -->\n"
    once = filled(text, {"a": "one", "b": "| x |\n| y |"})
    assert once == "<!-- a -->one<!-- /a -->, <!-- b -->\n| x |\n| y |\n<!-- /b -->\n"
    assert (
        filled(once, {"a": "1", "b": ""}) == "<!-- a -->1<!-- /a -->, <!-- b -->\n\n<!-- /b -->\n"
    )
    with pytest.raises(KeyError, match="b"):
        filled(text, {"a": "one"})


def test_specs_have_the_times_of_their_published_runs():
    """`make publish` fills them in."""
    for product in load_products(Place(ROOT / "results/published")):
        text = spec_path(product.kind, product.number).read_text()
        assert pages.TIME.search(text.splitlines()[0]), product.name
        if product.seconds is not None and product.records == "yes":
            assert timed(text, product.seconds) == text, product.name


def test_experiments_have_the_times_and_results_of_their_published_runs():
    """`make publish` fills them in."""
    index = load_products(Place(ROOT / "results/published"))[0].index
    for path in sorted((ROOT / "conf/experiment").glob("*.yaml")):
        text = path.read_text()
        assert pages.EXAMPLE.search(text) and with_outcome(text, index) == text, path.name


def test_a_result_is_the_mean_over_the_seeds():
    text = "# python run.py experiment=mnist_lr optimizer=adam     (9 s)\nmetrics: []"
    setting = Run(compose(["experiment=mnist_lr", "optimizer=adam", "scale=paper"])).setting
    runs = {
        f"mnist_lr/{setting}/seed={seed}": {"seconds": seconds, "metrics": f"x=1 {metric} z=0"}
        for seed, seconds, metric in [
            (1, "5", "validation_accuracy=0.9"),
            (2, "7", "validation_accuracy=0.8"),
            (3, "90", "validation_accuracy=0.7"),
        ]
    }
    said = "(paper scale: 7 s on one core, validation_accuracy 0.8)\n"
    assert with_outcome(text, runs) == text.replace("(9 s)\n", said)
    assert with_outcome(text, {}) == text


def test_a_time_is_that_of_two_runs_at_once():
    spec = "# make figure-9     (paper scale; about {} on two cores; it shares runs)\ntitle: x"
    assert timed(spec.format("1 hour"), 600) == spec.format("5 min")
    assert timed("title: x", 600) == "title: x"


def test_the_readme_has_the_learning_rates_of_the_published_searches():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"(?m)^\| \[Table (\d)\]\(\S+\): (.+?) \| (.*) \|", text)
    rows = [
        (number, problem, cells.replace(" (edge of the grid)", ""))
        for number, problem, cells in rows
    ]
    assert len(rows) == 7
    for number, problem, cells in rows:
        table = pd.read_csv(ROOT / f"results/published/tables/table-0{number}.csv")
        *shown, _ = cells.split(" | ")
        assert [float(rate) for rate in shown] == searched_rates(table, problem), problem


def searched_rates(table, problem):
    """The paper's learning rates of Adam and AdaShift, then the best ones of the search."""
    mark = next((f"{x}: " for x in ("ResNet", "DenseNet", "Tiny-ImageNet") if x == problem), "")
    wanted = [(mark + "Adam",), (mark + "AdaShift", "max-AdaShift")]
    return [
        table[table["optimizer"].isin(optimizer) & table[column]]["lr"].item()
        for column in ("paper", "best")
        for optimizer in wanted
    ]


def test_the_hops_of_the_design_exist():
    hops = re.findall(r"(?m)^\d+\. `([a-z_.]+)\.(\w+)`", (ROOT / "docs/design.md").read_text())
    assert len(hops) >= 12
    for module, name in hops:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"(?m)^(def|class) {name}\b", source), f"{module}.{name}"


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == adashift.__version__
    assert f"## {adashift.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


# -- worked examples ---------------------------------------------------------------------------


FILE, BLOCK = r"^\*\*`(?P<path>[^`]+)`\*\*\n\n", r"^```(?P<language>\w*)\n(?P<text>.*?)^```"
EXAMPLE = re.compile(f"(?ms)(?:{FILE})?{BLOCK}")


@pytest.mark.parametrize("page", ["README.md", "docs/optimizer.md"])
def test_python_examples_run(page):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(12)]
    names = {"model": model, "batches": batches, "loss_function": torch.nn.functional.mse_loss}
    before = [p.detach().clone() for p in model.parameters()]
    for example in EXAMPLE.finditer((ROOT / page).read_text()):
        if example["language"] == "python":
            exec(example["text"], names)
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))


@pytest.fixture
def clone(tmp_path):
    """A copy of the project that a test may write to."""
    folder, programs = tmp_path / "clone", tmp_path / "venv/bin"
    for name in ("conf", "adashift", "experiments", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("run.py", "Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    (programs.parent / ".installed").touch()  # newer than the lock
    return folder


def follow(clone, heading, more=""):
    """Write the files of a section and run its commands as printed, or with more settings."""
    venv = clone.parent / "venv"
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment = outer | {"VENV": str(venv), "PATH": f"{venv}/bin:{outer['PATH']}", "ARGS": more}
    text = (ROOT / "docs/own_experiments.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    output = []
    for example in EXAMPLE.finditer(section):
        if example["path"]:
            (clone / example["path"]).write_text(example["text"])
            continue
        command = example["text"].rstrip("\n") + (
            f" {more}" if "python " in example["text"] else ""
        )
        out = subprocess.run(
            command, shell=True, cwd=clone, env=environment, capture_output=True, text=True
        )
        assert out.returncode == 0, f"{command}\n{out.stderr}"
        output.append(out.stdout)
    return output


@pytest.mark.slow
def test_a_custom_optimizer_is_trained_and_drawn(clone):
    words = ["-m", "experiments", "figure", "3", "scale=smoke", "tracking=off"]
    subprocess.run([sys.executable, *words], cwd=clone, check=True, capture_output=True)
    default = clone / "results/figures/figure-03-smoke.csv"
    before = default.read_bytes(), set(clone.glob("results/runs/mnist_mlp/*/*"))
    run, figure = follow(clone, "An optimizer", "scale=smoke tracking=off")
    assert ": finished, " in run
    table = (clone / "results/figures/figure-03-with-signum-smoke-all.csv").read_text()
    assert "figure-03-with-signum" in figure and "a,signum," in table and "a,Adam," in table
    new = set(clone.glob("results/runs/mnist_mlp/*/*")) - before[1]
    assert {path.parent.name.split("-")[0] for path in new} == {"custom", "signum"}
    assert default.read_bytes() == before[0]


@pytest.mark.slow
def test_a_custom_experiment_and_figure_are_trained_drawn_and_judged(clone):
    run, figure = follow(clone, "An experiment and a figure")
    assert ": finished, " in run and "drawn from 6 runs" in figure and "V1 " in figure
    assert (clone / "results/figures/figure-valley.png").exists()
