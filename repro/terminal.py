"""Text for a terminal: tables and prose of its width, in which no number and no name is cut."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from repro.report import cell_text, evidence_lines, is_text, printable

WIDE = 180  # columns of prose and long cells in a pipe, which has no width of its own
NARROW = 40
_GAP = 2  # spaces between columns
_LONGEST = 40  # characters of a word that is never folded
# While there is room, cells of so many characters are not folded, such as 87.16 ± 0.33, and a
# column of sentences has at least so many.
_WHOLE, _SENTENCE = 14, 30


def width() -> int | None:
    """Return the columns of the terminal, or of ``$COLUMNS``; None for a pipe."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return max(NARROW, shutil.get_terminal_size((100, 24)).columns)


class Bar:
    """A progress bar on the standard error stream, which changes when it is told something.

    No thread redraws it, which would take time from what is being measured.

    Args:
        name: Stands before it.
        total: How many steps there are.
        shown: Whether there is a bar at all.
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
        """Say beside the bar what is being done."""
        self._progress.update(self._task, now=printable(text), refresh=True)

    def write(self, line: str) -> None:
        """Write a line above the bar, unbroken."""
        self._progress.console.print(line, soft_wrap=True)


def prose(text: str) -> str:
    """Return text folded between words; a path is never broken."""
    columns = width() or WIDE
    return "\n".join(
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return rows as a table that fits the terminal.

    Cells are folded between words. Where that is not enough, columns are left out, from the right.
    A line under the table names them.

    Args:
        rows: By column, in the order of the first row that has it.
        title: Stands above.
    """
    limit = width()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {
        column: [evidence_lines(column, cell_text(row.get(column))) for row in rows]
        for column in columns
    }
    needed, count = _least(columns, cells, 0), len(columns)
    while limit is not None and count > 1 and _least(columns[:count], cells, 0) > limit:
        count -= 1
    lines = [prose(printable(title)), ""] if title else []
    lines.append(_drawn(columns[:count], cells, limit or max(WIDE, needed)))
    if count < len(columns):
        left_out = "; ".join(map(printable, columns[count:]))
        lines.append(
            prose(
                f"Left out at {limit} columns: {left_out}. {needed} columns show all, and so does "
                "a pipe, such as | less -S."
            )
        )
    return "\n".join(lines)


def _least(columns: Sequence[str], cells: Mapping[str, Sequence[str]], whole: int) -> int:
    """Return the least width of these columns side by side."""
    return sum(_bounds(c, cells[c], whole)[0] for c in columns) + _GAP * (len(columns) - 1)


def _bounds(column: str, texts: Sequence[str], whole: int) -> tuple[int, int]:
    """Return the least and the largest width of a column.

    Cells up to `whole` characters are not folded; 0 folds all between words.
    """
    from rich.cells import cell_len

    lines = [line for text in texts for line in text.split("\n")]
    longest = max(map(cell_len, [*lines, column]))
    words = max([cell_len(word) for text in [*texts, column] for word in text.split()], default=0)
    kept = max([cell_len(line) for line in lines if cell_len(line) <= whole], default=0)
    sentences = column in ("claim", "evidence", "means") and whole
    least = max(min(words, _LONGEST), kept, min(longest, _SENTENCE) if sentences else 1)
    return least, max(least, longest)


def _drawn(columns: Sequence[str], cells: Mapping[str, Sequence[str]], limit: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    whole = _WHOLE if _least(columns, cells, _WHOLE) <= limit else 0
    bounds = [_bounds(column, cells[column], whole) for column in columns]
    room = limit - _GAP * (len(columns) - 1)
    # Short columns stay as they are; the long ones share what is left.
    level = max([1, *(most for _, most in bounds)])
    while level > 1 and sum(max(least, min(most, level)) for least, most in bounds) > room:
        level -= 1
    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for position, (column, (least, most)) in enumerate(zip(columns, bounds, strict=True)):
        left = position == 0 or is_text(column, cells[column])
        drawn.add_column(
            Text(printable(column)),
            justify="left" if left else "right",
            width=max(least, min(most, level)),
            overflow="fold",
        )
    for texts in zip(*(cells[column] for column in columns), strict=True):
        drawn.add_row(*map(Text, texts))
    console = Console(width=max(limit, 1), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
