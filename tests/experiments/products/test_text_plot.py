"""Curves drawn as text."""

import re

import numpy as np
import pandas as pd
import pytest

from experiments.products.text_plot import SYMBOLS, raster, text_plot


def line(*values):
    return pd.Series(values, index=10 * np.arange(1, len(values) + 1), dtype=float)


def uncolored(lines):
    return [re.sub(r"\x1b\[\d+m", "", line) for line in lines]


def test_a_rising_and_a_falling_line_cross():
    lines = text_plot({"up": line(0, 4), "down": line(4, 0)}, width=14, height=5, color=False)
    assert lines == [
        "4 ┤oo       **",
        "  │  oo   **",
        "2 ┤    ooo",
        "  │  **   oo",
        "0 ┤**       oo",
        "  └───────────",
        "   10 step  20",
    ]


@pytest.mark.parametrize("color", [True, False])
def test_no_line_is_wider_than_the_terminal(color):
    curve = pd.Series(np.random.default_rng(0).normal(size=5000), index=range(5000))
    for width in (30, 80, 200):
        lines = uncolored(text_plot({"a": curve, "b": -curve}, width, 12, color))
        assert max(map(len, lines)) == width and len(lines) == 14


def test_curves_differ_in_color_on_a_terminal_and_in_symbols_elsewhere():
    curves = {"a": line(1, 1, 1), "b": line(2, 2, 2)}
    colored, plain = (text_plot(curves, 30, 6, color) for color in (True, False))
    assert "\x1b[31m" in colored[0] and "\x1b[34m" in colored[5]
    assert not any("\x1b" in text for text in plain)
    assert SYMBOLS[1] in plain[0] and SYMBOLS[0] in plain[5]


def test_braille_has_eight_dots_in_a_cell():
    flat, steep = (text_plot({"a": c}, 13, 4, True)[-3] for c in (line(0, 0, 9), line(0, 9, 9)))
    assert "⣀" in flat and flat != steep


def test_a_line_is_connected_and_a_curve_that_ends_early_is_not_extended():
    grid = raster(line(0, 8, 8), (10, 50), (0, 8), (9, 41))
    assert grid[:, :21].any(axis=0).all() and not grid[:, 21:].any()
    assert grid.any(axis=1).all()


def test_columns_show_the_mean_of_many_points():
    noise = pd.Series(np.tile([0.0, 2.0], 500), index=range(1000))
    grid = raster(noise, (0, 999), (0, 2), (5, 10))
    assert grid[2].all() and grid.sum() == 10


def test_values_over_many_orders_have_a_logarithmic_axis():
    lines = text_plot({"a": line(1, 1e-2, 1e-4)}, 40, 5, color=False)
    assert [text.split()[0] for text in lines[:5:2]] == ["1", "0.01", "0.0001"]
    linear = text_plot({"a": line(1, 0, 1e-4)}, 40, 5, color=False)
    assert linear[2].split()[0] == "0.5"


@pytest.mark.parametrize("values", [(3.0,), (0.0, 0.0), (1e-300, 1e-300)])
def test_constant_curves_are_drawn(values):
    lines = text_plot({"a": line(*values)}, 40, 5, color=False)
    assert sum(SYMBOLS[0] in text for text in lines) == 1


def test_nan_and_inf_are_left_out():
    lines = text_plot({"a": line(1, np.inf, np.nan, 2), "b": line(np.nan)}, 40, 5, color=False)
    assert [lines[0].split()[0], lines[4].split()[0]] == ["2", "1"]
    assert text_plot({"a": line(np.nan)}, 40, 5, color=False) == ["no finite values"]
