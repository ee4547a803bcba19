"""Markdown tables and pages: cells print as given, and HTML in a text stays text."""

import pandas as pd

from experiments.products.markdown import as_html, markdown_table
from experiments.products.report import page_as_html

TABLE = pd.DataFrame({"": ["a", "b"], "x | y": ["1.50", "|v| <script>"], "n": [3, 1e-9]})


def rows_of(text):
    return [line.strip("| ") for line in text.splitlines()]


def test_cells_print_as_given_and_pipes_are_escaped():
    head, line, first, second = rows_of(markdown_table(TABLE))
    assert head == r"x \| y | n" and set(line) == {"-", "|"}
    assert first == "a | 1.50 | 3.0" and second == r"b | \|v\| <script> | 1e-09"


def test_a_long_cell_does_not_pad_the_other_rows():
    table = pd.DataFrame({"claim": ["long " * 100, "short"]})
    assert markdown_table(table).splitlines()[-1] == "| short |"


def test_a_table_survives_the_way_to_html():
    html = as_html(markdown_table(TABLE))
    assert html.startswith('<div class="scroll"><table>') and "</table></div>" in html
    assert "<th>x | y</th>" in html and "<td>1.50</td>" in html
    assert "<td>|v| &lt;script&gt;</td>" in html and html.count("<tr>") == 3


def test_html_and_links_in_a_text_are_harmless():
    assert as_html("a <b> & **c** `d`") == (
        "<p>a &lt;b&gt; &amp; <strong>c</strong> <code>d</code></p>\n"
    )
    assert "<a" not in as_html("[x](javascript:alert(1))")


def test_a_page_is_shown_without_its_title(tmp_path):
    (tmp_path / "a.md").write_text("# Table 1. A title\n\ntext\n")
    assert page_as_html(tmp_path / "a.md") == "<p>text</p>\n"
