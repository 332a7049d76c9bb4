"""What captions of all papers say in the same words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from repro.records import Record, identity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from repro.experiments.design import Results, Run


def caption(lead: str, facts: Callable[[Results], Iterable[str]]) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves.

    Args:
        lead: What the table or figure shows.
        facts: Yields the paper's own sentences on its records; not asked where there are none.
    """

    def complete(results: Results) -> str:
        if not results.records:
            return f"{lead} Not run yet."
        return " ".join([lead, *facts(results), *shortcomings(results)])

    return complete


WARNINGS = ("SIMULATED", "ESTIMATED", "STAND-IN", "SYNTHETIC")


def signature(results: Results, said: str) -> str:
    """Return whose numbers a figure shows, for the image itself.

    Args:
        results: That it is drawn from.
        said: Its caption, whose words in capitals come along.
    """
    records = _drawn(results, results.records)
    parts = [f"Ours: {devices(records)}", f"profile {results.profile}"]
    parts += sorted({record.dataset["name"] for record in records if record.dataset})
    trained = [record for record in records if isinstance(record.config.get("epochs"), int)]
    if trained:
        ends = any(record.config.get("stop") for record in trained)
        span = _span({record.config["epochs"] for record in trained}, "epoch")
        parts.append(f"{'at most ' * ends}{span}")
    parts.append(_repeated(results, records))
    parts += [word for word in WARNINGS if word in said]
    return " · ".join(parts)


def _drawn(results: Results, records: Sequence[Record]) -> list[Record]:
    """Return the records but for those of runs beside the others, which no figure draws."""
    beside = _identities(results, lambda run: run.beside)
    return [record for record in records if record.identity not in beside]


def _identities(results: Results, of: Callable[[Run], bool]) -> set[str]:
    return {identity(r.experiment, r.config, seed) for r, seed in results.expected if of(r)}


def _repeated(results: Results, records: Sequence[Record]) -> str:
    """Return how often each thing was trained, and by how many processes measured."""
    by_processes = _identities(results, lambda run: run.by_processes)
    # What ends for want of memory, or is the same every time, is not repeated.
    once = _identities(results, lambda run: run.seeds is not None and len(run.seeds) == 1)
    repeated = [r for r in records if r.status == "ok" and r.identity not in once]
    records = repeated or records
    # A measurement that starts its processes itself has a list of samples from each.
    own = {len(samples) for record in records if (samples := record.metrics.get("samples_s"))}
    trained: list[Record] = []
    measured = list(records)
    if any(run.seeds is None for run, _ in results.expected) or not (by_processes or own):
        trained = [record for record in records if record.identity not in by_processes]
        measured = [record for record in records if record.identity in by_processes]
        own = set()
    said = [_span(_repetitions(trained), "seed")] if trained else []
    if measured:
        counts = _repetitions(measured)
        counts = counts if max(counts) > max(own, default=0) else own
        # Processes that share a step are no repetitions of it.
        launches = not own and all(r.config.get("processes", 1) > 1 for r in measured)
        said.append(_span(counts, "launch" if launches else "process", "es"))
    return ", ".join(said)


def _repetitions(records: Sequence[Record]) -> set[int]:
    """Return how many records there are of one run, from the fewest to the most."""
    return set(Counter(identity(r.experiment, r.config, 0) for r in records).values())


def _span(numbers: Collection[int], what: str, plural: str = "s") -> str:
    ends = dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers)))
    return f"{' to '.join(ends)} {what}{plural * (max(numbers) > 1)}"


def device_name(record: Record) -> str:
    """Return the device that a record was made on, a CPU with the threads that it ran on."""
    name: str = record.device["name"]
    # A run may ask for threads of its own; the device's are those that the process began with.
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
        role: What the paper ran, such as ``ResNet-50``.
        ours: What ran here instead; empty where it is the same.
        data: The dataset that it ran on here; empty where there is none.
    """
    ran = f"{ours} for {role}" if ours and ours != role else role
    return f"ours: {ran}{f', {data}' if data else ''}"


def shortcomings(results: Results) -> Iterable[str]:
    """Yield a sentence for each kind of record that is lacking or failed."""
    if lacking := sum(record.status == "out_of_memory" for record in results.records):
        yield f"{lacking} runs ran out of memory."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."
