"""Writes Markdown tables, and turns the project's Markdown pages into HTML."""

from __future__ import annotations

from typing import Any

import pandas as pd
from markdown_it import MarkdownIt


def markdown_table(table: pd.DataFrame) -> str:
    """Return the table without its index as Markdown; every cell prints as given.

    >>> print(markdown_table(pd.DataFrame({"metric": ["|θ|"], "value": ["1.50"]})))
    | metric | value |
    |----------|---------|
    | \\|θ\\| | 1.50 |
    """
    escaped = table.rename(columns=escape_pipes).map(escape_pipes)
    # stralign=None: cells are not padded, so that one long cell does not widen every row
    return str(
        escaped.to_markdown(index=False, tablefmt="github", disable_numparse=True, stralign=None)
    )


def text_table(table: pd.DataFrame) -> str:
    """Return the table without its index for a terminal: Markdown with aligned columns."""
    escaped = table.rename(columns=escape_pipes).map(escape_pipes)
    return str(escaped.to_markdown(index=False, tablefmt="github", disable_numparse=True))


def escape_pipes(cell: Any) -> str:
    return str(cell).replace("|", r"\|")


def as_html(text: str) -> str:
    """Return Markdown as HTML; HTML inside the text is escaped, and wide tables scroll."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    html = str(parser.render(text))
    html = html.replace("<table>", '<div class="scroll"><table>')
    return html.replace("</table>", "</table></div>")
