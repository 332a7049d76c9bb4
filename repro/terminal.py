"""Text for a terminal: tables and prose of its width, in which no number and no name is cut."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from repro.report import cell_text, printable

WIDE = 180  # columns of prose and tables in a pipe, which has no width of its own
NARROW = 40
_GAP = 2  # spaces between columns
_SENTENCE = 24  # characters: longer cells are sentences, folded to no less than this


def width() -> int | None:
    """The columns of the terminal, or of ``$COLUMNS``; None for a pipe."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return max(NARROW, shutil.get_terminal_size((100, 24)).columns)


class Bar:
    """A progress bar of `total` steps on the standard error stream.

    No thread redraws it, which would slow the measured work.
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
        """Name the current step beside the bar."""
        self._progress.update(self._task, now=printable(text), refresh=True)

    def write(self, line: str) -> None:
        """Write a line above the bar, unbroken."""
        self._progress.console.print(line, soft_wrap=True)


def prose(text: str, indent: str = "") -> str:
    """Text folded between words, further lines indented; a path is never broken."""
    columns = width() or WIDE
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.splitlines()))


def table(rows: Sequence[Mapping[str, Any]], title: str = "", most: int | None = None) -> str:
    """Rows as tables that fit the terminal, with cells folded between words.

    Columns beyond its width follow in a further table, after those that tell the rows apart.

    Args:
        rows: Cells by column; columns keep the order of their first occurrence.
        title: Text above the table.
        most: How many rows all tables have together; a line says how many ``--evidence`` adds.
    """
    limit = width()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {column: [cell_text(row.get(column)) for row in rows] for column in columns}
    least = {column: _least_width(column, cells[column], limit) for column in columns}
    # The first columns that tell the rows apart, as far as half of the width.
    keys: list[str] = []
    for column in columns:
        apart = keys and len(set(zip(*(cells[key] for key in keys), strict=True))) == len(rows)
        if apart or (keys and limit and _taken(least, [*keys, column]) > limit // 2):
            break
        keys.append(column)
    parts: list[list[str]] = [[]]
    for column in columns:
        if limit and parts[-1] and _taken(least, [*parts[-1], column]) > limit:
            parts.append([*keys])
        parts[-1].append(column)
    shown = len(rows) if most is None else min(len(rows), most // len(parts))
    drawn = [prose(printable(title)), ""] if title else []
    drawn.append(
        "\n\n".join(_drawn({c: cells[c][:shown] for c in part}, least, limit) for part in parts)
    )
    if shown < len(rows):
        drawn.append(f"{len(rows) - shown} more rows: --evidence")
    return "\n".join(drawn)


def _taken(widths: Mapping[str, int], columns: Sequence[str]) -> int:
    return sum(widths[column] + _GAP for column in columns) - _GAP


def _least_width(column: str, texts: Sequence[str], limit: int | None) -> int:
    """The width in which no word is folded, no number with its deviation, and no short cell."""
    from rich.cells import cell_len

    whole = (text.replace(" ± ", "\xa0±\xa0") for text in texts)
    words = [word for text in (column, *whole) for word in re.split("[ \t\n]", text)]
    least = max(cell_len(word) for word in words)
    sentence = max((cell_len(text) for text in texts), default=0)
    return min(max(least, min(sentence, _SENTENCE)), (limit or WIDE) // 2 - 1)


def _is_number(text: str) -> bool:
    return text[:1] in "0123456789+-−×±<>≤≥~" and len(text) <= _SENTENCE


def _drawn(cells: Mapping[str, Sequence[str]], least: Mapping[str, int], limit: int | None) -> str:
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    full = {
        column: max(cell_len(line) for text in (column, *texts) for line in text.split("\n"))
        for column, texts in cells.items()
    }
    room = limit or max(WIDE, _taken(least, [*cells]))
    widths, level = dict(full), room
    while level and _taken(widths, [*cells]) > room:  # the widest columns become narrower first
        level -= 1
        widths = {c: min(full[c], max(least[c], level)) for c in cells}
    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for position, (column, texts) in enumerate(cells.items()):
        numbers = position > 0 and any(map(_is_number, filter(None, texts)))
        drawn.add_column(
            Text(printable(column)),
            justify="right" if numbers else "left",
            width=widths[column],
            overflow="fold",
        )
    for row in zip(*cells.values(), strict=True):
        drawn.add_row(*map(Text, row))
    console = Console(width=max(room, 1), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
