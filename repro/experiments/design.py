"""What an experiment, an artefact and a claim are."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.measure import Timing
from repro.records import Record, identity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


COMPUTING_PROFILES = ("smoke", "quick", "gpu", "paper")
PROFILES = ("view", *COMPUTING_PROFILES)
SEEDS = {"smoke": (0,), "quick": (0, 1, 2), "gpu": (0, 1, 2), "paper": (0, 1, 2)}


@dataclass(frozen=True)
class Outcome:
    """What an experiment's function returns: the measured part of a record."""

    metrics: dict[str, Any]
    timings: dict[str, Timing] = field(default_factory=dict)
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Experiment:
    """Something that can be run with a configuration and a seed.

    Attributes:
        name: Unique within its paper.
        function: Called with (config, seed, data, device); `data` is the loaded
            ``config["dataset"]``, `ImageData` or `EpochTimes`, None where there is none.
        modules: Names the modules of this package whose source the result depends on, given a
            configuration. A test runs the experiment and compares.
        measures: Whether the result is a time or a memory size, and so belongs to a device.
    """

    name: str
    function: Callable[[Mapping[str, Any], int, Any, str], Outcome]
    modules: Callable[[Mapping[str, Any]], Sequence[str]]
    measures: bool = True


@dataclass(frozen=True)
class Run:
    """One configuration of an experiment; `seeds` None for the profile's."""

    experiment: str
    config: dict[str, Any]
    seeds: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash(identity(self.experiment, self.config, 0))


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds here, and the numbers behind the word."""

    word: str
    evidence: str

    WORDS = ("reproduced", "partly", "not reproduced", "not run")

    def __post_init__(self) -> None:
        if self.word not in self.WORDS:
            raise ValueError(f"verdict is {self.word!r}; allowed are {', '.join(self.WORDS)}")


Part = tuple[str, str]  # a word of Verdict.WORDS, and its evidence


def combine(parts: Sequence[Part]) -> Verdict:
    """Join the verdicts on several parts of a claim: all, some or none reproduced."""
    words = [word for word, _ in parts if word != "not run"]
    evidence = "; ".join(text for _, text in parts)
    if not words:
        return Verdict("not run", evidence or "no records")
    if all(word == "reproduced" for word in words):
        whole = len(words) == len(parts)
        return Verdict("reproduced" if whole else "partly", evidence)
    if all(word == "not reproduced" for word in words):
        return Verdict("not reproduced", evidence)
    return Verdict("partly", evidence)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and the check that says whether it holds in the records."""

    text: str
    source: str
    check: Callable[["Results"], Verdict]


class Results:
    """The records of one artefact: those of its runs, one per configuration and seed.

    Args:
        runs: The artefact's runs.
        seeds: The profile's seeds.
        records: Candidates; of several with the same configuration and seed the current ones
            count before stale ones, later before earlier.
        is_current: Whether a record's code is the present one.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        seeds: Sequence[int],
        records: Sequence[Record],
        is_current: Callable[[Record], bool] = lambda record: True,
    ) -> None:
        self.expected = [
            (run, seed) for run in runs for seed in (run.seeds if run.seeds is not None else seeds)
        ]
        wanted = {identity(run.experiment, run.config, seed) for run, seed in self.expected}
        chosen: dict[str, Record] = {}
        stale: dict[str, Record] = {}
        for record in records:
            if record.identity in wanted:
                (chosen if is_current(record) else stale)[record.identity] = record
        self.stale = [record for key, record in stale.items() if key not in chosen]
        self.records = [*chosen.values(), *self.stale]

    def select(self, experiment: str, **config: Any) -> list[Record]:
        """Return the records of an experiment whose configuration has these values, by seed."""
        matching = [
            record
            for record in self.records
            if record.experiment == experiment
            and all(record.config.get(name) == value for name, value in config.items())
        ]
        return sorted(matching, key=lambda record: record.seed)

    @property
    def missing(self) -> int:
        """How many runs have no record."""
        return len(self.expected) - len(self.records)

    @property
    def failed(self) -> list[Record]:
        """The records whose run ended in an error other than out-of-memory."""
        return [record for record in self.records if record.status == "failed"]


@dataclass(frozen=True)
class Artefact:
    """One table or figure of a paper.

    Attributes:
        name: Such as ``table4``.
        title: One line.
        source: Where in the paper.
        runs: The runs it draws from, given a profile and the dataset chosen for each task.
        table: Turns results into a data frame, the paper's values beside ours.
        caption: Says what the numbers are, naming stand-in or synthetic data and simulated limits.
        claims: What the paper says about it.
        figure: Turns results into a figure.
    """

    name: str
    title: str
    source: str
    runs: Callable[[str, Mapping[str, str]], list[Run]]
    table: Callable[[Results], "pd.DataFrame"]
    caption: Callable[[Results], str]
    claims: tuple[Claim, ...] = ()
    figure: Callable[[Results], "Figure"] | None = None


@dataclass(frozen=True)
class Paper:
    """A paper: its experiments, its artefacts and the data they may use.

    Attributes:
        key: Such as ``mbs``.
        title: The method's name.
        citation: One line.
        notebook: Name of its notebook, without ending.
        experiments: By name.
        artefacts: By name, in the paper's order.
        datasets: For each profile and task, the datasets that serve, best first; the last one is
            embedded or generated, so that one is always there.
    """

    key: str
    title: str
    citation: str
    notebook: str
    experiments: Mapping[str, Experiment]
    artefacts: Mapping[str, Artefact]
    datasets: Mapping[str, Mapping[str, Sequence[str]]]


@cache
def reported(paper: str) -> dict[str, Any]:
    """Return the numbers that a paper reports, from ``reported/PAPER.toml``."""
    path = paths.PACKAGE / "experiments" / "reported" / f"{paper}.toml"
    return tomllib.loads(path.read_text())
