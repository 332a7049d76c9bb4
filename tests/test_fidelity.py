"""docs/fidelity.md leaves nothing of the papers out, and names nothing that is not there.

What a paper contains stands in ``reported/PAPER.toml`` under ``[contents]``, counted in its text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from repro import paths
from repro.experiments import PAPERS as ALL
from repro.experiments import load_paper
from repro.experiments.design import reported

PAPERS = [key for key in ALL if key != "together"]  # which has no paper to be faithful to
DOCS = paths.ROOT / "docs"
PAGE = (DOCS / "fidelity.md").read_text(encoding="utf-8")
HOW = ("exact", "choice", "stand-in", "not possible")
NUMBERED = {"tables": "Table", "figures": "Figure", "algorithms": "Algorithm"}
LISTS = {"sections", *NUMBERED, "equations", "formulas", "claims"}
_NAME = re.compile(r"(Table|Figure|Algorithm|Equation)s? ([\dIVX]+)(?: (to|and) ([\dIVX]+))?$")


@dataclass(frozen=True)
class Row:
    """One row of the page."""

    section: str
    what: str
    where: str
    how: str
    why: str


def rows_of(page: str) -> dict[str, list[Row]]:
    """Return the rows of each paper, whose part begins with ``## KEY: ``."""
    by_paper: dict[str, list[Row]] = {}
    for part in page.split("\n## ")[1:]:
        key, _, text = part.partition(": ")
        lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
        cells = [re.split(r" (?<!\\)\| ", line) for line in lines]
        by_paper[key] = [
            Row(*(cell.replace(r"\|", "|") for cell in row))
            for row in cells
            if row != ["section", "what", "where", "how", "why"] and set(row) != {"---"}
        ]
    return by_paper


def named(row: Row) -> list[str]:
    """Return the table, figure, algorithm or equations that a row is of, such as ``Table 4``."""
    match = _NAME.match(row.what)
    if match is None:
        return []
    kind, first, between, last = match.groups()
    if between is None:
        return [f"{kind} {first}"]
    # Only equations, of one formula, share a row.
    return [f"{kind} {n}" for n in range(int(first), int(last) + 1)] if kind == "Equation" else []


@cache
def known(paper: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return a paper's artefacts and claims as the page writes them."""
    artefacts = load_paper(paper).artefacts.values()
    claims = {f"{artefact.name}.{claim.key}" for artefact in artefacts for claim in artefact.claims}
    return frozenset(f"{paper}/{artefact.name}" for artefact in artefacts), frozenset(claims)


def faults(page: str) -> list[str]:
    """Return what is missing on the page and what it makes up, each in a line."""
    by_paper = rows_of(page)
    problems = [f"{key}: no paper is called so" for key in by_paper if key not in PAPERS]
    for key in PAPERS:
        problems += [f"{key}: {fault}" for fault in _faults_of(key, by_paper.get(key, []))]
    targets = re.findall(r"\]\(([^)]+)\)", page)
    return problems + [f"no file {name}" for name in targets if not (DOCS / name).exists()]


def _faults_of(paper: str, rows: list[Row]) -> Iterator[str]:
    contents = reported(paper)["contents"]
    for row in rows:
        if row.how not in HOW:
            yield f"{row.what!r} is {row.how!r}; allowed are {', '.join(HOW)}"
        if row.section not in contents["sections"]:
            yield f"{row.what!r} is of section {row.section}, which the paper has not"
    yield from (
        f"no row is of section {section}"
        for section in contents["sections"]
        if all(row.section != section for row in rows)
    )
    wanted = [f"{kind} {n}" for name, kind in NUMBERED.items() for n in contents[name]]
    wanted += [f"Equation {n}" for n in contents["equations"]]
    given = [name for row in rows for name in named(row)]
    for name in dict.fromkeys([*wanted, *given]):
        if name not in wanted:
            yield f"the paper has no {name}"
        elif given.count(name) != 1:
            yield f"{given.count(name) or 'no'} row{'s' * (name in given)} for {name}"
    for text in contents["claims"]:
        if all(row.what != text for row in rows):
            yield f"no row for the claim {text!r}"
    for text in contents["formulas"]:
        if not any(row.what.startswith(f"{text}: ") for row in rows):
            yield f"no row for the formula {text!r}"

    artefacts, claims = known(paper)
    quoted = {text for row in rows for text in re.findall(r"`([^`]+)`", f"{row.where} {row.why}")}
    for name in sorted(artefacts):
        short = name.removeprefix(f"{paper}/")
        if name not in quoted and not any(
            claim.startswith(f"{short}.") for claim in claims & quoted
        ):
            yield f"no row names the artefact {name}"
    yield from (f"no row names the claim {name}" for name in sorted(claims - quoted))
    for text in sorted(quoted):
        if re.fullmatch(rf"({'|'.join(PAPERS)})/\w+", text) and text not in artefacts:
            yield f"{text} is no artefact of the paper"
        elif re.fullmatch(r"\w+\.\w+", text) and text not in claims:
            yield f"{text} is no claim of the paper"


def test_nothing_is_left_out_or_made_up():
    problems = faults(PAGE)
    assert not problems, "\n".join(["docs/fidelity.md:", *problems])


@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_paper_contains_is_written_down(paper):
    contents = reported(paper)["contents"]
    assert set(contents) == LISTS
    for name, items in contents.items():
        assert len(set(items)) == len(items), name
        assert all(isinstance(item, str) and item for item in items), name
    assert contents["sections"] and contents["claims"]
    assert all(re.search(r"\d", text) for text in contents["claims"])


def without(line: str) -> tuple[str, str]:
    """Return the row that begins so, and nothing in its place."""
    (row,) = re.findall(rf"^{re.escape(line)}.*\n", PAGE, re.MULTILINE)
    return row, ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without("| 4.3.2 | Table 5 |"), "mbs: no row for Table 5"),
        (without("| 3.4 | Equations 9 to 12 |"), "mbs: no row for Equation 11"),
        (without("| 3.4 | Algorithm 1 |"), "mbs: no row for Algorithm 1"),
        (without("| 4.3.2 | 128×: "), "mbs: no row for the claim \"128×: ResNet-101's\""),
        (without("| 3 | search space: "), "outofcore: no row for the formula 'search space'"),
        (without("| VII |"), "adaptive: no row is of section VII"),
        (("| Figure 13 | `dual", "| Figure 12 | `dual"), "dualbatch: 2 rows for Figure 12"),
        (("| Table V |", "| Table VII |"), "microconv: the paper has no Table VII"),
        (("| Table V |", "| Tables V to VI |"), "microconv: no row for Table V"),
        (("| 4.3.2 | Table 4 |", "| 4.4 | Table 4 |"),
         "mbs: 'Table 4' is of section 4.4, which the paper has not"),
        (("`dualbatch/table7`", "`dualbatch/table77`"),
         "dualbatch: no row names the artefact dualbatch/table7"),
        (("`dualbatch/table7`", "`dualbatch/table77`"),
         "dualbatch: dualbatch/table77 is no artefact of the paper"),
        (("`dualbatch/table7`", "`mbs/table2`"),
         "dualbatch: mbs/table2 is no artefact of the paper"),
        (("`figure2.overlap`", "–"), "mbs: no row names the claim figure2.overlap"),
        (("`figure2.overlap`", "`figure2.overlaps`"),
         "mbs: figure2.overlaps is no claim of the paper"),
        (("| exact | its last two rows", "| close | its last two rows"),
         "mbs: 'Table 5' is 'close'; allowed are exact, choice, stand-in, not possible"),
        (("(../repro/mbs/staging.py)", "(../repro/mbs/stages.py)"),
         "no file ../repro/mbs/stages.py"),
        (("\n## outofcore: ", "\n## ooc: "), "ooc: no paper is called so"),
        (("\n## outofcore: ", "\n## ooc: "), "outofcore: no row for Table 1"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(change, fault):
    before, after = change
    assert before in PAGE
    assert fault in faults(PAGE.replace(before, after))
