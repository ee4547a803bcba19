"""What the documents say of the code must be so."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import adashift
from experiments.products.report import load_products, tally

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "results/published/README.md", *(ROOT / "docs").glob("*.md")]


def test_every_erratum_has_its_test_and_every_test_its_erratum():
    page = (ROOT / "docs/errata.md").read_text()
    code = (ROOT / "tests/adashift/test_errata.py").read_text()
    named = set(re.findall(r"`(test_E\d+\w*)`", page))
    written = set(re.findall(r"^def (test_E\d+\w*)", code, re.MULTILINE))
    assert named == written
    errata = {int(n) for n in re.findall(r"^### E(\d+)", page, re.MULTILINE)}
    assert errata == {int(n) for n in re.findall(r"test_E(\d+)", code)} >= set(range(1, 18))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_names_every_optimizer_and_only_targets_that_exist():
    text = (ROOT / "README.md").read_text()
    assert all(f.stem in text for f in (ROOT / "conf/optimizer").glob("*.yaml"))
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+\d*)", text, re.MULTILINE)) - {"help"}
    help_text = (ROOT / "Makefile").read_text()
    for target in targets:
        name = re.sub(r"-\d+$", "-1", target)
        assert re.search(rf"^##   .*\b{name}\b", help_text, re.MULTILINE), target


def test_the_gallery_tells_the_verdicts_of_the_results():
    text = (ROOT / "README.md").read_text()
    verdicts = {p.label: p.verdict for p in load_products((ROOT / "results/published", ""))}
    shown = re.findall(r"!\[\]\(\S+\) \[(Figure \d+)\]\(\S+\): ([^.]+)\.", text)
    assert len(shown) >= 6 and all(verdicts[label] == verdict for label, verdict in shown)


def test_the_readme_has_the_published_numbers_of_claims():
    text = (ROOT / "README.md").read_text()
    products = load_products((ROOT / "results/published", ""))
    claims = [row for product in products for row in product.claims]
    assert f"**{len(claims)} claims: {tally(claims)}.**" in text


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == adashift.__version__
    assert f"## {adashift.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


# -- the worked examples -----------------------------------------------------------------------


def blocks(heading):
    """The fenced blocks of a chapter of the README: (language, text)."""
    text = (ROOT / "README.md").read_text()
    chapter = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```", chapter, re.MULTILINE | re.DOTALL)


@pytest.fixture
def clone(tmp_path):
    """A copy of the project to write into; its data are at hand."""
    folder = tmp_path / "clone"
    for name in ("conf", "adashift", "experiments", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "run.py", folder)
    return folder


def follow(clone, heading):
    """Write the files of a chapter and type its commands, at smoke scale; return what they said."""
    said = []
    for language, text in blocks(heading):
        if language:
            path, content = text.removeprefix("# ").split("\n", 1)
            (clone / path).write_text(content)
            continue
        (line,) = text.splitlines()
        words = line.split("#")[0].split()
        if words[0] == "make":  # what the Makefile makes of it is tested in test_project.py
            extra = words[2].removeprefix("EXTRA=")
            words = ["python", "-m", "experiments", "--extra", extra, "figure", words[1][7:]]
        command = [sys.executable, *words[1:], "scale=smoke", "tracking=off"]
        out = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        assert out.returncode == 0, f"{line}\n{out.stderr}"
        said.append(out.stdout)
    return said


def test_your_own_optimizer_is_a_run_and_a_curve(clone):
    words = ["-m", "experiments", "figure", "3", "scale=smoke", "tracking=off"]
    subprocess.run([sys.executable, *words], cwd=clone, check=True, capture_output=True)
    usual = clone / "results/figures/figure-03-smoke.csv"
    before = usual.read_bytes(), set(clone.glob("results/runs/mnist_mlp/*/*"))
    run, figure = follow(clone, "Your own optimizer in ten minutes")
    assert run.endswith("finished\n")
    table = (clone / "results/figures/figure-03-with-signum-smoke-all.csv").read_text()
    assert "figure-03-with-signum" in figure and "a,signum," in table and "a,Adam," in table
    new = set(clone.glob("results/runs/mnist_mlp/*/*")) - before[1]
    assert {path.parent.name.split("-")[0] for path in new} == {"custom", "signum"}
    assert usual.read_bytes() == before[0]


def test_your_own_experiment_and_figure_are_trained_drawn_and_judged(clone):
    run, figure = follow(clone, "Your own experiment, your own figure")
    assert run.endswith("finished\n") and "drawn from 6 runs" in figure and "V1 " in figure
    assert (clone / "results/figures/figure-valley-smoke.png").exists()
