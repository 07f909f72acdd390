"""Facts and rows on a terminal or in a pipe.

Owns: the difference between the two: rich tables here, plain aligned text there.
Does not know: what the facts are about.

Invariants:
1. In a pipe there is no colour, no box and no line that depends on the width of anything but the content; columns are
   separated by at least two spaces, one row is one line.
2. Cells are made printable here, once; no text of a store is ever taken for markup.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from snapshot_inspect.texts import printable

if TYPE_CHECKING:
    from rich.console import Console

Fact = tuple[str, str]
GAP = "  "
TABLE_ROWS_MAX = 2000
"""Above it a terminal gets plain rows too: laying out a table takes a while, and nobody looks at its lines."""


def console(**arguments: Any) -> Console:
    """A rich Console. With NO_COLOR set it sends no style at all: bold and dim are an attribute of colour to many."""
    from rich.console import Console

    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto", **arguments)


class Screen:
    """Where people read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Console | None = None
        if stream.isatty():
            self._console = console(file=stream, highlight=False, emoji=False)

    def line(self, text: str = "", style: str = "") -> None:
        if self._console is None:
            print(printable(text), file=self._stream)
        else:
            from rich.text import Text

            self._console.print(Text(printable(text), style), soft_wrap=True)

    def verbatim(self, text: str) -> None:
        """A text of this program's own, for another program: as it is."""
        self._stream.write(text)

    def facts(self, facts: Sequence[Fact]) -> None:
        """One `name  value` a line; the same name again is left out."""
        width = max((len(name) for name, _ in facts), default=0)
        for name, value in facts:
            if self._console is None:
                print(f"{name:<{width}}{GAP}{printable(value)}".rstrip(), file=self._stream)
            else:
                from rich.text import Text

                text = Text.assemble((f"{name:<{width}}", "bold"), GAP, printable(value))
                self._console.print(text, soft_wrap=True)

    def rows(self, heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[str] = frozenset()) -> None:
        """A table; the columns whose heads are in `right` are aligned there."""
        cells = [[printable(cell) for cell in row] for row in rows]
        if self._console is None or len(cells) > TABLE_ROWS_MAX:
            self._plain(heads, cells, right)
            return
        self._table(self._console, heads, cells, right)

    def _table(self, console: Console, heads: Sequence[str], rows: list[list[str]], right: frozenset[str]) -> None:
        """Without the columns that are empty; if it is wider than the terminal, each row is a few lines of its own."""
        from rich.box import SIMPLE_HEAD
        from rich.measure import Measurement
        from rich.table import Table
        from rich.text import Text

        shown = [i for i in range(len(heads)) if not rows or any(row[i] for row in rows)]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for i in shown:
            table.add_column(heads[i], justify="right" if heads[i] in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[i]) for i in shown))
        if Measurement.get(console, console.options.update(max_width=1 << 16), table).maximum <= console.width:
            console.print(table, soft_wrap=True)
            return
        for row in rows:
            self._lines_of(console, [(heads[i], row[i]) for i in shown if row[i]])

    def _lines_of(self, console: Console, cells: Sequence[Fact]) -> None:
        """One row: its first cell, then the others behind their heads, broken only between two of them if possible."""
        from rich.cells import cell_len
        from rich.text import Text

        (first, *rest), line, indent = cells, Text(), "    "
        line.append(f"{first[0]} {first[1]}", "bold")
        for head, cell in rest:
            if line.cell_len + len(GAP) + len(head) + 1 + cell_len(cell) > console.width and line.plain.strip():
                console.print(line, soft_wrap=True)
                line = Text(indent[len(GAP) :])
            line.append(GAP).append(head, "dim").append(f" {cell}")
        console.print(line, soft_wrap=True)

    def _plain(self, heads: Sequence[str], rows: list[list[str]], right: frozenset[str]) -> None:
        table = [list(heads), *([cell or "-" for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        for row in table:
            padded = [
                f"{cell:>{width}}" if head in right else f"{cell:<{width}}"
                for head, cell, width in zip(heads, row, widths, strict=True)
            ]
            print(GAP.join(padded).rstrip(), file=self._stream)
