"""The results page and README: made from the committed files, and opened in Chromium."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments.config.paths import ROOT
from experiments.products.report import (
    BOTH,
    YOURS,
    Place,
    answer,
    curve_points,
    headline,
    load_products,
    main_claims,
    overview,
    tally,
    write_report,
)
from experiments.products.report import (
    PUBLISHED as FROM_PUBLISHED,
)
from experiments.products.specs import load_spec
from experiments.records import index

LIBRARY = importlib.util.spec_from_file_location("browser", ROOT / "tests/browser.py")
browser = importlib.util.module_from_spec(LIBRARY)
LIBRARY.loader.exec_module(browser)


PUBLISHED = ROOT / "results/published"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with the report of the published results."""
    folder = tmp_path_factory.mktemp("results")
    write_report([Place(PUBLISHED)], folder / "report.html")
    return folder


def test_the_published_readme_has_every_figure_and_table():
    text = (PUBLISHED / "README.md").read_text()
    for product in load_products(Place(PUBLISHED)):
        (line,) = [x for x in text.splitlines() if f"`{product.command}`" in x]
        assert product.spec.shows in line and product.verdict in line
        assert str(product.seeds) in line
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (PUBLISHED / target).exists(), target


def test_the_published_readme_is_up_to_date():
    assert (PUBLISHED / "README.md").read_text() == overview(load_products(Place(PUBLISHED)))


def test_every_spec_has_a_text_on_what_the_paper_shows():
    assert [p.name for p in load_products(Place(PUBLISHED)) if not p.spec.shows] == []


def test_a_curve_with_inf_is_valid_json():
    part = pd.DataFrame({"step": [1, 2], "mean": [math.inf, 2.0], "sd": [math.nan, 0.0]})
    part["diverged"] = ["inf 3.5", None]
    found = curve_points(part, "", is_log=False)
    assert found["y"] == [None, 2.0] and found["crosses"] == [(1, None), (1, 3.5)]
    assert json.dumps(found, allow_nan=False)


def test_a_report_imports_neither_torch_nor_wandb():
    code = (
        "import sys; from pathlib import Path\n"
        "from experiments.products.report import Place, load_products\n"
        f"load_products(Place(Path({str(PUBLISHED)!r})))\n"
        "assert not {'torch', 'wandb'} & sys.modules.keys()"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_the_page_is_one_small_file_without_external_urls(results):
    page = (results / "report.html").read_text()
    assert len(page) < 5e6
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page)
    assert not re.findall(r"url\((?!#)|@import", page)
    assert f"{ROOT}/" not in page and f"{Path.home()}/" not in page


def test_a_curve_is_thinned_and_keeps_its_last_point():
    steps = pd.DataFrame({"step": range(1000), "mean": 1.0, "sd": 0.0, "curve": "a"})
    steps["diverged"] = [None] * 997 + ["2 3", None, None]
    thin = curve_points(steps, "", is_log=False)
    assert 200 < len(thin["x"]) <= 300 and (thin["x"][0], thin["x"][-1]) == (0, 999)
    assert curve_points(steps, "", is_log=True)["x"][:4] == [0, 1, 2, 3]
    assert thin["crosses"] == [(997, 2.0), (997, 3.0)]


def test_tally():
    rows = [{"verdict": v} for v in ("holds", "fails", "holds", "inconclusive")]
    assert tally(rows) == "2 hold, 1 inconclusive, 1 fails"


def verdict(name, scale="paper", earlier="", ours=""):
    return {"verdict": name, "scale": scale, "earlier": earlier, "ours": ours}


def test_the_headline_and_the_answer_count_the_verdicts():
    claims = [verdict("holds"), verdict("fails"), verdict("inconclusive", "laptop")]
    assert headline(claims) == "1 of the paper's 3 claims holds"
    assert answer(claims) == (
        "1 fails, 1 is inconclusive. 1 of the 3 verdicts are for laptop scale, with small networks "
        "and little data; they may differ at paper scale."
    )
    assert answer([verdict("holds", earlier="yes")]).startswith("†: 1 are by an earlier rule;")
    both = [verdict("fails", "desktop"), verdict("fails", "laptop and paper")]
    assert "2 of the 2 verdicts are for desktop or laptop scale" in answer(both)
    assert "for desktop scale, with smaller networks; they may differ" in answer(both[:1])
    assert headline([verdict("holds")] * 2) == "2 of the paper's 2 claims hold"
    assert answer([verdict("holds")]) == ""
    own = [verdict("holds"), verdict("fails", ours="yes"), verdict("holds", ours="yes")]
    assert headline(own) == "1 of the paper's 1 claims holds"
    assert answer(own) == "Of 2 claims of our own, 1 holds."
    assert answer([verdict("holds"), verdict("not run")]) == "1 has not been run."
    assert headline([verdict("not run")]) == headline([]) == "No claim has been judged yet"
    assert "make figure-1" in answer([])


def test_the_main_claims_are_published_and_one_has_a_picture():
    products = load_products(Place(PUBLISHED))
    main = {row["id"] for row in main_claims(products)}
    assert main == {claim.id for p in products for claim in p.spec.claims if claim.main}
    assert any(p.picture and main & {row["id"] for row in p.claims} for p in products)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A results folder with own results for Figure 1: copies, with another commit and start."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "figures").mkdir()
    for end in ("png", "csv"):
        name = f"figures/figure-01.{end}"
        (folder / name).write_bytes((PUBLISHED / name).read_bytes())
    for name, key, belongs in (
        ("claims", "commit", lambda row: row["id"].startswith("F1")),
        ("runs", "started", lambda row: "figure-01" in row["serves"]),
    ):
        table = pd.read_csv(PUBLISHED / f"{name}.csv", dtype=str, keep_default_na=False)
        is_mine = table.apply(belongs, axis=1)
        table.loc[is_mine, key] = "mine"
        table[is_mine].to_csv(folder / f"{name}.csv", index=False)
        table.to_csv(folder / f"{name}-all.csv", index=False)
    return folder


@pytest.mark.parametrize("with_both", [False, True])
def test_own_results_are_told_from_published_ones(own, with_both):
    places = [Place(own, "", YOURS), Place(PUBLISHED)]
    products = load_products(*[Place(own, "-all", BOTH)] * with_both, *places)
    origins = {p.name: p.origin for p in products}
    assert origins.pop("figure-01") == YOURS
    assert origins.pop("claim-theory") == FROM_PUBLISHED
    assert YOURS not in origins.values()
    rows = {row["id"]: row["origin"] for p in products for row in p.claims}
    assert {i for i, origin in rows.items() if origin == YOURS} == {f"F1{x}" for x in "abcdefghij"}
    runs = products[0].index.values()
    assert all((row["origin"] == YOURS) == (row["started"] == "mine") for row in runs)


# -- in Chromium -------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    if browser.CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    address = (results / "report.html").as_uri()
    with browser.Page(tmp_path_factory.mktemp("profile"), address) as page:
        yield page


@needs_chromium
def test_the_page_opens_without_errors_and_every_image_loads(page):
    pictures = sum(p.picture is not None for p in load_products(Place(PUBLISHED)))
    page.until("[...document.images].every(i => i.complete)")
    assert page.value("[...document.images].filter(i => i.naturalWidth > 300).length") == pictures
    assert page.value("document.querySelectorAll('.panel svg .curve').length") > 300
    assert page.value("document.querySelectorAll('.panel path[d*=NaN]').length") == 0
    assert page.problems == []


def choose(page, control, value):
    page.value(
        f"(c => {{ c.value = {json.dumps(value)}; c.dispatchEvent(new Event('input')); }})"
        f"(document.querySelector({json.dumps(control)}))"
    )


@needs_chromium
def test_the_filters_for_runs_work(page):
    rows = list(index.read_index(PUBLISHED / "runs.csv").values())
    count = "document.querySelector('#run-filters output').textContent"
    assert page.value(count) == f"{len(rows)} of {len(rows)}"
    for key in ("experiment", "optimizer", "status"):
        wanted = rows[0][key]
        alike = sum(row[key] == wanted for row in rows)
        choose(page, f"#run-filters select[data-key={key}]", wanted)
        assert page.value(count) == f"{alike} of {len(rows)}"
        choose(page, f"#run-filters select[data-key={key}]", "")
    choose(page, "#run-filters input", "Figure-03 adam seed=4")
    assert page.value(count) == f"1 of {len(rows)}"
    shown = page.value("document.querySelector('#run-table tbody').textContent")
    assert "mnist_mlp" in shown and "lr=0.001" in shown
    choose(page, "#run-filters input", "no such run")
    assert page.value("document.querySelectorAll('#run-table tbody tr').length") == 0
    choose(page, "#run-filters input", "")
    page.value("document.querySelector('#more').click()")
    assert page.value("document.querySelectorAll('#run-table tbody tr').length") == 240
    assert page.problems == []


@needs_chromium
def test_the_filter_for_claims_works(page):
    claims = pd.read_csv(PUBLISHED / "claims.csv")
    choose(page, "#claim-filters select", "fails")
    shown = "[...document.querySelectorAll('#claim-table tbody tr')].filter(r => r.offsetHeight)"
    assert page.value(f"{shown}.length") == (claims["verdict"] == "fails").sum()
    assert page.value(f"{shown}.every(r => r.textContent.includes('✗'))")
    choose(page, "#claim-filters select", "")


FIRST = "document.querySelector('#figure-01 .panel')"


@needs_chromium
def test_curves_can_be_hidden_and_shown(page):
    lines = f"{FIRST}.querySelectorAll('svg[role] .curve').length"
    count = len(load_spec("figure", "01").panels[0].runs)
    assert page.value(lines) == count
    page.value(f"{FIRST}.querySelector('.legend button').click()")
    assert page.value(lines) == count - 1
    page.value(f"{FIRST}.querySelector('.legend button').click()")
    assert page.value(lines) == count
    page.value(f"{FIRST}.querySelector('.legend button').dispatchEvent(new Event('dblclick'))")
    assert page.value(lines) == 1
    page.value(f"{FIRST}.querySelector('.legend button').dispatchEvent(new Event('dblclick'))")
    assert page.value(lines) == count and page.problems == []


@needs_chromium
def test_a_panel_zooms_with_the_mouse_and_shows_values(page):
    page.value(f"{FIRST}.scrollIntoView({{block: 'center'}})")
    ticks = f"[...{FIRST}.querySelectorAll('svg[role] text')].map(t => t.textContent).join(' ')"
    box = page.value(f"JSON.stringify({FIRST}.querySelector('svg[role]').getBoundingClientRect())")
    left, top, width, height = (json.loads(box)[k] for k in ("left", "top", "width", "height"))
    before = page.value(ticks)
    page.mouse("mouseMoved", left + width / 2, top + height / 2, buttons=0)
    assert "Adam (β1 = 0, β2 = 0.999)" in page.value(f"{FIRST}.querySelector('.tip').textContent")
    page.mouse("mousePressed", left + width * 0.5, top + height * 0.3)
    page.mouse("mouseMoved", left + width * 0.7, top + height * 0.6)
    page.mouse("mouseReleased", left + width * 0.7, top + height * 0.6, buttons=0)
    assert page.value(ticks) != before and page.value(f"{FIRST}.classList.contains('zoomed')")
    page.value(f"{FIRST}.querySelector('h4 button').click()")
    assert page.value(ticks) == before and page.problems == []


@needs_chromium
def test_the_first_screen_has_the_answer_a_picture_and_what_failed(page):
    page.value("scrollTo(0, 0)")
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    for part in ("h1", ".lead", ".first .panel svg", ".first .verdict-list", "#failed h2"):
        assert 0 < page.value(bottom.format(part)) < 900, part
    rows = pd.read_csv(PUBLISHED / "claims.csv")
    claims, paper = rows["verdict"], rows["verdict"][rows["ours"].isna()]
    assert page.value("document.querySelector('h1').textContent") == (
        f"{(paper == 'holds').sum()} of the paper's {len(paper)} claims hold"
    )
    failed = "document.querySelectorAll('#failed > .verdict-list > li').length"
    assert page.value(failed) == (claims == "fails").sum()
    assert page.value("document.querySelectorAll('.origin').length") == 0


OUTSIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .links'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className)
"""


@needs_chromium
def test_nothing_overflows_on_a_phone_and_the_navigation_scrolls_visibly(page):
    page.resize(375, 812)
    assert page.value("document.documentElement.scrollWidth") == 375
    assert page.value(OUTSIDE) == []
    assert page.value("(n => n.scrollWidth > n.clientWidth)(document.querySelector('.links'))")
    assert "gradient" in page.value("getComputedStyle(document.querySelector('.links')).maskImage")
    page.value("document.querySelector('.links').scrollTo(999, 0)")
    last = "document.querySelector('.links a:last-child').getBoundingClientRect().right"
    button = "document.querySelector('#theme').getBoundingClientRect().left"
    assert page.value(f"{last} < {button}")
    page.resize(1280, 900)


@needs_chromium
def test_own_results_are_marked_on_the_page(own, tmp_path):
    write_report([Place(own, "", YOURS), Place(PUBLISHED)], tmp_path / "report.html")
    with browser.Page(tmp_path / "profile", (tmp_path / "report.html").as_uri()) as page:
        marked = "[...document.querySelectorAll('article:has(h3 .origin)')].map(a => a.id)"
        assert page.value(marked) == ["figure-01"]
        assert "marked as yours" in page.value("document.querySelector('.kicker').textContent")
        choose(page, "#run-filters select[data-key=origin]", "yours")
        count = page.value("document.querySelector('#run-filters output').textContent")
        runs = len(index.read_index(own / "runs.csv"))
        assert count.startswith(f"{runs} of ") and page.problems == []


@needs_chromium
def test_a_report_without_results_says_what_to_run(tmp_path):
    write_report([Place(tmp_path, "", YOURS)], tmp_path / "report.html")
    with browser.Page(tmp_path / "profile", (tmp_path / "report.html").as_uri()) as page:
        assert "No claim has been judged" in page.value("document.querySelector('h1').textContent")
        assert "make figure-1" in page.value("document.querySelector('.lead').textContent")
        assert page.problems == []


@needs_chromium
def test_the_theme_changes(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.value(ground)
    page.value("document.querySelector('#theme').click()")
    assert page.value(ground) != light
    page.value("document.querySelector('#theme').click()")
    assert page.value(ground) == light


@needs_chromium
def test_the_page_prints_images_instead_of_controls(page):
    page.call("Emulation.setEmulatedMedia", media="print")
    shown = "getComputedStyle(document.querySelector('#figure-01 .{}')).display"
    assert page.value(shown.format("picture")) == "block"
    assert page.value(shown.format("panels")) == "none"
    page.call("Emulation.setEmulatedMedia", media="screen")
