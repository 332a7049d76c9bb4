"""Where the records of an artefact come from: this machine, or the reference of a device.

Of every run the best record is shown: one that stands before a stale one, this machine's before a
reference. So a single record of one's own hides no reference of another run.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from repro.experiments.arguments import Choices, default_profile, value_of, with_changes
from repro.experiments.design import (
    COMPUTING_PROFILES,
    LONG,
    SEEDS,
    Artefact,
    Paper,
    Results,
    UsageError,
)
from repro.experiments.running import is_current
from repro.records import Record, RecordStore, identity, local_store, reference_stores

LOCAL = "local"
MOST_NAMED = 6  # runs of a place, in a caption


@dataclass(frozen=True)
class Source:
    """The records that count for a paper: of all places, or of one.

    Attributes:
        paper: The paper.
        stores: By (device folder or ``local``, profile), worst first.
        profile: The only one that counts; None for the best of each artefact.
    """

    paper: Paper
    stores: Mapping[tuple[str, str], RecordStore]
    profile: str | None = None

    @cached_property
    def records(self) -> dict[tuple[str, str], list[Record]]:
        """The paper's records by place and profile, where there are any; each is read once."""
        found = {place: store.load(self.paper.key) for place, store in self.stores.items()}
        return {place: records for place, records in found.items() if records}

    def paths(self, records: Sequence[Record]) -> dict[int, Path]:
        """Return the files of records, by the records' identity in memory."""
        wanted = {id(record) for record in records}
        return {
            id(record): self.stores[place].path(record.paper, record.experiment, record.key)
            for place, own in self.records.items()
            for record in own
            if id(record) in wanted
        }

    @property
    def label(self) -> str:
        """Where the records come from, in one phrase."""
        if not self.records:
            return "no records yet"
        places = [_place(device, profile) for device, profile in reversed(self.records)]
        return "; ".join(places)


def _place(device: str, profile: str) -> str:
    where = "this machine" if device == LOCAL else f"reference records, {device}"
    return f"{where}, profile {profile}"


def find_source(
    paper: Paper, profile: str | None = None, device: str | None = None, local: bool = True
) -> Source:
    """Find records of a paper.

    Args:
        paper: The paper.
        profile: Only this one, `long` with `quick` for what that leaves as it is; by default for
            each artefact the one that has most of its records.
        device: ``local``, or a folder under ``results/reference``; by default all of them.
        local: Whether this machine's own records count.

    Raises:
        UsageError: There is no such device folder.
    """
    references = {
        place: store
        for place, store in reference_stores().items()
        if place[1] in COMPUTING_PROFILES
    }
    names = [LOCAL, *dict.fromkeys(place[0] for place in references)]
    if device is not None and device not in names:
        raise UsageError(f"no records of device {device!r}; choose among {', '.join(names)}")
    own = {(LOCAL, name): local_store(name) for name in COMPUTING_PROFILES}
    # A GPU's reference before a CPU's, this machine's before both.
    ordered = sorted(references, key=lambda place: not place[0].startswith("cpu"))
    stores = {place: references[place] for place in ordered} | (own if local else {})
    counting = (profile, "quick") if profile == LONG else (profile,)
    return Source(
        paper,
        {
            place: store
            for place, store in stores.items()
            if device in (None, place[0]) and (profile is None or place[1] in counting)
        },
        profile,
    )


def results_of(
    artefact: Artefact,
    source: Source,
    seeds: Sequence[int] | None = None,
    changes: Choices = (),
) -> Results:
    """Gather the best record of every run of an artefact.

    Of the profiles the one counts that has records of most of its runs, of several the most
    thorough one, and `smoke` after all others. The datasets are those that the records have, so
    that an artefact is shown as it was computed whatever data is at hand now.

    Args:
        artefact: Of the source's paper.
        source: Where its records are.
        seeds: Those wanted; by default the profile's and any that records have.
        changes: What ``--set`` changes in the runs.

    Raises:
        UsageError: The changes do not fit the runs.
    """
    held = [profile for _, profile in source.records]
    profiles = [name for name in COMPUTING_PROFILES if name in held]
    if not profiles:
        profiles = [source.profile or default_profile()]
    found = [_of_profile(artefact, source, name, seeds, changes) for name in profiles]

    def worth(results: Results) -> tuple[bool, float, int]:
        share = len(results.records) / max(1, len(results.expected))
        # Toy records show that the code runs; they hide nothing better.
        real = results.profile != "smoke" and bool(results.records)
        return real, share, COMPUTING_PROFILES.index(results.profile)

    best = max(found, key=worth)
    best.recorded = _recorded(artefact, source)
    return best


def _recorded(artefact: Artefact, source: Source) -> list[Record]:
    """Return the records that stand of jobs that no plan has, of all profiles; the last of each."""
    wanted = artefact.exhibit.recorded
    found = {
        (record.identity, record.device["name"]): record
        for own in source.records.values()
        for record in own
        if record.experiment in wanted
        and record.status == "ok"
        and is_current(source.paper, record)
    }
    return list(found.values())


def _of_profile(
    artefact: Artefact, source: Source, profile: str, seeds: Sequence[int] | None, changes: Choices
) -> Results:
    paper = source.paper
    places = [place for place in source.records if place[1] == profile]
    records = [record for place in places for record in source.records[place]]  # best last
    names = [r.config["dataset"]["name"] for r in records if r.config.get("dataset")]
    used = list(dict.fromkeys(reversed(names)))
    tasks = paper.datasets[profile]
    served = []
    for own in tasks.values():
        serving = [name for name in used if name in (*own, "synthetic")]
        served.append(serving or [next(iter(own), "")])
    if seeds is None:
        # Whoever asked for further seeds sees them.
        seeds = sorted({record.seed for record in records}.union(SEEDS[profile]))
    candidates = []
    for names_ in itertools.product(*served):
        runs = artefact.runs(profile, dict(zip(tasks, names_, strict=True)))
        if changes:
            # An artefact without the key is shown as it is.
            held = [(k, v) for k, v in changes if any(value_of(run, k) is not ... for run in runs)]
            runs = with_changes(paper, runs, held)
        candidates.append(
            Results(runs, seeds, records, lambda record: is_current(paper, record), profile)
        )
    best = max(candidates, key=lambda results: len(results.records))
    best.places = _places(best, {p: source.records[p] for p in places}) if places else []
    return best


def _places(results: Results, records: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """Return the places whose records the results have, most records first.

    Where they are of several, each but the first names its runs.
    """
    runs = {identity(run.experiment, run.config, seed): run for run, seed in results.expected}
    chosen = {id(record): record for record in results.records}
    found = {
        _place(*place): list(dict.fromkeys(str(runs[r.identity]) for r in own if id(r) in chosen))
        for place, own in records.items()
    }
    first, *others = sorted(found.items(), key=lambda item: -len(item[1]))
    told = [first[0]] if first[1] else []
    for place, labels in others:
        if labels:
            more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
            told.append(f"{place}: {', '.join(labels[:MOST_NAMED])}{more}")
    return told
