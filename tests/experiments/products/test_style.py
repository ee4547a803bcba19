"""Colors: the same optimizer looks the same everywhere, and readers can tell them apart."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from experiments.config.paths import CONF
from experiments.products.style import (
    OF_OTHERS,
    SEQUENCE,
    label_of,
    looks_of,
    mixed,
    sequence,
    styles,
)

# Machado, Oliveira, Fernandes 2009, full severity, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
# Ottosson 2020, from linear RGB to cone responses, and from their cube roots to OKLab.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def seen(color, eye):
    """OKLab × 100: two colours 2 apart are just told apart side by side."""
    c = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return 100 * TO_LAB @ np.cbrt(TO_CONES @ np.clip(EYES[eye] @ linear, 0, 1))


def distance(a, b, eye):
    return float(np.linalg.norm(seen(a, eye) - seen(b, eye)))


def test_the_measure_finds_the_pair_that_is_known_to_be_bad():
    red, green = "#d62728", "#2ca02c"  # matplotlib's, which this project had
    assert distance(red, green, "usual") > 30 and distance(red, green, "deuteranopia") < 5


@pytest.mark.parametrize("eye", EYES)
def test_any_two_optimizers_can_be_told_apart(eye):
    colors = {name: style["color"] for name, style in styles().items()}
    for a, b in combinations(colors, 2):
        first, second = looks_of([(a, {}), (b, {})])
        assert first.dashes != second.dashes or colors[a] != colors[b], (a, b)
        assert distance(first.color, second.color, eye) > 12, (a, b)
    assert all(distance(color, "#ffffff", eye) > 20 for color in colors.values())


def curves_of(optimizer, **settings):
    """Curves of one optimizer; each setting is a list with a value per curve."""
    return [
        (optimizer, dict(zip(settings, values, strict=True)))
        for values in zip(*settings.values(), strict=True)
    ]


def test_two_curves_of_one_optimizer_differ_in_shade_and_dashes():
    looks = looks_of([*curves_of("adam", lr=[1, 2]), ("adashift", {"lr": 1})])
    assert looks[0].color == styles()["adam"]["color"] and looks[0].dashes == ()
    assert len({look.color for look in looks}) == 3
    assert looks[0].dashes != looks[1].dashes


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": [0.1, 0.001, 0.01]},
        {"n": [30, 5, 10], "m": [None, None, None]},
        {"n": [30, 30, 30], "m": [None, 1, 10]},
        {"betas": [[0.9, 0.999], [0.9, 0.9], [0.9, 0.99]], "eps": [1e-8, 1e-8, 1e-8]},
    ],
)
def test_a_sweep_is_colored_in_the_order_of_its_values(settings):
    looks = looks_of([("adam", {"lr": 1}), *curves_of("adashift", **settings)])
    assert looks[0].color == styles()["adam"]["color"]
    assert [look.color for look in looks[1:]] == [SEQUENCE[-1], SEQUENCE[0], SEQUENCE[2]]
    assert all(look.dashes == () for look in looks)


def test_a_second_swept_number_is_shown_by_dashes():
    betas = [[beta1, beta2] for beta1 in (0, 0.9) for beta2 in (0.9, 0.99, 0.999)]
    looks = looks_of(curves_of("adashift", betas=betas))
    assert len(set(looks)) == 6
    assert [look.color for look in looks[:3]] == [look.color for look in looks[3:]]
    assert len({look.dashes for look in looks[:3]}) == len({look.dashes for look in looks[3:]}) == 1


@pytest.mark.parametrize(
    "settings", [{"phi": ["max", "mean", "row"]}, {"lr": [1, 1, 1]}, {"lr": [1, 2, 2]}]
)
def test_other_curves_are_no_sweep(settings):
    looks = looks_of(curves_of("adashift", **settings))
    assert looks[0].color == styles()["adashift"]["color"] and len(set(looks)) == 3


def test_different_optimizers_without_an_entry_are_no_sweep():
    looks = looks_of([("lion", {"lr": 1}), ("adamw", {"lr": 2}), ("radam", {"lr": 3})])
    assert not {look.color for look in looks} & {*SEQUENCE} and len(set(looks)) == 3


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("count", [3, 4, 5])
def test_the_colors_of_a_sweep_get_lighter_in_equal_steps(eye, count):
    colors = sequence(count)
    steps = [distance(a, b, eye) for a, b in pairwise(colors)]
    assert min(steps) > 9 and max(steps) < 1.7 * min(steps)
    lightness = [seen(color, eye)[0] for color in colors]
    assert lightness == sorted(lightness) and lightness[-1] < 82  # still seen on white paper


def test_an_optimizer_without_an_entry_has_a_look_too():
    one, other = looks_of([("nobodys_own", {}), ("somebodys_own", {})])
    assert one.color == OF_OTHERS and one.dashes and one != other
    assert label_of("nobodys_own") == "nobodys own"


def test_mixing():
    assert mixed("#804020", 0, 0.5) == "#402010" and mixed("#804020", 1, 1.0) == "#ffffff"


def test_every_entry_belongs_to_an_optimizer():
    assert set(styles()) <= {p.stem for p in (CONF / "optimizer").glob("*.yaml")}
