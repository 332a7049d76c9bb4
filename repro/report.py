"""Tables, comparisons with a paper's values, and figures as files.

Records may come from elsewhere, so their text is shown as plain text: `printable` escapes for a
terminal, `markdown` for a notebook, `to_html` for HTML, and `figure_png` treats no dollar as a
formula.
"""

import base64
import html
import io
import math
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASH = "–"

# Background and ink of each verdict, in the colours of Okabe and Ito, which colour-blind readers
# can distinguish; in grey, decided verdicts are dark, open ones light.
VERDICT_COLOURS: Mapping[str, tuple[str, str]] = {
    "reproduced": ("#0072b2", "#ffffff"),
    "partly": ("#56b4e9", "#000000"),
    "undecided": ("#d8dde6", "#000000"),
    "not seen here": ("#e69f00", "#000000"),
    "not reproduced": ("#d55e00", "#000000"),
    "not run": ("#f4f5f8", "#48536a"),
}


def summary(values: Iterable[float], digits: int = 2) -> str:
    """Return ``mean ± sample standard deviation``, the mean alone of one value, a dash of none."""
    import numpy as np

    array = np.asarray(list(values), dtype=float)
    if not len(array):
        return DASH
    std = array.std(ddof=1) if len(array) > 1 else math.nan
    spread = "" if math.isnan(std) else f" ± {std:.{digits}f}"
    return f"{array.mean():.{digits}f}{spread}"


def printable(text: str) -> str:
    r"""Return text with its control characters written out, such as ``\x1b``.

    They could make a terminal delete, hide or overwrite text. Ends of lines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_shown(character: str) -> bool:
    # Spaces of other widths count as unprintable, but are harmless.
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def markdown(text: str) -> str:
    """Return text escaped for Markdown: without HTML, formula, link or emphasis."""
    shown = " ".join(printable(text).split())
    return "".join(_ENTITIES.get(character, character) for character in shown)


# As entities, which neither Markdown nor HTML interprets.
_ENTITIES = {character: f"&#{ord(character)};" for character in "&<>`*_[]~|"}
# MathJax reads the finished page, and finds no formula in text inside a separate element.
_ENTITIES |= {character: f"<span>&#{ord(character)};</span>" for character in "$\\"}


def cells_of(
    rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None
) -> dict[str, list[str]]:
    """Return the cells of a table as text, by column: all in their first order, or these."""
    named = columns or dict.fromkeys(column for row in rows for column in row)
    return {column: [cell_text(row.get(column)) for row in rows] for column in named}


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> str:
    """Return a table as Markdown with escaped text; see `cells_of`."""
    cells = cells_of(rows, columns)
    lines = [cells, ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    return "\n".join(f"|{'|'.join(map(markdown, line))}|" for line in lines)


def span(values: Collection[float]) -> str | None:
    """Return counts as one number or as their range; None of none."""
    ends = dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))) if values else ()
    return " to ".join(ends) or None


def mean_std(pair: Sequence[float] | None) -> str:
    """Return a paper's ``[mean, std]`` as text; a missing pair is the paper's "Failed"."""
    return "Failed" if pair is None else f"{pair[0]:.2f} ± {pair[1]:.2f}"


@dataclass(frozen=True)
class Shown:
    """Content of a notebook: HTML on screen, otherwise text."""

    said: str
    page: str

    def __repr__(self) -> str:
        return self.said

    def _repr_html_(self) -> str:
        return self.page


def shown_table(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> Shown:
    """Return a table with escaped text, as text one line per row; see `cells_of`."""
    cells = cells_of(rows, columns)
    lines = [(*cells,), *zip(*cells.values(), strict=True)]

    def content(text: str) -> str:
        if "verdict" in cells and text in VERDICT_COLOURS:
            return badge(text)
        # A notebook treats text between dollars as a formula, even in tables.
        return _alone(html.escape(printable(text).strip(), quote=False))

    def line(texts: Iterable[str], kind: str) -> str:
        # An untrusted notebook loses its style sheets, but keeps these styles.
        look = 'style="text-align:left;vertical-align:top"'
        return "".join(f"<{kind} {look}>{content(text)}</{kind}>" for text in texts)

    page = f'<thead><tr style="text-align: left;">{line(cells, "th")}</tr></thead><tbody>'
    page += "".join(f"<tr>{line(texts, 'td')}</tr>" for texts in lines[1:])
    # Not aligned: most of a notebook would be blanks beside long evidence.
    said = "\n".join(map(" | ".join, lines))
    return Shown(said, f'<table class="dataframe repro">{page}</tbody></table>')


def setting(row: Mapping[str, str]) -> str:
    """Return the setting of a verdict in brackets; nothing where nothing was run."""
    return "" if row["verdict"] == "not run" else f" ({row['setting']})"


def shown_verdicts(rows: Sequence[Mapping[str, str]]) -> Shown:
    """Return claims after their verdicts, for display above a figure."""
    lines = [f"[{row['verdict']}] {printable(row['claim'])}{setting(row)}" for row in rows]
    blocks = [
        f"<div>{badge(row['verdict'])}&ensp;{_escaped(row['claim'])} "
        f"<small>{html.escape(setting(row))}</small></div>"
        for row in rows
    ]
    return Shown("\n".join(lines), "".join(blocks))


def picture(png: bytes, said: str) -> Shown:
    """Return a figure with its description."""
    data, alt = base64.b64encode(png).decode(), html.escape(said, quote=True)
    return Shown(said, f'<p><img src="data:image/png;base64,{data}" alt="{alt}" width="850"></p>')


def folded(title: str, *parts: Shown | str) -> Shown:
    """Return tables, verdicts, pictures or paragraphs of text behind one line, which opens them."""
    shown = [
        Shown(printable(part), f"<p>{_escaped(part)}</p>") if isinstance(part, str) else part
        for part in parts
    ]
    page = "".join(part.page for part in shown)
    return Shown(
        "\n\n".join([printable(title), *(part.said for part in shown)]),
        f"<details><summary>{_escaped(title)}</summary>{page}</details>",
    )


def _escaped(text: str) -> str:
    """Return text as HTML without formulas: dollars and backslashes are escaped."""
    return _alone(html.escape(printable(text)))


def _alone(page: str) -> str:
    return page.replace("$", "<span>$</span>").replace("\\", "<span>\\</span>")


def badge(word: str) -> str:
    """Return a verdict as HTML, coloured without a style sheet and in a dark theme, too."""
    background, ink = VERDICT_COLOURS[word]
    style = (
        f"background-color: {background}; color: {ink}; border-radius: 9px; padding: 0px 8px; "
        "white-space: nowrap; font-weight: 600"
    )
    return f'<span style="{style}">{word}</span>'


def cell_text(value: Any) -> str:
    """Return a cell as text: a dash for a missing value, control characters written out."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return DASH
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def figure_png(figure: "Figure", dpi: int = 110) -> bytes:
    """Return a figure as PNG of 96 colours, a quarter of the bytes that all colours take."""
    from PIL import Image

    drawn, reduced = io.BytesIO(figure_file(figure, "png", dpi)), io.BytesIO()
    with Image.open(drawn, formats=("PNG",)) as image:
        # Quantising by the median of all pixels would lose the colours of small markers.
        colours = image.convert("RGB").quantize(
            96, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    colours.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def figure_file(figure: "Figure", form: str, dpi: int = 200) -> bytes:
    """Return a figure as ``svg``, ``pdf`` or ``png``, with its texts shown literally."""
    _show_texts_as_they_are(figure)
    drawn = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    figure.savefig(drawn, format=form, dpi=dpi, bbox_inches="tight", metadata=undated)
    return drawn.getvalue()


def _show_texts_as_they_are(figure: "Figure") -> None:
    """Disable formulas in all texts but powers of ten: a name with dollars would break them."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    powers = []
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        labels = axis.get_ticklabels(which="both")  # labels are made only on request
        if isinstance(axis.get_major_formatter(), LogFormatter):
            powers += labels
    for text in figure.findobj(Text):
        if text not in powers:
            text.set_parse_math(False)
            if (shown := printable(text.get_text())) != text.get_text():
                text.set_text(shown)
