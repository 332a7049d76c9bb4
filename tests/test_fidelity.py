"""docs/fidelity.md has a row for each table, figure, algorithm and equation, and no false name.

What a paper contains stands in its ``paper.toml`` under ``[reported.contents]``.
"""

import re
from dataclasses import dataclass

import pytest

from repro import paths
from repro.experiments import PAPERS as ALL
from repro.experiments import load_paper
from repro.experiments.design import paper_toml

PAPERS = [key for key in ALL if key != "together"]  # which has no paper to be faithful to
DOCS = paths.ROOT / "docs"
PAGE = (DOCS / "fidelity.md").read_text(encoding="utf-8")
NUMBERED = {"tables": "Table", "figures": "Figure", "algorithms": "Algorithm"}
_NAME = re.compile(r"(Table|Figure|Algorithm|Equation)s? ([\dIVX]+)(?: (?:to|and) ([\dIVX]+))?$")


@dataclass(frozen=True)
class Row:
    section: str
    what: str
    where: str
    how: str
    why: str

    def named(self) -> list[str]:
        """Return the table, figure, algorithm or equations that it is of, such as ``Table 4``."""
        match = _NAME.match(self.what)
        if match is None:
            return []
        kind, first, last = match.groups()
        numbers = [first] if last is None else range(int(first), int(last) + 1)
        return [f"{kind} {number}" for number in numbers]


def rows_of(page: str) -> dict[str, list[Row]]:
    """Return the rows of each paper, whose part begins with ``## KEY: ``."""
    by_paper = {}
    for part in page.split("\n## ")[1:]:
        key, _, text = part.partition(": ")
        cells = [re.split(r" (?<!\\)\| ", line) for line in re.findall(r"^\| (.*) \|$", text, re.M)]
        by_paper[key] = [Row(*row) for row in cells if row[0] not in ("section", "---")]
    return by_paper


def faults(page: str) -> list[str]:
    """Return what is missing on the page and what it makes up, each in a line."""
    by_paper, found = rows_of(page), []
    for key in PAPERS:
        contents, rows = paper_toml(key)["reported"]["contents"], by_paper.get(key, [])
        wanted = [f"{kind} {n}" for name, kind in NUMBERED.items() for n in contents[name]]
        wanted += [f"Equation {n}" for n in contents["equations"]]
        given = [name for row in rows for name in row.named()]
        for name in dict.fromkeys([*wanted, *given]):
            if (name in wanted, given.count(name)) != (True, 1):
                found.append(f"{key}: {given.count(name)} rows for {name}")
        artefacts = {f"{key}/{name}" for name in load_paper(key).artefacts}
        shown = set(re.findall(rf"`({key}/\w+)`", page))
        found += [f"{key}: no row has {name}" for name in sorted(artefacts - shown)]
        for row in rows:
            if row.how not in ("exact", "choice", "stand-in"):
                found.append(f"{key}: {row.what} is {row.how!r}")
            if row.section not in contents["sections"]:
                found.append(f"{key}: {row.what} is of section {row.section}")
            named = set(re.findall(rf"`({key}/\w+)`", f"{row.where} {row.why}"))
            found += [f"{key}: {name} is no artefact" for name in sorted(named - artefacts)]
            if row.how == "exact" and "](" not in row.where and not named:
                found.append(f"{key}: {row.what} is exact, and no code stands beside it")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    return found + [f"no file {name}" for name in targets if not (DOCS / name).exists()]


def test_nothing_is_left_out_or_made_up():
    assert not faults(PAGE)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("| 4.3.2 | Table 4 | `mbs/table4` | exact", "| 4.3.2 | Table 9 | `mbs/table4` | exact"),
         "mbs: 0 rows for Table 4"),
        (("| 4.3.2 | Table 4 |", "| 9.9 | Table 4 |"), "mbs: Table 4 is of section 9.9"),
        (("`mbs/table4` | exact", "`mbs/table40` | exact"), "mbs: mbs/table40 is no artefact"),
        (("| 4.3.2 | Table 4 | `mbs/table4` |", "| 4.3.2 | Table 4 | – |"),
         "mbs: Table 4 is exact, and no code stands beside it"),
        (("`mbs/batchnorm`", "`mbs/table4`"), "mbs: no row has mbs/batchnorm"),
        (("`mbs/table4` | exact", "`mbs/table4` | done"), "mbs: Table 4 is 'done'"),
        (("../repro/mbs/streamer.py", "../repro/mbs/steamer.py"),
         "no file ../repro/mbs/steamer.py"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(change, fault):
    assert change[0] in PAGE and fault in faults(PAGE.replace(*change))
