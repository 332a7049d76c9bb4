"""Where the records of an artefact come from: this machine, or the reference of a device."""

from dataclasses import dataclass

from repro.experiments.design import COMPUTING_PROFILES, SEEDS, Artefact, Paper, Results
from repro.experiments.running import UsageError, code_of, default_profile, with_engine
from repro.records import Record, RecordStore, local_store, reference_stores


@dataclass(frozen=True)
class Source:
    """Where records come from: this machine, or a device whose records ship with the project."""

    device: str
    profile: str
    store: RecordStore

    @property
    def label(self) -> str:
        """One phrase for captions."""
        where = "this machine" if self.device == "local" else f"reference records, {self.device}"
        return f"{where}, profile {self.profile}"


def find_source(
    paper: Paper, profile: str | None = None, device: str | None = None, local: bool = True
) -> Source:
    """Find records of a paper.

    Args:
        paper: The paper.
        profile: Only this profile; by default the most thorough one that has records.
        device: ``local``, or a folder under ``results/reference``; by default this machine's own
            records where there are any, then the reference of a GPU, then of a CPU, and
            ``smoke`` records after all others.
        local: Whether this machine's own records count.

    Raises:
        UsageError: There is no such device folder.
    """
    own = [Source("local", name, local_store(name)) for name in COMPUTING_PROFILES]
    reference = [
        Source(device_name, name, store)
        for (device_name, name), store in reference_stores().items()
        if name in COMPUTING_PROFILES
    ]
    names = ["local", *dict.fromkeys(source.device for source in reference)]
    if device is not None and device not in names:
        raise UsageError(f"no records of device {device!r}; choose among {', '.join(names)}")

    def rank(source: Source) -> tuple[bool, bool, bool, int]:
        thorough = COMPUTING_PROFILES.index(source.profile)
        # Toy records show that the code runs; they hide nothing better.
        toy = source.profile == "smoke"
        return toy, source.device != "local", source.device.startswith("cpu"), -thorough

    candidates = [
        source
        for source in sorted(own + reference, key=rank)
        if device in (None, source.device)
        and profile in (None, source.profile)
        and (local or source.device != "local")
    ]
    filled = [s for s in candidates if any((s.store.folder / paper.key).glob("*.json"))]
    if filled:
        return filled[0]
    fallback = profile or default_profile()
    return Source("local", fallback, local_store(fallback))


def results_of(
    paper: Paper,
    artefact: Artefact,
    source: Source,
    seeds: tuple[int, ...] | None = None,
    engine: str | None = None,
) -> Results:
    """Gather the records of an artefact; `engine` asks for those of another engine.

    The datasets are those of the latest records, so that an artefact is shown as it was computed
    whatever data is at hand now.
    """
    records = source.store.load(paper.key)  # oldest first
    # One table never mixes devices: where this machine has records of several, the last counts.
    records = [r for r in records if r.device["name"] == records[-1].device["name"]]
    used = [r.config["dataset"]["name"] for r in records if r.config.get("dataset")]
    chosen = {}
    for task, names in paper.datasets[source.profile].items():
        serving = [name for name in used if name in (*names, "synthetic")]
        chosen[task] = serving[-1] if serving else next(iter(names), "")

    def is_current(record: Record) -> bool:
        experiment = paper.experiments.get(record.experiment)
        return experiment is not None and record.code == code_of(experiment, record.config)

    runs = artefact.runs(source.profile, chosen)
    if any("engine" in run.config for run in runs):
        runs = with_engine(runs, engine)
    if seeds is None:
        # Whoever asked for further seeds sees them.
        seeds = tuple(sorted({record.seed for record in records}.union(SEEDS[source.profile])))
    return Results(runs, seeds, records, is_current)
