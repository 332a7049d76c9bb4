"""What was written down before: a row a claim, older than its records, its numbers the paper's."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from made_mbs import CHOSEN
from made_mbs import PAPER as MBS

from repro import paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import Artefact, Claim, Expectation, expectations, reported
from repro.experiments.judging import KINDS
from repro.experiments.sources import Source, find_source, results_of
from repro.records import RecordStore, reference_stores

RESULTS = paths.ROOT / "results"
every = pytest.mark.parametrize("paper", PAPERS)


def claims(paper: str) -> Iterator[tuple[Artefact, Claim, Expectation]]:
    """Give every claim of a paper with its row."""
    rows = expectations(paper)
    for artefact in load_paper(paper).artefacts.values():
        for claim in artefact.claims:
            yield artefact, claim, rows[artefact.name][claim.key]


def header(paper: str) -> dict[str, Any]:
    path = paths.PACKAGE / "experiments" / "expected" / f"{paper}.toml"
    return tomllib.loads(path.read_text())


@every
class TestRows:
    def test_every_claim_has_its_row_and_every_row_its_claim(self, paper):
        claimed = [
            (artefact.name, claim.key)
            for artefact in load_paper(paper).artefacts.values()
            for claim in artefact.claims
        ]
        rows = [(name, key) for name, own in expectations(paper).items() for key in own]
        assert sorted(claimed) == sorted(rows)
        # A key names one claim of its artefact.
        assert len(set(claimed)) == len(claimed) > 0

    def test_claims_and_rows_say_what_they_must(self, paper):
        for artefact, claim, row in claims(paper):
            where = f"{artefact.name}.{claim.key}"
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", claim.key), where
            assert claim.text and claim.source and claim.kind in KINDS, where
            assert row.why and row.expect, where
            assert row.n is None or row.n > 0, where
            assert row.sd is None or row.sd > 0, where
            if isinstance(row.margin, int | float):
                assert row.margin > 0, where
            if row.test in ("higher", "lower"):
                assert row.effect, where
        texts = [(artefact.name, claim.text) for artefact, claim, _ in claims(paper)]
        assert len(set(texts)) == len(texts)

    def test_checks_say_what_holds(self, paper):
        for artefact in load_paper(paper).artefacts.values():
            texts = [check.text for check in artefact.checks]
            assert all(texts) and len(set(texts)) == len(texts)


# Places in the paper's numbers.

_PLACE = re.compile(r'(?<![\w.*])[A-Za-z_][\w-]*(?:\.(?:\*|"[^"]+"|[\w-]+))+')


def places(text: str) -> list[list[str]]:
    """Return the dotted names in a text, in their parts."""
    return [
        [part.strip('"') for part in re.findall(r'"[^"]+"|[^."]+', found)]
        for found in _PLACE.findall(text)
    ]


def at(numbers: Any, place: list[str]) -> list[Any]:
    """Return what stands at a place; ``*`` is any name, or any item of a list."""
    if not place:
        return [numbers]
    name, *rest = place
    if isinstance(numbers, dict):
        own = list(numbers.values()) if name == "*" else [numbers[name]] if name in numbers else []
    elif isinstance(numbers, list):
        own = numbers if name == "*" else [numbers[int(name)]] if name.isdigit() else []
    else:
        own = []
    return [found for value in own for found in at(value, rest)]


class TestPlaces:
    NUMBERS = {  # noqa: RUF012
        "table1": {"ResNet-50": {"low": 1.5}, "U-Net": {"low": 2.5, "high": 3.5}},
        "table4": [{"with": [1, 2]}, {"with": [3, 4], "without": [5, 6]}],
    }

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("table1.*.low", [1.5, 2.5]),
            ("table1.U-Net.high - table1.ResNet-50.low: the gain", [3.5, 1.5]),
            ('table1."U-Net".low', [2.5]),
            ("the best of table4.*.with", [[1, 2], [3, 4]]),
            ("table4.*.without, of the initial.", [[5, 6]]),
            ("table4.1.with", [[3, 4]]),
            ("table1.*.middle", []),
            ("table5.*", []),
            ("section 4.3.3, at 3.5 %", []),
        ],
    )
    def test_where_they_lead(self, text, found):
        assert [value for place in places(text) for value in at(self.NUMBERS, place)] == found


@every
def test_effects_and_margins_name_places_that_there_are(paper):
    numbers = reported(paper)
    for artefact, claim, row in claims(paper):
        for text in (row.effect, row.margin):
            if not isinstance(text, str) or not text or text.startswith("none: "):
                continue
            # What stands at the top has no dot.
            named = places(text) or [[w] for w in re.findall(r"\w+", text) if w in numbers]
            assert named, f"{artefact.name}.{claim.key}: {text!r} names no place"
            for place in named:
                assert at(numbers, place), f"{artefact.name}.{claim.key}: no {'.'.join(place)}"


# Rows are older than the records that they judge.


def too_early(paper: Any, seen: list[str], rows: dict[str, Any], stores: dict[Any, Any]) -> list:
    """Return the artefacts, keys and times of records that a row may have been written after."""
    found = []
    for (device, profile), store in stores.items():
        if f"{device}/{profile}" in seen:
            continue
        source = Source(paper, {(device, profile): store})
        for name, own in rows.items():
            records = results_of(paper.artefacts[name], source).records
            for key, row in own.items():
                said = row.under(profile)
                started = [r.started for r in records if r.experiment not in said.seen]
                late = [when for when in started if datetime.fromisoformat(when) <= said.written]
                found += [(name, key, when) for when in late]
    return found


@every
def test_rows_are_older_than_the_records_they_judge(paper, monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS", str(RESULTS))
    seen = header(paper)["seen"]
    stores = {place: store for place, store in reference_stores().items() if store.holds(paper)}
    assert set(seen) <= {"/".join(place) for place in stores}
    assert too_early(load_paper(paper), seen, expectations(paper), stores) == []
    for artefact, claim, row in claims(paper):
        assert row.written.tzinfo is not None, f"{artefact.name}.{claim.key}"
        for own in (row, row.under("long")):
            assert own.written <= datetime.now(UTC), f"{artefact.name}.{claim.key}"


def test_what_is_expected_of_longer_trainings_is_written_apart():
    row = expectations("dualbatch")["table5"]["gain"]
    assert row.under("quick") is row and row.under("gpu") is row
    apart = row.under("long")
    assert (apart.expect, apart.effect) == ("not reproduced", row.effect)
    assert apart.written > row.written
    with pytest.raises(ValueError, match="expect, why and written"):
        replace(row, long={"expect": "reproduced"})
    with pytest.raises(ValueError, match="maybe"):
        replace(row, long={**row.long, "expect": "maybe"})


@pytest.mark.parametrize("key", ["mbs", "dualbatch", "adaptive"])
def test_all_that_is_run_for_long_is_foretold(key):
    rows = expectations(key)
    for artefact in load_paper(key).artefacts.values():
        for claim in artefact.claims if artefact.exhibit.long else ():
            assert rows[artefact.name][claim.key].long, f"{artefact.name}.{claim.key}"


def test_a_row_written_after_its_records_is_found(tmp_path, make_record):
    store = RecordStore(tmp_path / "gpu" / "quick")
    (run,) = MBS.artefacts["figure2"].runs("quick", CHOSEN)
    written = datetime(2026, 11, 22, 5, tzinfo=UTC)
    row = replace(expectations("mbs")["figure2"]["one_update"], written=written)
    rows = {"figure2": {"one_update": row}, "table2": {}}
    for seconds, found in [(1, 0), (0, 1), (-1, 1)]:
        started = (written + timedelta(seconds=seconds)).isoformat()
        store.write(make_record(run.experiment, key="k" * 24, config=run.config, started=started))
        stores = {("gpu", "quick"): store}
        assert len(too_early(MBS, [], rows, stores)) == found
        assert too_early(MBS, ["gpu/quick"], rows, stores) == []


# The checks read their rows.


class Watched(Expectation):
    """A row that notes what is taken from it."""

    @property
    def sign(self) -> int:
        self.taken.add("sign")
        return super().sign

    def allowed(self, case: str = "") -> float:
        self.taken.add("margin")
        return super().allowed(case)

    @cached_property
    def taken(self) -> set[str]:
        return set()


@every
def test_a_check_takes_sign_and_margin_from_its_row(paper, monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS", str(RESULTS))
    source = find_source(load_paper(paper), local=False)
    assert source.records
    for artefact, claim, row in claims(paper):
        watched = Watched(**{f.name: getattr(row, f.name) for f in fields(row)})
        word = claim.judge(results_of(artefact, source), watched).word
        if word == "not run":
            continue
        # Where no number says anything, none is asked for its side.
        if row.test in ("higher", "lower") and word != "undecided":
            assert "sign" in watched.taken, f"{artefact.name}.{claim.key}"
        if row.margin is not None and not isinstance(row.margin, str):
            assert "margin" in watched.taken, f"{artefact.name}.{claim.key}"


# The paper's numbers stand in reported/PAPER.toml alone.

_DECIMAL = r"\d[\d,]*\.\d+"
_NUMBER = re.compile(rf"(?<![\w.,])(?:{_DECIMAL}(?![\d.])|\d[\d,]*(?=\s?%))")
_REFERENCE = re.compile(r"(?i)\b(?:sections?|equations?|tables?|figures?|§)\s*[\d.]+[a-z]?")
_LEVEL = re.compile(r"9[059] % (?:confidence )?interval")


def numbers_in(text: str) -> set[str]:
    """Return the decimals and percentages in a text, but for sections and levels of intervals."""
    return set(_NUMBER.findall(_LEVEL.sub("", _REFERENCE.sub("", text))))


def value(number: str) -> float:
    return float(number.replace(",", ""))


@cache
def constants(module: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return a module's texts, but for docstrings, and its floating-point numbers."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    return (
        tuple(value for value in values if isinstance(value, str)),
        tuple(value for value in values if isinstance(value, float)),
    )


def leaves(numbers: Any) -> Iterator[Any]:
    """Give every number of a nested table."""
    if isinstance(numbers, dict | list):
        for value in numbers.values() if isinstance(numbers, dict) else numbers:
            yield from leaves(value)
    else:
        yield numbers


def digits(value: float) -> int:
    """Return how many digits of a number mean something, 3 of 0.0350 and of 3.51."""
    return len(f"{value:.15g}".partition("e")[0].replace(".", "").strip("0-"))


def modules(paper: str) -> list[str]:
    """Return all modules of a paper's experiments."""
    folder = paths.PACKAGE / "experiments" / paper
    return [f"repro.experiments.{paper}.{path.stem}" for path in sorted(folder.glob("*.py"))]


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("costs at most 5.1 % of time", {"5.1"}),
            ("within 1 %, in the paper 34.8 %", {"1", "34.8"}),
            ("gains 2.3 to 2.9 points (section 4.3.3, Table 5)", {"2.3", "2.9"}),
            ("ResNet-50 with 64 samples on CIFAR-10", set()),
            ("equation 4.1 of version 1.2.3, with its 95 % interval", set()),
        ],
    )
    def test_numbers_in_a_text(self, text, found):
        assert numbers_in(text) == found

    def test_digits(self):
        assert [digits(v) for v in (0.05, 3.51, 100.0, 227.5, 0.0351, 5e-4)] == [1, 3, 1, 4, 3, 1]

    @every
    def test_those_of_claims_and_checks_are_no_literals(self, paper):
        """A number in such a text is the paper's, or the margin that its row gives."""
        texts = [text for module in modules(paper) for text in constants(module)[0]]
        for artefact in load_paper(paper).artefacts.values():
            rows = expectations(paper).get(artefact.name, {})
            shown = {claim.key: claim.text for claim in artefact.claims}
            shown |= {f"check {k}": check.text for k, check in enumerate(artefact.checks)}
            for key, text in shown.items():
                margin = rows[key].margin if key in rows else None
                ours = [margin, 100 * margin] if isinstance(margin, int | float) else []
                # The literal parts of a text that is put together are parts of what comes out.
                literal = {n for own in texts if own in text for n in numbers_in(own)}
                wrong = [n for n in literal if all(value(n) != pytest.approx(o) for o in ours)]
                assert not wrong, f"{paper}/{artefact.name}, {key}: {wrong} in {text!r}"

    @every
    def test_no_question_repeats_one(self, paper):
        """Neither in its texts nor in its arithmetic: of numbers with three digits or more."""
        known = {
            float(number)
            for number in leaves(reported(paper))
            if isinstance(number, float) and digits(number) >= 3
        }
        artefacts = load_paper(paper).artefacts.values()
        for module in {artefact.question.partition(":")[0] for artefact in artefacts}:
            texts, numbers = constants(module)
            named = {value(number) for text in texts for number in numbers_in(text)}
            assert not known & (named | set(numbers)), module
