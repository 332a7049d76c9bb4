"""Text for a terminal: tables and prose of its width, without cutting numbers or names."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from repro.report import cell_text, evidence_lines, is_text, printable

WIDE = 180  # columns of prose and long cells in a pipe, which has no width
NARROW = 40
_GAP = 2  # spaces between columns
_LONGEST = 40  # characters of a word that is never folded


def width() -> int | None:
    """The columns of the terminal, or of ``$COLUMNS``; None for a pipe."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return max(NARROW, shutil.get_terminal_size((100, 24)).columns)


class Bar:
    """A progress bar on the standard error stream, redrawn only by its methods.

    No thread redraws it, since that would disturb measurements.

    Args:
        name: Text before the bar.
        total: Number of steps.
        shown: Whether to show a bar at all.
    """

    def __init__(self, name: str, total: int, shown: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[now]}", markup=False),
            console=Console(stderr=True, highlight=False, markup=False, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not shown,
        )
        self._task = self._progress.add_task(name, total=total, now="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """Note that a step is done."""
        self._progress.update(self._task, advance=1, refresh=True)

    def say(self, text: str) -> None:
        """Show the current activity beside the bar."""
        self._progress.update(self._task, now=printable(text), refresh=True)

    def write(self, line: str) -> None:
        """Write a line above the bar, unbroken."""
        self._progress.console.print(line, soft_wrap=True)


def prose(text: str) -> str:
    """Text folded between words; a path is never broken."""
    columns = width() or WIDE
    return "\n".join(
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def table(rows: Sequence[Mapping[str, Any]], title: str = "", folded: bool = True) -> str:
    """Rows as a table that fits the terminal.

    Cells are folded between words. If that is not enough, columns are left out, from the right. A
    line under the table names them.

    Args:
        rows: Cells by column; columns keep the order of their first occurrence.
        title: Text above the table.
        folded: Whether cells may be folded before columns are left out.
    """
    limit = width()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {
        column: [evidence_lines(column, cell_text(row.get(column))) for row in rows]
        for column in columns
    }
    bounds = {column: _bounds([*texts, column]) for column, texts in cells.items()}
    ends = list(accumulate((least if folded else most) + _GAP for least, most in bounds.values()))
    count = sum(end - _GAP <= limit for end in ends[1:]) + 1 if limit else len(columns)
    shown = columns[:count]
    lines = [prose(printable(title)), ""] if title else []
    lines.append(_drawn({column: cells[column] for column in shown}, bounds, limit))
    if count < len(columns):
        left_out = "; ".join(map(printable, columns[count:]))
        advice = f"{ends[-1] - _GAP} columns show all, and so does a pipe, such as | less -S."
        lines.append(prose(f"Left out at {limit} columns: {left_out}. {advice}"))
    return "\n".join(lines)


def _bounds(texts: Sequence[str]) -> tuple[int, int]:
    """The least and the largest width of a column: of its longest word and its longest line."""
    from rich.cells import cell_len

    word = max(cell_len(word) for text in texts for word in [*text.split(), ""])
    line = max(cell_len(line) for text in texts for line in text.split("\n"))
    return min(word, _LONGEST), max(1, line)


def _drawn(
    cells: Mapping[str, Sequence[str]], bounds: Mapping[str, tuple[int, int]], limit: int | None
) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    gaps = _GAP * (len(cells) - 1)
    room = (limit or max(WIDE, sum(bounds[column][0] for column in cells) + gaps)) - gaps
    # Short columns keep their width; long columns share the rest.
    level = max([1, *(most for _, most in bounds.values())])
    while level > 1 and sum(max(bounds[c][0], min(bounds[c][1], level)) for c in cells) > room:
        level -= 1
    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for position, (column, texts) in enumerate(cells.items()):
        least, most = bounds[column]
        drawn.add_column(
            Text(printable(column)),
            justify="left" if position == 0 or is_text(column, texts) else "right",
            width=max(least, min(most, level)),
            overflow="fold",
        )
    for row in zip(*cells.values(), strict=True):
        drawn.add_row(*map(Text, row))
    console = Console(width=max(room + gaps, 1), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
