"""Where the records of an artefact come from: this machine, or the reference of a device.

Of every run this machine's own record is shown before a reference. So a single record of one's own
hides no reference of another run.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from repro.experiments.arguments import Choices, default_profile, value_of, with_changes
from repro.experiments.design import (
    COMPUTING_PROFILES,
    LONG,
    PROCESSES,
    SEEDS,
    Artefact,
    Paper,
    Results,
    Run,
    UsageError,
)
from repro.records import Record, RecordStore, identity, local_store, reference_stores

LOCAL = "local"
MOST_NAMED = 6  # runs from one device and profile, in a caption


@dataclass(frozen=True)
class Source:
    """The records that count for a paper: from all devices, or from one.

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
        """The paper's records, by the keys of `stores` that have any; each is read once.

        Only those of the present versions of its experiments.
        """
        version = {name: item.version for name, item in self.paper.experiments.items()}
        loaded = {
            origin: [
                r for r in store.load(self.paper.key) if version.get(r.experiment) == r.version
            ]
            for origin, store in self.stores.items()
        }
        return {origin: records for origin, records in loaded.items() if records}

    def paths(self, records: Sequence[Record]) -> dict[int, Path]:
        """Return the files of records, by the records' identity in memory."""
        wanted = {id(record) for record in records}
        return {
            id(record): self.stores[origin].where(record)
            for origin, held in self.records.items()
            for record in held
            if id(record) in wanted
        }

    @property
    def label(self) -> str:
        """Where the records come from, in one phrase."""
        if not self.records:
            return "no records yet"
        places = [_label_of(device, profile) for device, profile in reversed(self.records)]
        return "; ".join(places)


_HERE = "this machine"


def _label_of(device: str, profile: str) -> str:
    where = _HERE if device == LOCAL else f"reference records, {device}"
    return f"{where}, profile {profile}"


def of_reference(results: Results) -> bool:
    """Return whether all records are the reference's, none this machine's own."""
    return not any(_HERE in place for place in results.places)


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
        origin: store
        for origin, store in reference_stores().items()
        if origin[1] in COMPUTING_PROFILES
    }
    names = [LOCAL, *dict.fromkeys(origin[0] for origin in references)]
    if device is not None and device not in names:
        raise UsageError(f"no records of device {device!r}; choose among {', '.join(names)}")
    local_stores = {(LOCAL, name): local_store(name) for name in COMPUTING_PROFILES}
    # A GPU's reference before a CPU's, this machine's before both.
    ordered = sorted(references, key=lambda origin: not origin[0].startswith("cpu"))
    stores = {origin: references[origin] for origin in ordered} | (local_stores if local else {})
    counting = (profile, "quick") if profile == LONG else (profile,)
    return Source(
        paper,
        {
            origin: store
            for origin, store in stores.items()
            if device in (None, origin[0]) and (profile is None or origin[1] in counting)
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

    Of the profiles the one counts that has records of most of its runs, with two seeds or more, of
    several the most thorough one, and `smoke` after all others. A GPU's records count first, as
    those nearest the paper, once half of its runs have some. The datasets are those that the
    records have, so that an artefact is shown as it was computed whatever data is at hand now.

    Args:
        artefact: Of the source's paper.
        source: Where its records are.
        seeds: Those wanted; by default the profile's and any that records have.
        changes: What ``--set`` changes in the runs.

    Raises:
        UsageError: The changes do not fit the runs.
    """
    if artefact.exhibit.parts:
        parts = [source.paper.artefacts[name] for name in artefact.exhibit.parts]
        return _joined({part: results_of(part, source, seeds, changes) for part in parts})
    held = [profile for _, profile in source.records]
    profiles = [name for name in COMPUTING_PROFILES if name in held]
    if not profiles:
        profiles = [source.profile or default_profile()]
    candidates = [_of_profile(artefact, source, name, seeds, changes) for name in profiles]

    def worth(results: Results) -> tuple[bool, bool, float, int]:
        # Toy records show that the code runs; they hide nothing better.
        real = results.profile != "smoke" and bool(results.records)
        on_a_gpu = any(record.device["type"] != "cpu" for record in results.records)
        share = _share(results)
        first = real and on_a_gpu and share >= 0.5
        return real, first, share, COMPUTING_PROFILES.index(results.profile)

    return max(candidates, key=worth)


def _joined(parts: Mapping[Artefact, Results]) -> Results:
    """Return the results of several artefacts as one, under their most thorough profile."""
    profile = max((part.profile for part in parts.values()), key=COMPUTING_PROFILES.index)
    whole = Results([], (), [], profile=profile)
    whole.parts = {artefact.name: part for artefact, part in parts.items()}
    for artefact, part in parts.items():
        whole.expected += part.expected
        whole.records += part.records
        whole.places = [
            *whole.places,
            *(f"{artefact.source} from {place}" for place in part.places),
        ]
    return whole


def _share(results: Results) -> float:
    """Return the share of the runs that have records, of seeds two each: more narrow intervals."""
    present = {record.identity for record in results.records}
    seeds: dict[Run, list[bool]] = {}  # whether there is a record of each
    for run, seed in results.expected:
        if not run.beside:
            here = identity(run.experiment, run.config, seed) in present
            seeds.setdefault(run, []).append(here)
    shares = [min(2, sum(run)) / min(2, len(run)) for run in seeds.values()]
    return sum(shares) / max(1, len(shares))


def _of_profile(
    artefact: Artefact, source: Source, profile: str, seeds: Sequence[int] | None, changes: Choices
) -> Results:
    paper = source.paper
    origins = [origin for origin in source.records if origin[1] == profile]
    records = [record for origin in origins for record in source.records[origin]]  # best last
    names = [r.config["dataset"]["name"] for r in records if r.config.get("dataset")]
    used = list(dict.fromkeys(reversed(names)))
    tasks = paper.datasets[profile]
    served = []
    for allowed in tasks.values():
        serving = [name for name in used if name in (*allowed, "synthetic")]
        served.append(serving or [next(iter(allowed), "")])
    asked = SEEDS[profile] if seeds is None else seeds
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
        runs = [_with_further_processes(run, records) for run in runs]
        candidates.append(Results(runs, seeds, records, profile))
    best = max(candidates, key=lambda results: len(results.records))
    # Nothing is missing of the further seeds of a few runs.
    present = {record.identity for record in best.records}
    best.expected = [
        (run, seed)
        for run, seed in best.expected
        if run.seeds is not None
        or seed in asked
        or identity(run.experiment, run.config, seed) in present
    ]
    best.places = _places(best, {p: source.records[p] for p in origins}) if origins else []
    return best


def _with_further_processes(run: Run, records: Sequence[Record]) -> Run:
    """Return a measurement with those of its processes that were asked for beyond the profile's."""
    if not run.by_processes:
        return run
    of_it = {(r.seed, r.identity) for r in records if r.experiment == run.experiment}
    seeds = sorted({seed for seed, _ in of_it}.difference(PROCESSES))
    further = [n for n in seeds if (n, identity(run.experiment, run.config, n)) in of_it]
    return replace(run, seeds=(*PROCESSES, *further))


def _places(results: Results, records: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """Return the places whose records the results have, most records first.

    Where they are of several, each but the first names its runs.
    """
    runs = {identity(run.experiment, run.config, seed): run for run, seed in results.expected}
    chosen = {id(record): record for record in results.records}
    by_label = {
        _label_of(*origin): list(
            dict.fromkeys(str(runs[r.identity]) for r in group if id(r) in chosen)
        )
        for origin, group in records.items()
    }
    first, *others = sorted(by_label.items(), key=lambda item: -len(item[1]))
    places = [first[0]] if first[1] else []
    for where, labels in others:
        if labels:
            more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
            places.append(f"{where}: {', '.join(labels[:MOST_NAMED])}{more}")
    return places
