"""The terms: paper, experiment, run, artefact, claim, check."""

from __future__ import annotations

import importlib
import math
import tomllib
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.experiments import judge
from repro.experiments.judge import Case, Cases, Estimate, Exact, NotRun, Part, Verdict
from repro.records import identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.measure import Timing

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
# Words of cases, the first of which there is sets a verdict's.
_DECIDING = {
    "partly": ("partly", judge.NOT_REPRODUCED),
    "undecided": ("undecided", "not run"),
    judge.NOT_SEEN: (judge.NOT_REPRODUCED,),
}
_RULES = {"higher": 1, "lower": -1, "same": 0, "at_most": 1, "at_least": -1, "exact": 0}
PROCESSES = (0, 1, 2, 3, 4)  # by which it measures, as seeds of runs
COMPUTING_PROFILES = ("smoke", "quick", LONG, "gpu", "paper")
PROFILES = ("view", *COMPUTING_PROFILES)
TOO_LITTLE = "trains and repeats too little to decide it"  # a claim of an artefact of `long`
SEEDS = {
    "smoke": (0,),
    "quick": (0, 1, 2),
    LONG: (0, 1, 2, 3, 4, 5),
    "gpu": (0,),  # the list of `repro gpu` has further ones
    "paper": (0, 1, 2),
}
RAY_ADDRESS = "REPRO_RAY_ADDRESS"  # of the cluster that trainings on Ray use; empty: one is started

Results = Any  # `query.Results`, which is gathered by the plans of this module
Chosen = Mapping[str, str]  # the dataset of each task
Config = Mapping[str, Any]  # of a run: JSON values
Rows = Iterable[Mapping[str, Any]]  # of a table: numbers and texts by column
Test = Callable[[Results], tuple[bool, str]]  # whether a check holds, and the numbers


class UsageError(ValueError):
    """A request for something that does not exist; the text names the choices."""


class LibraryMissing(UsageError):
    """A run needs a library that is not installed; the text names it."""


def cluster_error(error: RuntimeError) -> UsageError:
    """Return the error to raise for a fault of the cluster, which is no result of the method."""
    kind = LibraryMissing if isinstance(error.__cause__, ImportError) else UsageError
    return kind(str(error))


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment's function: the measured part of a record."""

    metrics: dict[str, Any]
    timings: dict[str, Timing] = field(default_factory=dict)
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Experiment:
    """Something that can be run with a configuration and a seed."""

    name: str  # unique within its paper
    # ``module:function``, imported when it runs. Called with (config, seed, data, device); `data`
    # is the loaded ``config["dataset"]``, `ImageData` or `EpochTimes`, None where there is none.
    entry: str
    measures: bool = True  # whether the result is a time or a size, and so belongs to a device
    trains: bool = False  # whether it is a training, whose first steps its record keeps
    shares: bool = False  # whether runs reuse each other's measurements, and so need one process
    ray: bool = False  # whether its workers are Ray's; else those of an engine ``ray`` are
    # A key of a configuration and the value with which it measures, too; no value: without the key.
    measures_where: Sequence[Any] = ()
    # Part of a record's key. Raise it when the function's results change: its records then have to
    # be computed anew.
    version: int = 1
    # For the golden rerun. Metrics, at any depth, that are times or follow from times and whose
    # names do not end in ``_s``; ``first_steps`` if a training's steps follow from times.
    timed: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()  # metrics of a training that do not depend on rounding
    # ``module:function`` that computes, from a record's configuration and metrics, the metrics that
    # follow from the measured ones.
    derive: str = ""

    def on_ray(self, config: Mapping[str, Any]) -> bool:
        """Whether a run's workers are processes of Ray's cluster."""
        return self.ray or config.get("engine") == "ray"

    def measured(self, config: Mapping[str, Any]) -> bool:
        """Whether a run's result is a measurement, which needs the machine for itself."""
        key, value = (*self.measures_where, None, None)[:2]
        return self.measures or (key is not None and config.get(key) == value)

    @property
    def function(self) -> Callable[[Mapping[str, Any], int, Any, str], Outcome]:
        """The function, imported now."""
        function: Callable[..., Outcome] = imported(self.entry)
        return function


def imported(entry: str) -> Any:
    """Import ``module:name``."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Run:
    """One configuration of an experiment."""

    experiment: str
    config: dict[str, Any]  # JSON values
    # None for the profile's; `PROCESSES`, and any further ones, of measurements.
    seeds: tuple[int, ...] | None = None
    # Its name in progress and failures, such as ``ResNet-50, mini-batch 64``.
    label: str = field(default="", compare=False)
    # Whether it has extra seeds for one claim: not plotted, not counted as missing.
    extra: bool = field(default=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.identity(0))

    def identity(self, seed: int) -> str:
        """Return the `identity` of its record with a seed."""
        return identity(self.experiment, self.config, seed)

    @property
    def by_processes(self) -> bool:
        """Whether its seeds number the processes that measure it, of which there can be more."""
        return self.seeds is not None and self.seeds[: len(PROCESSES)] == PROCESSES

    def __str__(self) -> str:
        return f"{self.experiment} {self.label}".strip()


@cache
def paper_toml(paper: str) -> dict[str, Any]:
    """Read ``PAPER/paper.toml``: a paper's promises, reported numbers, claims, recipe and story."""
    path = paths.PACKAGE / "experiments" / paper / "paper.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


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

    def under(self, profile: str) -> Claim:
        """Return the claim with the expectation under a profile."""
        if profile != LONG or self.long is None:
            return self
        return replace(self, **self.long, long=None)

    def judge(self, cases: Cases) -> Verdict:
        """Judge the cases by the rule, margin and effect that are written down."""
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
        side, label = _RULES[self.rule], case.label or name
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

        None where there is neither, or the case was not run.
        """
        if isinstance(ours, NotRun):
            return None
        log = isinstance(ours, Estimate) and ours.log
        effect = self.effect_of(name)
        if effect is None and self.margin is not None:
            effect = self._of(self.margin, name) + log  # of a ratio the margin is a share
        if effect is None or isinstance(ours, Exact):
            return None if effect is None else f"{effect:g}"
        return ours.shown(math.log(effect) if log else effect)

    def deciding(self, verdict: Verdict) -> tuple[str, Case]:
        """Return the first case that sets a verdict's word, after its name; else the first one."""
        words = {name: self._part(name, case)[0] for name, case in verdict.cases.items()}
        order = (*_DECIDING.get(verdict.word, (verdict.word,)), *words.values())
        name = next(name for word in order for name in words if words[name] == word)
        return name, verdict.cases[name]

    def number(self, verdict: Verdict) -> str:
        """Return the number of the case that sets a verdict's word, and the paper's."""
        if verdict.word == "not run" or not verdict.cases:
            return verdict.evidence.partition("; ")[0]
        name, case = self.deciding(verdict)
        if not isinstance(case, Estimate):
            return self._part(name, case)[1]
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

    def _of(self, value: float | Mapping[str, float], name: str) -> float:
        if not isinstance(value, Mapping):
            return value
        if name not in value:
            raise AssertionError(f"{self.key}: paper.toml has no number for {name!r}: {value}")
        return value[name]


@cache
def claims_of(paper: str) -> dict[str, dict[str, Claim]]:
    """Return a paper's claims by artefact and key, from ``PAPER/paper.toml``.

    Above its rows the file has when they were ``written``, which a row may say of itself, and the
    folders of reference records that were ``seen`` then.
    """
    content = dict(paper_toml(paper)["claims"])
    written, _ = content.pop("written"), content.pop("seen")
    by_artefact: dict[str, dict[str, Claim]] = {}
    for artefact, rows in content.items():
        for key, row in rows.items():
            judged = {name: value for name, value in row.items() if name not in NOTES}
            made = Claim(**{"key": key, "written": written, **judged})
            by_artefact.setdefault(artefact, {})[key] = made
    return by_artefact


def setting_of(kind: str, results: Results) -> str:
    """Return in which setting a claim of a kind is judged: a word of `SETTINGS`."""
    if kind == "simulated":
        return SIMULATED
    if results.profile not in ("gpu", "paper"):
        return SMALLER
    if kind in ("time", "memory"):
        return ELSEWHERE
    # Trainings have the paper's own data, and no stand-in or recompressed copy.
    own_data = all(
        record.dataset["name"] in paper_toml(record.paper).get("own_data", ())
        for record in results.records
        if record.dataset
    )
    return OWN if results.profile == "paper" and own_data else SMALLER


@dataclass(frozen=True)
class Check:
    """A fact that is shown under its table, and not counted as a claim of the paper.

    It holds by construction if the code is right, follows from the paper's own numbers alone, or
    is a prediction of our own.
    """

    text: str
    test: Test  # says whether it does, and the numbers; may raise `NotRun`

    def row(self, results: Results) -> dict[str, str]:
        """Return the check as a row of a table."""
        try:
            holds, evidence = self.test(results)
        except NotRun as missing:
            return {"check": self.text, "holds": "not run", "evidence": str(missing)}
        return {"check": self.text, "holds": "yes" if holds else "NO", "evidence": evidence}


@dataclass(frozen=True, eq=False)
class Artefact:
    """One table or figure of a paper: its runs, its rows, its drawing, its claims."""

    name: str  # such as table4
    source: str  # where in the paper
    title: str  # one line
    lead: str  # the first sentences of its caption
    # The runs it draws from, given a profile and the dataset chosen for each task.
    plan: Callable[[str, Chosen], Iterable[Run]]
    rows: Callable[[Results], Rows]  # of its table, the paper's values with ours
    draw: Callable[[Results], Figure] | None = None
    # Further sentences of its caption: stand-in or synthetic data, simulated limits.
    facts: Callable[[Results], Iterable[str]] = lambda results: ()
    # By key of ``paper.toml``: the function whose numbers a claim is judged on.
    claims: Mapping[str, Callable[[Results], Cases]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()  # facts by construction, arithmetic, or a simulator's input
    long: bool = False  # whether the profile `long` runs it
    parts: tuple[str, ...] = ()  # artefacts that it sums up, each as it is shown by itself

    def runs(self, profile: str, chosen: Chosen) -> list[Run]:
        """Return the runs it draws from; none under `long` where that has nothing to add."""
        return [] if profile == LONG and not self.long else list(self.plan(profile, chosen))

    def caption(self, results: Results) -> str:
        """Return its lead, facts about its records, and how many are missing or failed."""
        if not results.records:
            return f"{self.lead} Not run yet."
        return " ".join([self.lead, *self.facts(results), *_shortcomings(results)])

    def figure(self, results: Results) -> Figure:
        """Draw it, and name in the image the device and the profile of its records."""
        assert self.draw is not None, f"{self.name} has no figure"
        drawn = self.draw(results)
        if results.records:
            from repro.plots import sign

            sign(drawn, results.signature(self.caption(results)))
        return drawn

    def judge(self, claim: Claim, results: Results) -> Verdict:
        """Judge one of its claims; missing records make it "not run".

        `smoke` decides exact claims alone, and so does `quick` where the profile `long` trains
        longer or times in further processes: a short training, or one process, can be certain and
        wrong. Outside the paper's own setting a certain failure is "not seen here".
        """
        try:
            verdict = claim.judge(self.claims[claim.key](results))
        except NotRun as missing:
            return Verdict("not run", str(missing))
        lesser = results.profile == "smoke" or (self.long and results.profile == "quick")
        if lesser and claim.rule != "exact" and verdict.word != "not run":
            why = f"the profile {results.profile} {TOO_LITTLE}"
            return replace(verdict, word="undecided", evidence=f"{verdict.evidence}; {why}")
        if verdict.word == judge.NOT_REPRODUCED and setting_of(claim.kind, results) != OWN:
            return replace(verdict, word=judge.NOT_SEEN)
        return verdict


def _shortcomings(results: Results) -> Iterable[str]:
    """Yield a sentence for each kind of record that is missing or failed."""
    for status, said in (("out_of_memory", "ran out of memory"), ("failed", "FAILED")):
        if count := sum(record.status == status for record in results.records):
            yield f"{count} run{'s' * (count > 1)} {said}."
    # Of seeds that are missing the table's n tells.
    planned = {run for run, _ in results.expected if not run.extra}
    made = {identity(record.experiment, record.config, 0) for record in results.records}
    if lacking := sum(run.identity(0) not in made for run in planned):
        yield f"Not run: {lacking} of {len(planned)} configurations."


def artefact(
    paper: str, name: str, checks: Mapping[str, Test] | None = None, **functions: Any
) -> Artefact:
    """Return an artefact with its texts from ``[artefacts.NAME]`` of ``PAPER/paper.toml``.

    The file has the texts of its checks by key; `functions` are its further attributes.
    """
    row = paper_toml(paper)["artefacts"][name]
    facts = tuple(Check(row["checks"][key], test) for key, test in (checks or {}).items())
    texts = {key: row[key] for key in ("source", "title", "long") if key in row}
    return Artefact(name, lead=row["caption"], checks=facts, **texts, **functions)


class _Artefacts(UserDict[str, Any]):
    """A paper's artefacts by name; each is ``module:name``, imported when it is asked for."""

    def __getitem__(self, name: str) -> Artefact:
        found: Artefact = imported(self.data[name])
        return found


@dataclass(frozen=True)
class Paper:
    """A paper: its experiments, its artefacts and the data they may use."""

    key: str  # such as mbs
    title: str  # the method's name
    citation: str  # one line
    notebook: str  # its name, without ending
    experiments: Mapping[str, Experiment]
    artefacts: Mapping[str, Artefact]  # in the paper's order
    # For each profile and task, the datasets that serve, best first; the last one is embedded or
    # generated, so that one is always there.
    datasets: Mapping[str, Mapping[str, Sequence[str]]]
    # Keys of configurations that ``--set`` may change, with their values.
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, key: str) -> Paper:
        """Read a paper from its ``paper.toml``."""
        content, here = paper_toml(key), f"repro.experiments.{key}"
        experiments = {}
        for name, row in content["experiments"].items():
            timed = (*row.get("timed", ()), *content.get("timed", ()))  # of all experiments
            modules = {at: f"{here}.{row[at]}" for at in ("entry", "derive") if at in row}
            experiments[name] = Experiment(**{**row, **modules, "name": name, "timed": timed})
        artefacts = _Artefacts(
            {name: f"{here}.{row['question']}" for name, row in content["artefacts"].items()}
        )
        datasets = content.get("datasets", {profile: {} for profile in COMPUTING_PROFILES})
        title, citation, notebook = (content[name] for name in ("title", "citation", "notebook"))
        options = content.get("options", {})
        return cls(key, title, citation, notebook, experiments, artefacts, datasets, options)
