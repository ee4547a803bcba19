"""What the documents say of the code must be so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_erratum_has_its_test_and_every_test_its_erratum():
    page = (ROOT / "docs/errata.md").read_text()
    code = (ROOT / "tests/adashift/test_errata.py").read_text()
    named = set(re.findall(r"`(test_E\d+\w*)`", page))
    written = set(re.findall(r"^def (test_E\d+\w*)", code, re.MULTILINE))
    assert named == written
    errata = {int(n) for n in re.findall(r"^### E(\d+)", page, re.MULTILINE)}
    assert errata == {int(n) for n in re.findall(r"test_E(\d+)", code)} >= set(range(1, 18))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
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
