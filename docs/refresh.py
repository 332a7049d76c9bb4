"""Write what README and these pages quote of the reference records: ``python docs/refresh.py``.

That is the chart of verdicts, their counts, and the verdict and evidence of every claim that a
table names. What a table quotes beside that is written by hand and checked by
``tests/test_docs.py``, which also says when this is to be run.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from repro import paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.judging import NO_NUMBER, WORDS
from repro.experiments.sources import find_source, results_of
from repro.experiments.story import story_of
from repro.experiments.summary import counts, in_words, lacking_runs, verdicts
from repro.measure.files import replacing

ROOT = paths.ROOT
CHART = ROOT / "docs" / "verdicts.svg"
SHOWN = 5  # parts of an evidence that a table quotes
_CLAIM = re.compile(r"^(\| `(\w+/\w+\.\w+)` [^|]*\| )[^|]*\| .* \|$", re.MULTILINE)
_OF_A_PAPER = re.compile(
    r"^(\| \[[^|]*\]\(docs/(\w+)\.md\)[^|]*\| [^|]*\| )[^|]*( \| [^|]* \| )[^|]* \|$", re.MULTILINE
)
_COUNTED = re.compile(r"^\| (\w[^|`]*) \|(?: \d+ \|){6}$", re.MULTILINE)
_TOTAL = re.compile(r"\d+ claims: \d+ [^.]* not run(?=\.)")
_LACKING = re.compile(r"\d+ of \d+(?= undecided claims)")


def judged() -> dict[str, list[dict[str, str]]]:
    """Return by paper a row for each claim, by the reference records alone, with its ``key``."""
    by_paper = {}
    for paper in PAPERS:
        source = find_source(load_paper(paper), local=False)
        rows = []
        for artefact in source.paper.artefacts.values():
            of_artefact = verdicts(source.paper, artefact, results_of(artefact, source))
            for claim, row in zip(artefact.claims, of_artefact, strict=True):
                rows.append({**row, "key": f"{paper}/{artefact.name}.{claim.key}"})
        by_paper[paper] = rows
    return by_paper


def excerpt(evidence: str) -> str:
    """Return the first parts of an evidence, without its last on margins and those on seeds."""
    parts = [
        part
        for part in evidence.partition("; margin: ")[0].split("; ")
        if not re.match(rf"about \d|{NO_NUMBER}|torch's own scatters", part)
    ]
    text = "; ".join(parts[:SHOWN]) + (" …" if len(parts) > SHOWN else "")
    return text.replace("|", "\\|")


def refreshed(page: str, rows: Mapping[str, list[dict[str, str]]]) -> str:
    """Return a page's text with counts, verdicts and evidence as the records have them.

    Raises:
        KeyError: The page names a claim that does not exist.
    """
    by_claim = {row["key"]: row for claims in rows.values() for row in claims}
    numbers = {key: counts(claims) for key, claims in rows.items()}
    by_title = {load_paper(key).title: tally for key, tally in numbers.items()}
    papers = [tally for key, tally in numbers.items() if key != "together"]
    total = {word: sum(tally[word] for tally in papers) for word in WORDS}

    def claim(match: re.Match[str]) -> str:
        row = by_claim[match[2]]
        return f"{match[1]}**{row['verdict']}** | {excerpt(row['evidence'])} |"

    def counted(match: re.Match[str]) -> str:
        tally = by_title[match[1]]
        return f"| {match[1]} | {' | '.join(map(str, (sum(tally.values()), *tally.values())))} |"

    def of_a_paper(match: re.Match[str]) -> str:
        key = "together" if match[2] == "combining" else match[2]
        promises = story_of(load_paper(key)).promises
        held = (f"{text}: **{by_claim[f'{key}/{name}']['verdict']}**" for text, name in promises)
        return f"{match[1]}{'; '.join(held)}{match[3]}{in_words(numbers[key])} |"

    page = _CLAIM.sub(claim, page)
    page = _COUNTED.sub(counted, page)
    undecided = sum(tally["undecided"] for tally in numbers.values())
    lacking = lacking_runs([row for claims in rows.values() for row in claims])
    page = _LACKING.sub(f"{lacking} of {undecided}", page)
    page = _OF_A_PAPER.sub(of_a_paper, page)
    return _TOTAL.sub(f"{sum(total.values())} claims: {in_words(total)}", page)


def description(rows: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the chart in words, which its file holds for those who do not see it."""
    return "; ".join(
        f"{load_paper(key).title}: {in_words(counts(claims))}" for key, claims in rows.items()
    )


def draw(rows: Mapping[str, list[dict[str, str]]], path: Path) -> None:
    """Draw the chart of verdicts as SVG, the same bytes for the same counts."""
    import matplotlib as mpl

    from repro.plots import verdict_counts

    figure = verdict_counts({load_paper(key).title: counts(claims) for key, claims in rows.items()})
    metadata = {"Title": "Verdicts", "Description": description(rows), "Date": None}
    with mpl.rc_context({"svg.hashsalt": "verdicts"}), replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata=metadata, facecolor="white")


def pages() -> list[Path]:
    """Return README and the pages of this folder."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Refresh all pages and the chart."""
    rows = judged()
    draw(rows, CHART)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = refreshed(text, rows)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print("refreshed", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
