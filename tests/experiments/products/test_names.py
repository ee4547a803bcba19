"""Names in words: every number of every claim can be read without conf/."""

import re

import pytest

from experiments.config.errors import ConfigError
from experiments.products.checks import check_content
from experiments.products.names import comparison_name, declared, metric_name, run_names
from experiments.products.schema import Spec
from experiments.products.specs import everything, load_spec
from experiments.products.summaries import STATISTICS

SPECS = [load_spec(kind, name) for kind, name in everything()]
CLAIMS = {claim.id: (spec, claim) for spec in SPECS for claim in spec.claims}


def parts_in_words(name):
    spec, claim = CLAIMS[name]
    return [comparison_name(claim, part, run_names(spec)) for part in claim.parts]


@pytest.mark.parametrize("name", CLAIMS)
def test_the_numbers_of_a_claim_have_different_names_in_plain_words(name):
    words = parts_in_words(name)
    assert len(set(words)) == len(words)
    for text in words:
        assert not re.search(r"[_/=]\w*_|_1e|\w/\w*=|; |: ?$", text), text


@pytest.mark.parametrize("name", CLAIMS)
def test_the_text_of_a_claim_is_a_sentence_of_its_own(name):
    text = CLAIMS[name][1].text
    assert re.match(r"[A-Zβ]", text) and text.endswith(".") and "…" not in text
    assert not re.match(r"(It|They|This|These|And|But|Though|Also)\b", text)
    assert len(text.split()) > 4


def test_every_metric_and_statistic_of_a_claim_is_declared():
    for _, claim in CLAIMS.values():
        for part in claim.parts:
            assert (
                metric_name(claim.metric_of(part)) != claim.metric_of(part) or claim.metric == "v"
            )
    assert set(declared()["statistics"]) == set(STATISTICS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("F4c", "test accuracy (mean over the last tenth), AdaShift − Adam"),
        ("F3b.mildly", "log10 of the training loss (standard deviation over the last tenth), "
         "non-AdaShift − 0.1"),
        ("L2", "cond(A) = 1e5, log10 of the loss (mean over the last tenth), "
         "SGD − (Adam, its best rate)"),
        ("I4.nmt", "BLEU, range over n = m = 10, n = m = 20, n = m = 30, n = m = 40"),
        ("F1j", "θ, AdaShift, β1 = 0, β2 = 0.5, n = 1"),
        ("I1.best", "training loss (mean over the last tenth), "
         "(ResNet: Adam, α = 0.01) − ResNet: AdaShift"),
        ("C3", "correlation of g² and Adam's v at β2 = 0.9, parameters frozen − 0.0211"),
    ],
)  # fmt: skip
def test_names_are_those_of_the_legend(name, expected):
    assert parts_in_words(name)[0] == expected


def test_a_metric_without_a_name_is_used_as_it_is():
    assert metric_name("own/metric") == "own/metric"


def test_a_label_of_an_unknown_run_is_reported():
    spec = Spec(title="t", seeds=2, runs={"a": ["optimizer=adam"]}, labels={"b": "B"})
    with pytest.raises(ConfigError, match="labels names b, which is unknown; the runs are a"):
        check_content(spec, "")
