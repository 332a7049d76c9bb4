"""What a paper claims: the rows of its ``paper.toml``, and how each is judged."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any

from repro import paths
from repro.experiments import judge
from repro.experiments.judge import WORDS, Case, Cases, Estimate, Exact, NotRun, Part, Verdict

# Trains longer and measures in several processes, for the claims that this decides.
LONG = "long"
# Evidence: what trainings end with, measured times, sizes that fit, a model of a machine.
KINDS = ("training", "time", "memory", "simulated")
OWN, SMALLER, ELSEWHERE, SIMULATED = "the paper's own", "smaller", "another machine", "simulated"
SETTINGS: Mapping[str, str] = {
    OWN: "the paper's networks, data and epochs",
    SMALLER: "smaller networks, less or other data, or fewer epochs",
    ELSEWHERE: "the paper's networks and sizes, timed on another machine",
    SIMULATED: "a model of a machine",
}
NOTES = {"sd", "n"}  # for readers alone
_RULES = {"higher": 1, "lower": -1, "same": 0, "at_most": 1, "at_least": -1, "exact": 0}


@cache
def paper_toml(paper: str) -> dict[str, Any]:
    """Read ``PAPER/paper.toml``: a paper's promises, reported numbers, claims, recipe and story."""
    path = paths.PACKAGE / "experiments" / paper / "paper.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def reported(paper: str) -> dict[str, Any]:
    """Return the numbers that a paper reports."""
    numbers: dict[str, Any] = paper_toml(paper)["reported"]
    return numbers


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that a run here could refute: a row of its ``paper.toml``.

    Effects and margins are of every case, or by case; an effect is nan where the paper names none.
    """

    key: str  # unique within its artefact: [claims.ARTEFACT.KEY]
    text: str  # the sentence
    source: str  # where in the paper
    kind: str  # of evidence: one of `KINDS`
    # ``higher``, ``lower`` (a direction), ``same``, ``at_most``, ``at_least`` (within the margin),
    # ``exact`` (no spread); see `judge`.
    rule: str
    expect: str  # the word expected under the profile `quick`, and nothing more
    why: str  # the reason
    written: datetime
    over: str = "all"  # cases have to hold, or any
    effect: float | Mapping[str, float] | None = None  # the paper's difference, or ratio
    # The largest difference that counts as none, in the evidence's unit or as a share.
    margin: float | Mapping[str, float] | None = None
    margin_source: str = ""  # where the margin comes from
    own: bool = False  # whether it is a question of our own, which no paper answers
    seen: Sequence[str] = ()  # experiments, or folders of records, that were there when written
    long: Mapping[str, Any] | None = None  # expect, why, written and seen under `long`
    why_not: str = ""  # where it certainly fails: what was observed, ruled out, concluded
    # The profile of the records that this tells of; by default `quick`, or `long` where the
    # artefact has it.
    why_of: str = ""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("rule", self.rule, _RULES),
            ("over", self.over, ("all", "any")),
            ("expect", self.expect, WORDS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        if self.written.tzinfo is None:
            raise ValueError(f"written is {self.written!r}; give a time with its zone")
        if (self.rule in ("same", "at_most", "at_least")) != (self.margin is not None):
            raise ValueError("a sameness, and nothing else, has a margin")
        if self.margin is not None and not self.margin_source:
            raise ValueError("a margin has a margin_source")
        self.under(LONG)  # checks what is expected there

    def under(self, profile: str) -> Claim:
        """Return the claim with the expectation under a profile."""
        if profile != LONG or self.long is None:
            return self
        return replace(self, **self.long, long=None)

    def judge(self, cases: Cases) -> Verdict:
        """Judge the cases by the rule, margin and effect that are written down.

        Raises:
            ValueError: A case has no margin, or no effect beside others that have.
        """
        parts = [self._part(name, case) for name, case in cases.items()]
        verdict = replace(judge.combine(parts, self.over), cases=cases)
        if self.margin_source and verdict.word != "not run":
            return replace(verdict, evidence=f"{verdict.evidence}; margin: {self.margin_source}")
        return verdict

    def _part(self, name: str, case: Case) -> Part:
        if isinstance(case, NotRun):
            return "not run", f"{name}: {case}"
        if isinstance(case, Exact):
            word = "reproduced" if case.holds else judge.NOT_REPRODUCED
            return word, f"{name} {case.text}".strip()
        side = _RULES[self.rule]
        label = case.label or name
        if self.margin is not None:
            word, text = judge.equivalence(label, case, self._of(self.margin, name), side=side)
        elif side:
            effect = self.effect_of(name)
            whose = "prediction" if self.own else "paper"
            word, text = judge.direction(label, case, effect, sign=side, whose=whose)
        else:
            raise ValueError(f"{self.key} is exact, and {name} an estimate")
        return word, f"{text}; {case.note}" if case.note else text

    def effect_of(self, name: str) -> float | None:
        """Return the paper's effect of a case, None where it names none."""
        effect = None if self.effect is None else self._of(self.effect, name)
        return None if effect is None or math.isnan(effect) else effect

    def papers_number(self, name: str, ours: Case) -> str | None:
        """Return the paper's effect of a case, or the margin, as text on the scale of ours.

        None where the paper names none.
        """
        log = isinstance(ours, Estimate) and ours.log
        effect = self.effect_of(name)
        if effect is None and self.margin is not None:
            effect = self._of(self.margin, name) + log  # of a ratio the margin is a share
        if effect is None or not isinstance(ours, Estimate):
            return None if effect is None else f"{effect:g}"
        return ours.shown(math.log(effect) if log else effect)

    def first_number(self, verdict: Verdict) -> str:
        """Return the number of a verdict's first case, and the paper's; else the first evidence."""
        for name, case in verdict.cases.items():
            if not isinstance(case, Estimate) or verdict.word == "not run":
                continue
            notes = ["no spread known"] if math.isnan(case.error) else []
            if self.margin is not None:
                margin = self._of(self.margin, name)
                notes.append(judge.margin_text(case, margin, _RULES[self.rule]))
            elif papers := self.papers_number(name, case):
                notes.append(f"{'prediction' if self.own else 'paper'} {papers}")
            said = f"{case.shown(case.mean)} {case.unit}".strip()
            said += f" ({', '.join(notes)})" if notes else ""
            label = (case.label or name).rstrip(":,")
            return f"{said}: {label}" if label else said
        return verdict.evidence.partition("; ")[0]

    def _of(self, value: float | Mapping[str, float], name: str) -> float:
        if not isinstance(value, Mapping):
            return value
        if name not in value:
            raise ValueError(f"{self.key}: paper.toml has no number for {name!r}: {dict(value)}")
        return value[name]


@cache
def claims_of(paper: str) -> dict[str, dict[str, Claim]]:
    """Return a paper's claims by artefact and key, from ``PAPER/paper.toml``.

    Above its rows the file has when they were ``written``, which a row may say of itself, and the
    folders of reference records that were ``seen`` then. A row may note the spread of one value
    that was assumed, ``sd``, and the seeds of a cell, ``n``.

    Raises:
        ValueError: A row is not one; the text names it.
    """
    content = dict(paper_toml(paper)["claims"])
    written, _ = content.pop("written"), content.pop("seen")
    by_artefact: dict[str, dict[str, Claim]] = {}
    for artefact, rows in content.items():
        for key, row in rows.items():
            judged = {name: value for name, value in row.items() if name not in NOTES}
            try:
                made = Claim(**{"key": key, "written": written, **judged})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{paper}/paper.toml, [{artefact}.{key}]: {error}") from error
            by_artefact.setdefault(artefact, {})[key] = made
    return by_artefact
