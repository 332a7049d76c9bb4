"""The README's verdicts are those of the reference records, and it defines the words."""

import re

import pytest

from repro import paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.judging import KINDS, WORDS
from repro.experiments.summary import reference_counts

README = (paths.ROOT / "README.md").read_text()


def table_with(*columns: str) -> list[list[str]]:
    """Return the rows of the table whose head begins with these columns."""
    head = "| " + " | ".join(columns)
    lines = README.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.slow
def test_the_counts_are_those_of_the_reference_records(monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
    counts = reference_counts()
    expected = []
    for key in PAPERS:
        numbers = [counts[key][word] for word in WORDS]
        expected.append([load_paper(key).title, str(sum(numbers)), *map(str, numbers)])
    assert table_with("paper", "claims", *WORDS) == expected


def test_the_words_are_defined_as_the_code_has_them():
    for meanings in (WORDS, KINDS):
        rows = dict(table_with("verdict" if meanings is WORDS else "kind"))
        assert {word.strip("*"): text for word, text in rows.items()} == dict(meanings)


def test_commands_exist():
    from typer.main import get_command

    from repro.__main__ import app

    known = set(get_command(app).commands)
    named = set(re.findall(r"python -m repro ([a-z-]+)", README))
    assert named and named <= known
