"""Write what README and these pages quote of the reference records: ``python docs/refresh.py``.

That is two figures, the counts of verdicts, and the verdict and evidence of every claim that a
table names; and the code of examples that a page names. What a table quotes beside that is written
by hand and checked by ``tests/test_docs.py``, which also says when this is to be run.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repro import paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.judge import NOT_EVEN
from repro.experiments.query import find_source
from repro.experiments.story import effects_figure
from repro.experiments.view import (
    count_rows,
    counts,
    in_words,
    lacking_runs,
    of_papers,
    paper_verdicts,
)
from repro.measure.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = paths.ROOT
CHART, EFFECTS = ROOT / "docs" / "verdicts.svg", ROOT / "docs" / "effects.svg"
SHOWN = 5  # parts of an evidence that a table quotes
_CLAIM = re.compile(r"^(\| `(\w+/\w+\.\w+)` [^|]*\| )[^|]*\| .* \|$", re.MULTILINE)
_COUNTED = re.compile(r"^\| (\w[^|`]*) \|(?: \d+ \|){10}$", re.MULTILINE)
_TOTAL = re.compile(r"\d+ claims: \d+ [^.]*(?=\.)")
_CODE = re.compile(
    r"^(`(\w+)` of \[(examples/\w+\.py)\]\(\S+\):\n\n```python\n).*?(?=^```)",
    re.DOTALL | re.MULTILINE,
)
_LACKING = re.compile(r"\d+ of \d+(?= undecided claims)")


def judged() -> dict[str, list[dict[str, str]]]:
    """Return by paper a row for each claim, by the reference records alone, with its ``key``."""
    return {paper: paper_verdicts(find_source(load_paper(paper), local=False)) for paper in PAPERS}


def excerpt(evidence: str) -> str:
    """Return the first parts of an evidence, without its last on margins and those on seeds."""
    parts = [
        part
        for part in evidence.partition("; margin: ")[0].split("; ")
        if not re.match(rf"if that is the true value|{NOT_EVEN}", part)
    ]
    text = "; ".join(parts[:SHOWN]) + (" …" if len(parts) > SHOWN else "")
    return text.replace("|", "\\|")


def refreshed(page: str, rows: Mapping[str, list[dict[str, str]]]) -> str:
    """Return a page's text with counts, verdicts and evidence as the records have them.

    And with the code of the function or class of an example that is named above a block.

    Raises:
        KeyError: The page names a claim, function or class that does not exist.
    """
    every = [row for judged_ in rows.values() for row in judged_]
    by_claim = {row["key"]: row for row in every}
    tallies = {row.pop("paper"): row.values() for row in count_rows(every)}
    by_title = {load_paper(key).title: tallies[key] for key in rows}
    by_title["All papers"] = tallies["all papers"]
    total = counts(of_papers(every))

    def claim(match: re.Match[str]) -> str:
        row = by_claim[match[2]]
        return f"{match[1]}**{row['verdict']}** ({row['setting']}) | {excerpt(row['evidence'])} |"

    def counted(match: re.Match[str]) -> str:
        return f"| {match[1]} | {' | '.join(map(str, by_title[match[1]]))} |"

    def code(match: re.Match[str]) -> str:
        text = (ROOT / match[3]).read_text(encoding="utf-8")
        node = {getattr(node, "name", ""): node for node in ast.parse(text).body}[match[2]]
        return f"{match[1]}{ast.get_source_segment(text, node)}\n"

    page = _CODE.sub(code, page)
    page = _CLAIM.sub(claim, page)
    page = _COUNTED.sub(counted, page)
    page = _LACKING.sub(f"{lacking_runs(of_papers(every))} of {total['undecided']}", page)
    return _TOTAL.sub(f"{sum(total.values())} claims: {in_words(total)}", page)


def description(rows: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the chart in words, which its file holds for those who do not see it."""
    return "; ".join(f"{title}: {in_words(numbers)}" for title, numbers in _of_papers(rows).items())


def _of_papers(rows: Mapping[str, list[dict[str, str]]]) -> dict[str, dict[str, int]]:
    """Return the counts of each paper that makes claims, by title."""
    return {
        load_paper(key).title: counts(claims)
        for key, judged_ in rows.items()
        if (claims := of_papers(judged_))
    }


def draw(figure: "Figure", path: Path, metadata: Mapping[str, str]) -> None:
    """Write a figure as SVG, the same bytes for the same records."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": path.stem}), replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None, **metadata},
                       facecolor="white", bbox_inches="tight")  # fmt: skip


def pages() -> list[Path]:
    """Return README and the pages of this folder."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Refresh all pages and both figures."""
    from repro.plots import verdict_counts

    rows = judged()
    draw(verdict_counts(_of_papers(rows)), CHART, {"Description": description(rows)})
    sources = {key: find_source(load_paper(key), local=False) for key in PAPERS}
    draw(effects_figure(sources), EFFECTS, {})
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = refreshed(text, rows)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print("refreshed", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
