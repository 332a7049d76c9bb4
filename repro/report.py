"""Tables, comparisons with a paper's values, and the HTML report."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.table import Table

DASH = "–"


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation of n values; `std` is NaN for a single one."""

    n: int
    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Summarise values; n = 0 gives NaN."""
        array = np.asarray(list(values), dtype=float)
        mean = float(array.mean()) if len(array) else float("nan")
        return cls(len(array), mean, float(array.std(ddof=1)) if len(array) > 1 else float("nan"))

    def text(self, digits: int = 2) -> str:
        """Return ``mean ± std``, or the mean alone where n is 1."""
        if self.n == 0:
            return DASH
        spread = "" if np.isnan(self.std) else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def mean_std(pair: Sequence[float] | None, digits: int = 2) -> str:
    """Return a paper's ``[mean, std]`` as text; a missing pair is the paper's "Failed"."""
    return "Failed" if pair is None else f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


_TEXT_COLUMNS = (
    "claim",
    "in the paper",
    "kind",
    "expected",
    "verdict",
    "evidence",
    "means",
    "holds",
)


def to_rich(rows: Sequence[Mapping[str, Any]], title: str) -> "Table":
    """Return rows, or a data frame's ``to_dict("records")``, as a table for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for position, column in enumerate(columns):
        text = position == 0 or column in _TEXT_COLUMNS
        table.add_column(str(column), justify="left" if text else "right")
    for row in rows:
        table.add_row(*(Text(_lines(column, _cell(row.get(column)))) for column in columns))
    return table


def _lines(column: str, text: str) -> str:
    """Return evidence with a line for each of its parts."""
    return text.replace("; ", ";\n") if column == "evidence" else text


def to_html(frame: "pd.DataFrame") -> str:
    """Return a data frame as an HTML table."""
    cells = frame.map(_cell)
    for column in cells.columns.intersection(["evidence"]):
        # pandas writes the end of a line as two characters, and leaves this one alone.
        cells[column] = [_lines(column, text).replace("\n", "\u2028") for text in cells[column]]
    page: str = cells.to_html(index=False, border=0, classes="repro", justify="left")
    return page.replace("\u2028", "<br>")


class TableView:
    """A data frame as a notebook shows it: HTML on screen, aligned text where there is none."""

    def __init__(self, frame: "pd.DataFrame") -> None:
        self.frame = frame

    def __repr__(self) -> str:
        return self.frame.map(_cell).to_string(index=False)

    def _repr_html_(self) -> str:
        return f"<style>{_TABLE_STYLE}</style>{to_html(self.frame)}"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


def figure_png(figure: "Figure", dpi: int = 110) -> bytes:
    """Return a figure as PNG of at most 256 colours, which takes a third of the bytes."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, bbox_inches="tight")
    colours = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(small, format="png", optimize=True)
    return small.getvalue()


@dataclass(frozen=True)
class Section:
    """One artefact of an HTML report."""

    anchor: str
    title: str
    caption: str
    table: "pd.DataFrame"
    checks: "pd.DataFrame"
    verdicts: "pd.DataFrame"
    figure: "Figure | None"


_TABLE_STYLE = """
table.repro { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
table.repro th, table.repro td { padding: .25em .8em; border-bottom: 1px solid #d8dde6;
       text-align: left !important; vertical-align: top; }
table.repro thead th { border-bottom: 2px solid #48536a; }
"""
_STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
       color: #1c2230; }}
img {{ max-width: 100%; }} p.caption {{ color: #48536a; max-width: 60em; }} nav {{ margin: 1em 0; }}
{_TABLE_STYLE}"""


def html_page(
    title: str,
    lead: str,
    overview: "pd.DataFrame",
    lead_tables: "Sequence[pd.DataFrame]",
    sections: Sequence[Section],
    provenance: str,
) -> str:
    """Return a self-contained HTML page: the verdicts, then every table and figure."""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>",
        f"<h2>Verdicts</h2>{''.join(map(to_html, lead_tables))}{to_html(overview)}",
    ]
    links = (f"<a href='#{s.anchor}'>{html.escape(s.title)}</a>" for s in sections)
    parts.append(f"<nav>{' · '.join(links)}</nav>")
    for section in sections:
        parts.append(f"<h2 id='{section.anchor}'>{html.escape(section.title)}</h2>")
        parts.append(f"<p class='caption'>{html.escape(section.caption)}</p>")
        if section.figure is not None:
            image = base64.b64encode(figure_png(section.figure)).decode()
            alternative = html.escape(section.title)
            parts.append(f"<img alt='{alternative}' src='data:image/png;base64,{image}'>")
        tables = (section.table, section.checks, section.verdicts)
        parts += [to_html(table) for table in tables if len(table)]
    parts.append(f"<h2>Provenance</h2><p class='caption'>{html.escape(provenance)}</p></html>")
    return "\n".join(parts)
