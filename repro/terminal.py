"""Text for a terminal: tables and prose of its width, in which no number and no name is cut."""

import itertools
import os
import re
import shutil
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from repro.report import cell_text, evidence_lines, is_text, printable

WIDE = 180  # columns of prose and long cells in a pipe, which has no width of its own
NARROW = 40
_GAP = 2  # spaces between columns
_LONGEST = 40  # characters of a word that is never folded


def width() -> int | None:
    """The columns of the terminal, or of ``$COLUMNS``; None for a pipe."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return max(NARROW, shutil.get_terminal_size((100, 24)).columns)


class Bar:
    """A progress bar on the standard error stream, which changes when it is told something.

    No thread redraws it, which would slow the measured work.

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
        """Name the current step beside the bar."""
        self._progress.update(self._task, now=printable(text), refresh=True)

    def write(self, line: str) -> None:
        """Write a line above the bar, unbroken."""
        self._progress.console.print(line, soft_wrap=True)


def prose(text: str, indent: str = "") -> str:
    """Text folded between words, further lines indented; a path is never broken."""
    columns = width() or WIDE
    return "\n".join(
        textwrap.fill(
            line,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def table(
    rows: Sequence[Mapping[str, Any]], title: str = "", lines: int | None = None, advice: str = ""
) -> str:
    """Rows as a table that fits the terminal.

    Cells are folded between words. If that is not enough, columns are left out, and a line under
    the table names them. Columns that tell the rows apart are kept first, then ours with the
    paper's, then the others from the left.

    Args:
        rows: Cells by column; columns keep the order of their first occurrence.
        title: Text above the table.
        lines: Most lines of all rows, about; a cell is folded into no more lines than its share.
        advice: Another way than a wider terminal to see the columns that are left out.
    """
    limit = width()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {
        column: [evidence_lines(column, cell_text(row.get(column))) for row in rows]
        for column in columns
    }
    share = max(1, lines // max(1, len(rows))) if lines else None
    bounds = {column: _bounds(column, texts, share) for column, texts in cells.items()}
    shown, room = set[str](), (limit or sys.maxsize) + _GAP
    for group in _groups(columns, list(zip(*cells.values(), strict=True))):
        taken = sum(bounds[column][0] + _GAP for column in group)
        if taken <= room or not shown:
            shown.update(group)
            room -= taken
    parts = [prose(printable(title)), ""] if title else []
    parts.append(_drawn({c: cells[c] for c in columns if c in shown}, bounds, limit))
    if left_out := "; ".join(printable(column) for column in columns if column not in shown):
        needed = sum(least + _GAP for least, *_ in bounds.values()) - _GAP
        how = f"{needed} columns show all, and so does a pipe, such as | less -S"
        how += f"; {advice}" if advice else ""
        parts.append(prose(f"Left out at {limit} columns: {left_out}. {how}."))
    return "\n".join(parts)


def _groups(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Columns that are shown or left out together, the most needed first."""
    papers = [column for column in columns if _is_papers(column)]
    keys = list(itertools.takewhile(lambda column: column not in papers, columns))
    for count in range(1, len(keys)):
        if len({tuple(row[:count]) for row in rows}) == len(rows):
            keys = keys[:count]
            break
    ours: dict[str, list[str]] = {c: [c] for c in columns if re.search(r"\bours\b", c)}
    for column in papers:
        partner = _partner(column, columns)
        ours.setdefault(partner, [partner]).append(column)
    numbered = {c for c, *cells in zip(columns, *rows, strict=True) if re.search(r"\d", str(cells))}
    compared = [ours[column] for column in columns if column in ours]
    taken = {*keys, *itertools.chain(*compared)}
    return [
        *([key] for key in keys if key not in ours),
        *(group for group in compared if group[0] in numbered),
        *([column] for column in columns if column not in taken),
        *(group for group in compared if group[0] not in numbered),  # nothing of ours in it
    ]


def _is_papers(column: str) -> bool:
    """Whether a column has a paper's values: ``K, paper``, but not ``2 MiB (paper 8)``."""
    return re.search(r"(?<!\()\bpaper\b(?!')", column) is not None


def _partner(paper: str, columns: Sequence[str]) -> str:
    """The column of ours beside a paper's: of the same name, else the next, else the one before."""

    def name(column: str) -> list[str]:
        return re.findall(r"[\w%]+", re.sub(r"\b(paper|ours)\b", "", column))

    at = columns.index(paper)
    ours = [c for c in (*columns[at:], *columns[:at][::-1]) if not _is_papers(c)]
    return next((column for column in ours if name(column) == name(paper)), (ours or [paper])[0])


def _bounds(column: str, texts: Sequence[str], lines: int | None) -> tuple[int, int, int]:
    """Widths of a column: with cells in so many lines, with each in one, with its name in one."""
    from rich.cells import cell_len

    whole = [*dict.fromkeys(text.replace(" ± ", "\xa0±\xa0") for text in texts)]
    named = max(cell_len(word) for word in column.split(" "))
    word = max(cell_len(word) for text in (*whole, "") for word in re.split("[ \t\n]", text))
    least = min(max(word, named), _LONGEST)
    for text in whole if lines else ():
        sizes = range(least, max(least, len(text)) + 1)
        least = sizes[bisect_left(sizes, True, key=lambda size: _fits(text, size, lines or 1))]
    most = max(least, *(cell_len(line) for text in (*whole, "") for line in text.split("\n")))
    return least, most, max(most, cell_len(column))


def _fits(text: str, size: int, lines: int) -> bool:
    return len(textwrap.wrap(text, size, break_on_hyphens=False)) <= lines


def _drawn(
    cells: Mapping[str, Sequence[str]],
    bounds: Mapping[str, tuple[int, int, int]],
    limit: int | None,
) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    gaps = _GAP * (len(cells) - 1)
    room = (limit or max(WIDE, sum(bounds[column][0] for column in cells) + gaps)) - gaps
    widths = {column: bounds[column][2] for column in cells}
    level = max(widths.values(), default=0)
    # Names are folded first. Then short columns stay as they are, and the long ones share the rest.
    while level > 1 and sum(widths.values()) > room:
        level -= 1
        widths = {c: max(bounds[c][0], min(bounds[c][1], level)) for c in cells}
    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for position, (column, texts) in enumerate(cells.items()):
        drawn.add_column(
            Text(printable(column)),
            justify="left" if position == 0 or is_text(column, texts) else "right",
            width=widths[column],
            overflow="fold",
        )
    for row in zip(*cells.values(), strict=True):
        drawn.add_row(*map(Text, row))
    console = Console(width=max(room + gaps, 1), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
