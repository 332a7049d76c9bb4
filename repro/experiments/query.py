"""Which records count for an artefact, also as one frame: one row a record.

Of every run this machine's own record counts before a reference, so that a single record of one's
own hides no reference of another run.
"""

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.experiments.arguments import Choices, default_profile, value_at, with_changes
from repro.experiments.design import (
    COMPUTING_PROFILES,
    LONG,
    PROCESSES,
    SEEDS,
    Artefact,
    Paper,
    Run,
    UsageError,
    paper_toml,
)
from repro.experiments.judge import BySeed, NotRun
from repro.records import Record, RecordStore, identity, local_store, reference_stores
from repro.report import span

if TYPE_CHECKING:
    import pandas as pd

LOCAL = "local"
HERE = "this machine"
Held = Mapping[tuple[str, str], list[Record]]  # records by (device or local, profile), worst first
MARKS = ("SIMULATED", "ESTIMATED", "STAND-IN", "SYNTHETIC")


class Results:
    """The records of one artefact: those of its runs, one per configuration and seed.

    Of several candidates with the same configuration and seed the last counts.

    Attributes:
        places: Where the records come from, as phrases, most records first.
        gpu: A GPU's records of some of the runs, where others are shown; None where there are none.
    """

    places: Sequence[str] = ()
    gpu: "Results | None" = None

    def __init__(
        self,
        runs: Sequence[Run],
        seeds: Sequence[int],
        records: Sequence[Record],
        profile: str = "quick",
    ) -> None:
        self.profile = profile
        self.expected = [
            (run, seed) for run in runs for seed in (run.seeds if run.seeds is not None else seeds)
        ]
        wanted = {run.identity(seed) for run, seed in self.expected}
        chosen = {record.identity: record for record in records if record.identity in wanted}
        self.records = list(chosen.values())

    @property
    def frame(self) -> "pd.DataFrame":
        """One row a record, with columns such as ``config.model.depth`` and ``metrics.best``."""
        import pandas as pd

        names = ("experiment", "seed", "status", "config", "metrics")
        rows = [
            {"profile": self.profile, "device": record.device["name"]}
            | {name: getattr(record, name) for name in names}
            for record in self.records
        ]
        return pd.json_normalize(rows)

    def select(self, experiment: str, **config: Any) -> list[Record]:
        """Return the records of an experiment with these values in the configuration, by seed."""
        matching = [
            record
            for record in self.records
            if record.experiment == experiment
            and all(record.config.get(name) == value for name, value in config.items())
        ]
        return sorted(matching, key=lambda record: record.seed)

    def ok(self, experiment: str, **config: Any) -> list[Record]:
        """Return those of `select` that ran to their end."""
        return [record for record in self.select(experiment, **config) if record.status == "ok"]

    def first(self, experiment: str, **config: Any) -> Record | None:
        """Return the first of `ok`, None where there is none."""
        return next(iter(self.ok(experiment, **config)), None)

    def need(self, experiment: str, **config: Any) -> Record:
        """Return the first of `ok`; `NotRun` where there is none."""
        if (record := self.first(experiment, **config)) is None:
            raise NotRun("no records")
        return record

    def cell(self, records: Sequence[Record], read: Callable[[Record], float]) -> BySeed:
        """Read a value of every record of one cell, which is to be compared seed by seed.

        Under `long` the seeds of the first look, by experiment (and task, network or setting) in
        ``paper.toml``, only set how many are needed: where a comparison has others, those judge
        alone.
        """
        look: Any = ()
        if records and self.profile == LONG:
            look = paper_toml(records[0].paper).get("first_look", {}).get(records[0].experiment, ())
        if isinstance(look, Mapping):
            config = records[0].config
            kind = config.get("task") or config.get("role") or config.get("setting")
            look = look.get(kind, ())
        return BySeed(map(read, records), (record.seed for record in records), look)

    def measured(self, experiment: str, several: bool = False, **config: Any) -> Record:
        """Return a measurement, of several processes as one record; see `of_processes`.

        Under `long`, or with `several`, one process alone has one sample of each timing, too.
        """
        self.need(experiment, **config)
        return of_processes(self.ok(experiment, **config), several or self.profile == LONG)

    def signature(self, said: str) -> str:
        """Return the line in a figure that names devices, profile, data and n of these records.

        It repeats the `MARKS` that its caption has, `said`.
        """
        records = self.records
        parts = [f"Ours: {devices(records)}", f"profile {self.profile}"]
        parts += sorted({record.dataset["name"] for record in records if record.dataset})
        trained = [record for record in records if isinstance(record.config.get("epochs"), int)]
        if trained:
            most = "at most " * any(record.config.get("stop") for record in trained)
            parts.append(f"{most}{span({record.config['epochs'] for record in trained})} epochs")
        # Runs planned once, such as those that run out of memory, do not count, nor do extra seeds.
        once = {
            run.identity(seed)
            for run, seed in self.expected
            if run.extra or (run.seeds is not None and len(run.seeds) == 1)
        }
        repeated = [r for r in records if r.status == "ok" and r.identity not in once] or records
        counts = Counter(
            identity(record.experiment, record.config, 0) for record in repeated
        ).values()
        # A measurement that starts its processes itself has a list of samples from each.
        own = [len(samples) for r in repeated if (samples := r.metrics.get("samples_s"))]
        parts.append(f"n = {span(own if max(own, default=0) > max(counts) else counts)}")
        return " · ".join([*parts, *(word for word in MARKS if word in said)])

    @property
    def missing(self) -> int:
        """How many runs have no record."""
        return len(self.expected) - len(self.records)


def device_name(record: Record) -> str:
    """Return the device that a record was made on, a CPU with the threads that it ran on."""
    name: str = record.device["name"]
    threads = record.config.get("threads") or record.device.get("threads")
    if record.device["type"] != "cpu" or not threads:
        return name
    return f"{name} ({threads} thread{'s' * (threads > 1)})"


def devices(records: Sequence[Record]) -> str:
    """Return the devices of records, each once."""
    return ", ".join(sorted({device_name(record) for record in records}))


def one_machine(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records; raise `NotRun` where they are of several devices."""
    devices = sorted({record.device["name"] for record in records})
    if len(devices) > 1:
        raise NotRun(
            f"times of {' and '.join(devices)} do not compare; take the records of one with --from"
        )
    return records


def of_processes(records: Sequence[Record], several: bool = False) -> Record:
    """Return the measurement of several processes, a record each, as one record.

    Timings within a process correlate: each process counts once, and a timing's samples are the
    processes' medians. Numbers among the metrics are medians over the processes; other metrics are
    the first one's. Without `several` a single record is returned as it is.
    """
    first, *others = records
    if not others and not several:
        return first
    timings = {
        name: timing
        | {"samples_s": [statistics.median(r.timings[name]["samples_s"]) for r in records]}
        for name, timing in first.timings.items()
        if all(name in record.timings for record in others)
    }
    metrics = _median([record.metrics for record in records])
    return replace(first, timings=timings, metrics=metrics)


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {
            key: _median([value[key] for value in values])
            for key in first
            if all(isinstance(value, dict) and key in value for value in values)
        }
    if isinstance(first, list):
        if any(not isinstance(value, list) or len(value) != len(first) for value in values):
            return first
        return [_median(list(items)) for items in zip(*values, strict=True)]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return first
    return first if all(value == first for value in values) else statistics.median(values)


@dataclass(frozen=True)
class Source:
    """The records that count for a paper: from all devices, or from one."""

    paper: Paper
    stores: Mapping[tuple[str, str], RecordStore]  # by (device or local, profile), worst first
    profile: str | None = None  # the only one that counts; None for the best of each artefact
    _looked: dict[str, Results] = field(default_factory=dict, init=False, compare=False)

    def look(self, name: str) -> Results:
        """Return the records of one of the paper's artefacts, which are gathered once."""
        if name not in self._looked:
            self._looked[name] = results_of(self.paper.artefacts[name], self)
        return self._looked[name]

    @cached_property
    def records(self) -> dict[tuple[str, str], list[Record]]:
        """The paper's records of its experiments' present versions, by the keys of `stores`."""
        present = {(name, item.version) for name, item in self.paper.experiments.items()}
        loaded = {origin: store.load(self.paper.key) for origin, store in self.stores.items()}
        current = {
            origin: [record for record in records if (record.experiment, record.version) in present]
            for origin, records in loaded.items()
        }
        return {origin: records for origin, records in current.items() if records}

    def file_of(self, record: Record) -> Path:
        """Return the file of one of its records."""
        held = self.records.items()
        origin = next(at for at, some in held if any(one is record for one in some))
        return self.stores[origin].where(record)

    @property
    def label(self) -> str:
        """Where the records come from, in one phrase."""
        places = [_label_of(device, profile) for device, profile in reversed(self.records)]
        return "; ".join(places) or "no records yet"


def _label_of(device: str, profile: str) -> str:
    where = HERE if device == LOCAL else f"reference records, {device}"
    return f"{where}, profile {profile}"


def of_reference(results: Results) -> bool:
    """Whether all records are the reference's, none this machine's own."""
    return not any(HERE in place for place in results.places)


def find_source(
    paper: Paper, profile: str | None = None, device: str | None = None, local: bool = True
) -> Source:
    """Find records of a paper.

    Args:
        profile: Only this one, `long` with `quick` for artefacts that it does not run; else the
            best of each artefact.
        device: ``local``, or a folder under ``results/reference``; by default all of them.
        local: Whether this machine's own records count.
    """
    references = {
        at: store for at, store in reference_stores().items() if at[1] in COMPUTING_PROFILES
    }
    names = [LOCAL, *dict.fromkeys(name for name, _ in references)]
    if device is not None and device not in names:
        raise UsageError(f"no records of device {device!r}; choose among {', '.join(names)}")
    # A GPU's reference before a CPU's, this machine's before both.
    stores = dict(sorted(references.items(), key=lambda item: not item[0][0].startswith("cpu")))
    if local:
        stores |= {(LOCAL, name): local_store(name) for name in COMPUTING_PROFILES}
    counting = (LONG, "quick") if profile == LONG else (profile,)
    kept = {
        origin: store
        for origin, store in stores.items()
        if device in (None, origin[0]) and (profile is None or origin[1] in counting)
    }
    return Source(paper, kept, profile)


def results_of(artefact: Artefact, source: Source, changes: Choices = ()) -> Results:
    """Gather the best record of every run of an artefact, of the profile's seeds and all others.

    Of the profiles the one counts that has records of most of its runs, with two seeds or more, of
    several the most thorough one, and `smoke` after all others. A GPU's records count first, as
    those nearest the paper, once more than half of its runs have some, and some of each experiment
    with each network or task; until then they are in `Results.gpu`, beside a reference. The
    datasets are those of the records, so that an artefact is shown as it was computed, whichever
    data is at hand now.
    """
    if artefact.parts:
        parts = [source.paper.artefacts[name] for name in artefact.parts]
        return _joined({part: results_of(part, source, changes) for part in parts})
    held = {profile for _, profile in source.records}
    profiles = [name for name in COMPUTING_PROFILES if name in held]
    candidates = [
        _of_profile(artefact, source, name, changes)
        for name in profiles or [source.profile or default_profile()]
    ]
    *others, best = sorted(candidates, key=_worth)
    if not _on_a_gpu(best) and of_reference(best):  # one's own records are judged by themselves
        best.gpu = next(filter(_on_a_gpu, reversed(others)), None)
    return best


def _on_a_gpu(results: Results) -> bool:
    # Toy records show that the code runs; they hide nothing better.
    real = results.profile != "smoke"
    return real and any(record.device["type"] != "cpu" for record in results.records)


def _worth(results: Results) -> tuple[bool, bool, float, int]:
    """Order the results under several profiles."""
    present = {record.identity for record in results.records}
    seeds: dict[Run, list[bool]] = {}  # whether there is a record of each
    for run, seed in results.expected:
        if not run.extra:
            seeds.setdefault(run, []).append(run.identity(seed) in present)
    # A training is whole with two seeds.
    shares = [
        min(2, sum(here)) / (2 if run.seeds is None else min(2, len(here)))
        for run, here in seeds.items()
    ]
    share = sum(shares) / max(1, len(shares))
    # A reader misses a network of the paper's table more than a size of another.
    every = set(map(_named, seeds)) <= set(map(_named, results.records))
    first = _on_a_gpu(results) and share > 0.5 and every
    real = results.profile != "smoke" and bool(present)
    return real, first, share, COMPUTING_PROFILES.index(results.profile)


def _named(item: Run | Record) -> tuple[Any, ...]:
    return item.experiment, item.config.get("role"), item.config.get("task")


def _joined(parts: Mapping[Artefact, Results]) -> Results:
    """Return the results of several artefacts as one, under their most thorough profile."""
    profile = max((part.profile for part in parts.values()), key=COMPUTING_PROFILES.index)
    whole = Results([], (), [], profile=profile)
    for part in parts.values():
        whole.expected += part.expected
        whole.records += part.records
    whole.places = [
        f"{a.source} from {place}" for a, part in parts.items() for place in part.places
    ]
    return whole


def _of_profile(artefact: Artefact, source: Source, profile: str, changes: Choices) -> Results:
    """Gather an artefact's records of one profile, by the datasets that most of them are of."""
    held: Held = {at: own for at, own in source.records.items() if at[1] == profile}
    records = [*itertools.chain(*held.values())]
    seeds = sorted({record.seed for record in records}.union(SEEDS[profile]))

    def planned(chosen: Mapping[str, str]) -> Iterator[Run]:
        runs = artefact.runs(profile, chosen)
        if changes:  # an artefact without the key is shown as it is
            own = [c for c in changes if any(value_at(r.config, c[0]) is not ... for r in runs)]
            runs = with_changes(source.paper, runs, own)
        for run in runs:  # measurements of further processes count as well
            every = tuple(sorted({*PROCESSES, *seeds}))
            yield replace(run, seeds=every) if run.by_processes else run

    plans = [[*planned(chosen)] for chosen in _choices_of_data(source.paper, profile, records)]
    gathered = [Results(runs, seeds, records).records for runs in plans]
    wanted = {record.identity for own in gathered for record in own}
    held = _of_one_gpu(source.paper, _of_the_same_data(held, wanted), wanted)
    records = [*itertools.chain(*held.values())]  # best last
    candidates = [Results(runs, seeds, records, profile) for runs in plans]
    best = max(candidates, key=lambda results: len(results.records))

    def belongs(run: Run, seed: int) -> bool:
        fixed = PROCESSES if run.by_processes else run.seeds
        return seed in (SEEDS[profile] if fixed is None else fixed)

    # A further seed of some runs leaves no gap in the others.
    made = {record.identity for record in best.records}
    pairs = best.expected
    best.expected = [(run, n) for run, n in pairs if belongs(run, n) or run.identity(n) in made]
    shown = set(map(id, best.records))
    counts = Counter(at for at, own in held.items() for record in own if id(record) in shown)
    best.places = [_label_of(*origin) for origin, _ in counts.most_common()]
    return best


def _of_the_same_data(held: Held, wanted: Collection[str]) -> Held:
    """Leave out records of other data than most of the wanted ones: they do not compare.

    Two archives of one name may hold other images, such as compressed ones. Of data with as many
    records the last counts, this machine's before a reference's.
    """
    kinds: dict[str, dict[str, set[str]]] = {}  # identities by dataset and fingerprint
    for record in itertools.chain(*held.values()):
        if record.dataset and record.status == "ok" and record.identity in wanted:
            of = kinds.setdefault(_dataset(record), {})
            of.setdefault(record.dataset["fingerprint"], set()).add(record.identity)
    chosen = {name: max(reversed(of), key=lambda n: len(of[n])) for name, of in kinds.items()}

    def counts(record: Record) -> bool:
        own = record.dataset and record.dataset["fingerprint"]
        return not own or chosen.get(_dataset(record), own) == own

    return {at: [*filter(counts, records)] for at, records in held.items()}


def _dataset(record: Record) -> str:
    return json.dumps(record.config.get("dataset"), sort_keys=True)


def _of_one_gpu(paper: Paper, held: Held, wanted: Collection[str]) -> Held:
    """Leave out what reference GPUs measured of an artefact, but for the one with most of it."""
    gpus = [at for at in held if at[0] != LOCAL and not at[0].startswith("cpu")]
    if len(gpus) < 2:
        return held
    measured = {
        at: {
            id(record)
            for record in held[at]
            if record.identity in wanted
            and paper.experiments[record.experiment].measured(record.config)
        }
        for at in gpus
    }
    dropped = set().union(*sorted(measured.values(), key=len)[:-1])
    return {at: [one for one in records if id(one) not in dropped] for at, records in held.items()}


def _choices_of_data(
    paper: Paper, profile: str, records: Sequence[Record]
) -> Iterator[dict[str, str]]:
    """Yield each choice of a dataset per task that records have, the last recorded ones first."""
    names = [r.config["dataset"]["name"] for r in records if r.config.get("dataset")]
    used = list(dict.fromkeys(reversed(names)))
    tasks = paper.datasets[profile]
    served = [
        [name for name in used if name in allowed] or [next(iter(allowed), "")]
        for allowed in tasks.values()
    ]
    for chosen in itertools.product(*served):
        yield dict(zip(tasks, chosen, strict=True))
