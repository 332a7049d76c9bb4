"""Text for a terminal: tables and prose of its width, in which no number and no name is cut."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from repro.report import cells_of, printable

WIDE = 180  # columns of prose and tables in a pipe, which has no width of its own
NARROW = 40
_GAP = 2  # spaces between columns
_SENTENCE = 24  # characters: longer cells are sentences, folded to no less than this


def width() -> int | None:
    """The columns of the terminal, or of ``$COLUMNS``; None for a pipe."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return max(NARROW, shutil.get_terminal_size((100, 24)).columns)


class Bar(Progress):
    """A progress bar of `total` steps on the standard error stream.

    No thread redraws it, which would slow the measured work.
    """

    def __init__(self, name: str, total: int, shown: bool) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", markup=False),
            console=Console(stderr=True, highlight=False, markup=False, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not shown,
        )
        self._only = self.add_task(name, total=total, now="")

    def step(self) -> None:
        """Note that a step is done."""
        self.update(self._only, advance=1, refresh=True)

    def say(self, text: str) -> None:
        """Name the current step beside the bar."""
        self.update(self._only, now=printable(text), refresh=True)

    def write(self, line: str) -> None:
        """Write a line above the bar, unbroken."""
        self.console.print(line, soft_wrap=True)


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
    cells = cells_of(rows)
    least = {column: _least_width(column, cells[column], limit) for column in cells}
    keys = _telling_apart(cells, limit)
    tight = least | keys if limit and _taken(least, keys) > limit // 2 else least
    parts: list[list[str]] = [[]]
    for column in cells:
        own = tight if parts[1:] else least
        if limit and parts[-1] and _taken(own, [*parts[-1], column]) > limit:
            parts.append([*keys])
        if column not in parts[-1]:
            parts[-1].append(column)
    shown = len(rows) if most is None else min(len(rows), most // len(parts))
    drawn = [prose(printable(title)), ""] if title else []
    drawn.append(
        "\n\n".join(
            _drawn({c: cells[c][:shown] for c in part}, tight if number else least, limit)
            for number, part in enumerate(parts)
        )
    )
    if shown < len(rows):
        drawn.append(f"{len(rows) - shown} more rows: --evidence")
    return "\n".join(drawn)


def _taken(widths: Mapping[str, int], columns: Iterable[str]) -> int:
    return sum(widths[column] + _GAP for column in columns) - _GAP


def _telling_apart(cells: Mapping[str, Sequence[str]], limit: int | None) -> dict[str, int]:
    """The first columns that tell the rows apart, without those that add nothing to it.

    With their widths where sentences are folded to words, which have half of the limit.
    """
    keys: dict[str, int] = {}
    apart = 1
    for column, texts in cells.items():
        more = len(set(zip(*(cells[key] for key in keys), texts, strict=True)))
        wider = keys | {column: _least_width(column, texts, limit, 0)}
        if more > apart and not (keys and limit and _taken(wider, wider) > limit // 2):
            keys, apart = wider, more
    return keys or {c: _least_width(c, cells[c], limit, 0) for c in [*cells][:1]}


def _least_width(
    column: str, texts: Sequence[str], limit: int | None, sentence: int = _SENTENCE
) -> int:
    """The width in which no word is folded, no number with its deviation, and no short cell."""
    whole = (text.replace(" ± ", "\xa0±\xa0") for text in texts)
    words = [word for text in (column, *whole) for word in re.split("[ \t\n]", text)]
    least = max(cell_len(word) for word in words)
    longest = max((cell_len(text) for text in texts), default=0)
    return min(max(least, min(longest, sentence)), (limit or WIDE) // 2 - 1)


def _is_number(text: str) -> bool:
    return text[:1] in "0123456789+-−×±<>≤≥~" and len(text) <= _SENTENCE


def _drawn(cells: Mapping[str, Sequence[str]], least: Mapping[str, int], limit: int | None) -> str:
    texts_wide = {
        column: max(cell_len(line) for text in texts for line in text.split("\n"))
        for column, texts in cells.items()
    }
    room = limit or max(WIDE, _taken(least, cells))
    widths = {column: max(cell_len(column), wide) for column, wide in texts_wide.items()}
    # The widest headings become narrower first, then the widest cells.
    for floor in (texts_wide, least):
        level = room
        while level and _taken(widths, cells) > room:
            level -= 1
            widths = {c: min(widths[c], max(least[c], floor[c], level)) for c in cells}
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
