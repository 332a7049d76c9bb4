"""What every table and figure says of itself, whichever paper it is of."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING

from repro import report
from repro.experiments.design import UsageError
from repro.experiments.judge import NotRun
from repro.records import Record, RecordError, identity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from repro.experiments.design import Artefact
    from repro.experiments.query import Results, Source

MARKS = ("SIMULATED", "ESTIMATED", "STAND-IN", "SYNTHETIC")


def caption(lead: str, facts: Callable[[Results], Iterable[str]]) -> Callable[[Results], str]:
    """Return a function that completes `lead` by facts about the records.

    Args:
        lead: What the table or figure shows.
        facts: Yields the paper's own sentences on its records; not asked where there are none.
    """

    def complete(results: Results) -> str:
        if not results.records:
            return f"{lead} Not run yet."
        return " ".join([lead, *facts(results), *shortcomings(results)])

    return complete


def shortcomings(results: Results) -> Iterable[str]:
    """Yield a sentence for each kind of record that is missing or failed."""
    if lacking := sum(record.status == "out_of_memory" for record in results.records):
        yield f"{lacking} runs ran out of memory."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."


def full_caption(artefact: Artefact, results: Results) -> str:
    """Return an artefact's caption, and which machine and profile its rows are of."""
    shown = f" Shown: {'; '.join(results.places)}." if results.places else ""
    return report.printable(artefact.caption(results) + shown)  # it quotes records


def signature(results: Results, said: str) -> str:
    """Return the text in a figure that says whose numbers it shows.

    Args:
        results: That it is drawn from.
        said: Its caption, whose `MARKS` come along.
    """
    records = results.records
    parts = [f"Ours: {devices(records)}", f"profile {results.profile}"]
    parts += sorted({record.dataset["name"] for record in records if record.dataset})
    trained = [record for record in records if isinstance(record.config.get("epochs"), int)]
    if trained:
        most = "at most " * any(record.config.get("stop") for record in trained)
        parts.append(f"{most}{_span({record.config['epochs'] for record in trained})} epochs")
    # Runs that are planned once, such as those that run out of memory, do not count.
    once = {
        identity(run.experiment, run.config, seed)
        for run, seed in results.expected
        if run.seeds is not None and len(run.seeds) == 1
    }
    repeated = [r for r in records if r.status == "ok" and r.identity not in once] or records
    counts = Counter(identity(record.experiment, record.config, 0) for record in repeated)
    parts.append(f"n = {_span(counts.values())}")
    return " · ".join([*parts, *(word for word in MARKS if word in said)])


def _span(numbers: Collection[int]) -> str:
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


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


def panel(role: str, ours: str = "", data: str = "") -> str:
    """Return a panel's title, which says whose numbers it shows.

    Args:
        role: The paper's network, such as ``ResNet-50``.
        ours: The network that ran here; empty where it is the same.
        data: The dataset that it ran on here; empty where there is none.
    """
    ran = f"{ours} for {role}" if ours and ours != role else role
    return f"ours: {ran}{f', {data}' if data else ''}"


@contextmanager
def naming_bad_records(source: Source, artefact: Artefact, results: Results) -> Iterator[None]:
    """Name the record whose content keeps an artefact from being shown.

    Raises:
        RecordError: An artefact of this record alone fails, too.
        Exception: As it was, where no record is to blame: a defect of ours.
    """
    try:
        yield
    except _FAILURES as problem:
        if isinstance(problem, RecordError | UsageError) or _fails(artefact, results, []):
            raise
        guilty = [record for record in results.records if _fails(artefact, results, [record])]
        files = source.paths(guilty)
        if not files:
            raise
        packed = any(path.suffix == ".gz" for path in files.values())
        named = [f"{files[id(r)]}{f' (record {r.key})' * packed}" for r in guilty if id(r) in files]
        advice = "restore it from git" if packed else "move it away or delete it, then run again"
        raise RecordError(
            f"{source.paper.key}/{artefact.name} cannot be shown for what is in "
            f"{' and '.join(named[:3])} ({type(problem).__name__}: {problem}); {advice}"
        ) from problem


_FAILURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _fails(artefact: Artefact, results: Results, records: Sequence[Record]) -> bool:
    """Whether an artefact of these records alone cannot be shown."""
    part = copy(results)
    part.__dict__.pop("frame", None)
    part.records = list(records)
    try:
        with warnings.catch_warnings(action="ignore"):
            artefact.table(part)
            artefact.caption(part)
            for check in artefact.checks:
                check.row(part)
            for numbers in artefact.exhibit.claims.values():
                with suppress(NotRun):
                    numbers(part)
            if artefact.draws:
                artefact.figure(part)
    except _FAILURES:
        return True
    return False
