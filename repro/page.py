"""The HTML report: one file that needs no network, script or font.

Whatever text a record holds is shown as text.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro.report import (
    LONG,
    TABLE_STYLE,
    VERDICT_COLOURS,
    evidence_lines,
    figure_png,
    printable,
    to_html,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Hatching tells the two greys apart where there is room for it.
_HATCHED = "repeating-linear-gradient(45deg, #eceef3 0 6px, #c6ccd8 6px 8px)"


@dataclass(frozen=True)
class Section:
    """One artefact.

    Attributes:
        anchor: Such as ``mbs-table4``.
        name: Where in the paper, such as ``Table 4``.
        title: What it shows.
        caption: What the numbers are.
        table: The paper's values beside ours.
        checks: What holds by construction.
        claims: Rows of claim, in the paper, setting, expected, verdict, evidence; ``why_not`` where
            one certainly fails.
        figure: None where there is none.
        records: A row each: what ran, how it ended, the file.
    """

    anchor: str
    name: str
    title: str
    caption: str
    table: "pd.DataFrame"
    checks: "pd.DataFrame"
    claims: Sequence[Mapping[str, str]]
    figure: "Figure | None"
    records: "pd.DataFrame"


@dataclass(frozen=True)
class Chapter:
    """One paper.

    Attributes:
        anchor: Such as ``mbs``.
        title: Its short title.
        lead: Authors and title, where the records come from.
        setup: Sentences on what all artefacts share.
        sections: Its artefacts.
    """

    anchor: str
    title: str
    lead: str
    setup: Sequence[str]
    sections: Sequence[Section]

    @property
    def claims(self) -> list[tuple[Section, Mapping[str, str]]]:
        """All claims, each with its artefact."""
        return [(section, claim) for section in self.sections for claim in section.claims]


def html_page(
    title: str,
    lead: str,
    chapters: Sequence[Chapter],
    meanings: Mapping[str, str],
    settings: Mapping[str, str],
    provenance: str,
) -> str:
    """Return the page: the chart of verdicts, then a chapter for each paper.

    Args:
        title: Of the page.
        lead: A sentence or two under it.
        chapters: One for each paper.
        meanings: Of the verdicts, in the order of the chart.
        settings: What the settings of verdicts mean.
        provenance: Closes the page.
    """
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{_text(title)}</title><style>{_STYLE}</style>",
        _navigation(chapters),
        f"<main><h1 id='top'>{_text(title)}</h1><p class='lead'>{_text(lead)}</p>",
        _chart(chapters, meanings),
        "<details><summary>What the words mean</summary><dl>",
    ]
    parts += [f"<dt>{_badge(word)}</dt><dd>{_text(said)}.</dd>" for word, said in meanings.items()]
    parts += [f"<dt>{_text(word)}</dt><dd>{_text(said)}.</dd>" for word, said in settings.items()]
    parts.append(
        "<dt>expected</dt><dd>what was written down before the records: the verdict that was "
        "expected.</dd></dl></details>"
    )
    for number, chapter in enumerate(chapters, 1):
        parts += _chapter(number, chapter, meanings)
    parts.append(f"<footer>{_text(provenance)}</footer></main></html>")
    return "\n".join(parts)


def _navigation(chapters: Sequence[Chapter]) -> str:
    parts = ["<nav><a class='home' href='#top'>Verdicts</a>"]
    for number, chapter in enumerate(chapters, 1):
        parts.append(f"<a class='chapter' href='#{chapter.anchor}'>{number} {_text(chapter.title)}")
        parts.append("</a><ul>")
        names = [section.name for section in chapter.sections]
        for section in chapter.sections:
            name = section.name if names.count(section.name) == 1 else section.title
            parts.append(f"<li><a href='#{_text(section.anchor)}'>{_text(name)}</a></li>")
        parts.append("</ul>")
    return "".join([*parts, "</nav>"])


def _chart(chapters: Sequence[Chapter], meanings: Mapping[str, str]) -> str:
    """Return stacked bars of verdicts, one for each paper, all to one scale."""
    most = max([1, *(len(chapter.claims) for chapter in chapters)])
    parts = ["<div class='chart' role='img' aria-label='How many claims got each verdict'>"]
    for chapter in chapters:
        counts = _counts([claim for _, claim in chapter.claims], meanings)
        bars = "".join(
            f"<i class='{_class(word)}' style='width:{100 * count / most:.2f}%' "
            f"title='{count} {word}'>{count}</i>"
            for word, count in counts.items()
        )
        parts.append(f"<a href='#{chapter.anchor}'>{_text(chapter.title)}</a><div>{bars}</div>")
    legend = " ".join(map(_badge, meanings))
    return "".join([*parts, f"</div><p class='legend'>{legend}</p>"])


def _chapter(number: int, chapter: Chapter, meanings: Mapping[str, str]) -> list[str]:
    counts = _counts([claim for _, claim in chapter.claims], meanings)
    rows = [
        f"<tr><td>{_badge(claim['verdict'], f'{section.anchor}-claims')}</td>"
        f"<td>{_text(claim['claim'])}</td>"
        f"<td><a href='#{_text(section.anchor)}'>{_text(section.name)}</a></td>"
        f"<td><a href='#{_text(section.anchor)}-records'>{len(section.records)}</a></td></tr>"
        for section, claim in chapter.claims
    ]
    head = _head("verdict", "claim", "table or figure", "records")
    parts = [
        f"<section><h2 id='{chapter.anchor}'>{number} {_text(chapter.title)}</h2>",
        f"<p class='lead'>{_tally(counts)}</p><p class='caption'>{_text(chapter.lead)}</p>",
        "<details><summary>Setup: machine, data, stand-ins, what the marks mean</summary>",
        *(f"<p class='caption'>{_text(sentence)}</p>" for sentence in chapter.setup),
        "</details>",
        f"<details><summary>All {len(rows)} claims, with their verdicts</summary>",
        f"<div class='wide'><table class='repro'>{head}{''.join(rows)}</table></div></details>",
    ]
    for section in chapter.sections:
        parts += _section(section, meanings)
    return [*parts, "</section>"]


def _section(section: Section, meanings: Mapping[str, str]) -> list[str]:
    anchor, counts = _text(section.anchor), _counts(section.claims, meanings)
    parts = [
        f"<article><h3 id='{anchor}'>{_text(section.name)}: {_text(section.title)}</h3>",
        f"<p>{_tally(counts)}</p>" if counts else "",
    ]
    if section.figure is not None:
        image = base64.b64encode(figure_png(section.figure)).decode()
        parts.append(f"<img alt='{_text(section.title)}' src='data:image/png;base64,{image}'>")
    parts.append(f"<p class='caption'>{_text(section.caption)}</p>")
    if len(section.table):
        parts.append(_foldable("Table", section.table))
    if section.claims:
        rows = [
            f"<tr><td>{_badge(claim['verdict'], anchor)}</td><td>{_text(claim['claim'])} "
            f"<small>{_text(claim['in the paper'])}</small></td>"
            f"<td>{_text(claim['setting'])}</td><td>{_text(claim['expected'])}</td><td>{_evidence(claim['evidence'])}"
            f"{_paragraph(claim.get('why_not', ''))}</td></tr>"
            for claim in section.claims
        ]
        head = _head("verdict", "claim", "setting", "expected", "evidence")
        parts.append(f"<div class='wide'><table class='repro claims' id='{anchor}-claims'>{head}")
        parts.append(f"{''.join(rows)}</table></div>")
    if len(section.checks):
        parts.append(_foldable("Checks", section.checks, folded=True))
    records = _foldable("Records", section.records, folded=True, anchor=f"{anchor}-records")
    return [*parts, records, "</article>"]


def _foldable(title: str, frame: "pd.DataFrame", folded: bool = False, anchor: str = "") -> str:
    """Return a table, folded where it is long; a link to what is inside unfolds it."""
    name = f" id='{anchor}'" if anchor else ""
    table = f"<div class='wide'{name}>{to_html(frame)}</div>"
    if not folded and len(frame) <= LONG:
        return table
    rows = f"{len(frame)} row{'s' * (len(frame) != 1)}"
    return f"<details><summary>{title} ({rows})</summary>{table}</details>"


def _counts(claims: Sequence[Mapping[str, str]], meanings: Mapping[str, str]) -> dict[str, int]:
    words = [claim["verdict"] for claim in claims]
    return {word: words.count(word) for word in meanings if word in words}


def _tally(counts: Mapping[str, int]) -> str:
    return " ".join(_badge(word, number=count) for word, count in counts.items())


def _badge(word: str, anchor: str = "", number: int | None = None) -> str:
    shown = _text(word) if number is None else f"{number} {_text(word)}"
    if anchor:
        return f"<a class='badge {_class(word)}' href='#{_text(anchor)}'>{shown}</a>"
    return f"<b class='badge {_class(word)}'>{shown}</b>"


def _class(word: str) -> str:
    return _text(word.replace(" ", "-"))


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


def _evidence(text: str) -> str:
    return _text(evidence_lines("evidence", text)).replace("\n", "<br>")


def _head(*columns: str) -> str:
    return f"<thead><tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr></thead>"


def _text(text: Any) -> str:
    return html.escape(printable(str(text)))


_STYLE = f"""
html {{ color-scheme: light; }}
body {{ margin: 0; font: 15px/1.5 system-ui, sans-serif; color: #1c2230; background: #fff; }}
a {{ color: #005b8f; }}
nav {{ position: fixed; inset: 0 auto 0 0; width: 15.5em; box-sizing: border-box; overflow-y: auto;
  padding: 1.2em 1em 2em; background: #f6f7fa; border-right: 1px solid #d8dde6; font-size: 13px; }}
nav a {{ color: #1c2230; text-decoration: none; display: block; padding: .08em 0; }}
nav a:hover {{ text-decoration: underline; }}
nav .home, nav .chapter {{ font-weight: 600; margin-top: .8em; }}
nav ul {{ list-style: none; margin: 0; padding-left: .9em; }}
main {{ margin-left: 15.5em; padding: 1.5em 2.5em 4em; max-width: 66em; }}
h1 {{ font-size: 2.1em; margin: .2em 0; }}
h2 {{ font-size: 1.6em; margin: 2.5em 0 .3em; padding-top: .6em; border-top: 3px solid #1c2230; }}
h3 {{ font-size: 1.15em; margin: 2.4em 0 .4em; padding-top: .5em; border-top: 1px solid #d8dde6; }}
.lead {{ font-size: 1.08em; margin: .5em 0; }} .caption, footer {{ color: #48536a; }}
.caption {{ font-size: .9em; max-width: 58em; }} footer {{ margin-top: 4em; font-size: .85em; }}
img {{ max-width: 100%; height: auto; display: block; margin: .6em 0; }}
details {{ margin: .7em 0; }} summary {{ cursor: pointer; color: #005b8f; }}
dt {{ margin-top: .5em; font-weight: 600; }} dd {{ margin-left: 1.5em; }}
.wide {{ overflow-x: auto; font-size: .88em; }}
small {{ color: #48536a; display: block; }}
.badge {{ display: inline-block; padding: .02em .6em; border-radius: .8em; white-space: nowrap;
  font-size: .85rem; font-weight: 600; text-decoration: none; }}
.chart {{ display: grid; grid-template-columns: max-content 1fr; gap: .45em 1em;
  align-items: center; margin: 1.5em 0 .8em; }}
.chart a {{ color: inherit; text-align: right; text-decoration: none; }}
.chart a:hover {{ text-decoration: underline; }}
.chart div {{ display: flex; }}
.chart i {{ box-sizing: border-box; height: 1.9em; line-height: 1.9em; text-align: center;
  font-style: normal; font-size: .9em; min-width: 1.1em; }}
.chart i, .badge {{ border: 1px solid #fff; }}
.chart .not-run, .not-run, .undecided {{ border-color: #c3c9d4 !important; }}
table.claims {{ width: 100%; }} table.claims td:nth-child(2) {{ min-width: 15em; width: 34%; }}
table.claims td:nth-child(5) {{ min-width: 20em; width: 44%; }}
td:first-child {{ min-width: 6.5em; }}
@media (max-width: 55em) {{
  nav {{ position: static; width: auto; border: 0; }} nav ul {{ display: none; }}
  main {{ margin: 0; padding: 1em; }} }}
@media print {{ nav {{ display: none; }} main {{ margin: 0; }} }}
{TABLE_STYLE}
"""
for _word, (_background, _ink) in VERDICT_COLOURS.items():
    _shown = _HATCHED if _word == "undecided" else _background
    _STYLE += f".{_class(_word)} {{ background: {_shown}; color: {_ink} !important; }}\n"
