"""Captions, titles of panels and signatures of figures, the same for all papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from repro import report
from repro.records import Record, identity

Artefact = Any  # of `design`, which imports this module
Results = Any  # of `query`, likewise

MARKS = ("SIMULATED", "ESTIMATED", "STAND-IN", "SYNTHETIC")


def full_caption(artefact: Artefact, results: Results) -> str:
    """Return an artefact's caption, and which machine and profile its rows are of."""
    shown = f" Shown: {'; '.join(results.places)}." if results.places else ""
    return report.printable(artefact.caption(results) + shown)  # it quotes records


def signature(results: Results, said: str) -> str:
    """Return the line in a figure that names devices, profile, data and n of its records.

    Args:
        results: That it is drawn from.
        said: Its caption, of which the `MARKS` are repeated.
    """
    records = results.records
    parts = [f"Ours: {devices(records)}", f"profile {results.profile}"]
    parts += sorted({record.dataset["name"] for record in records if record.dataset})
    trained = [record for record in records if isinstance(record.config.get("epochs"), int)]
    if trained:
        most = "at most " * any(record.config.get("stop") for record in trained)
        parts.append(f"{most}{_span({record.config['epochs'] for record in trained})} epochs")
    # Runs planned once, such as those that run out of memory, do not count, nor do extra seeds.
    once = {
        run.identity(seed)
        for run, seed in results.expected
        if run.extra or (run.seeds is not None and len(run.seeds) == 1)
    }
    repeated = [r for r in records if r.status == "ok" and r.identity not in once] or records
    counts = Counter(identity(record.experiment, record.config, 0) for record in repeated).values()
    # A measurement that starts its processes itself has a list of samples from each.
    own = [len(samples) for r in repeated if (samples := r.metrics.get("samples_s"))]
    parts.append(f"n = {_span(own if max(own, default=0) > max(counts) else counts)}")
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


def stand_ins(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a caption's sentence on networks and data in the place of the paper's, if any.

    Args:
        pairs: What ran and the paper's, such as ``("cifar10-jpeg", "CIFAR-10")``: a dataset is the
            paper's where its name begins so.
    """
    different = dict.fromkeys(
        f"{ours} for {paper}"
        for ours, paper in pairs
        if not (ours == paper or ours.startswith(paper.lower().replace("-", "")))
    )
    if different:
        yield f"STAND-IN: {', '.join(different)}."


def panel(role: str, ours: str = "", data: str = "") -> str:
    """Return a panel's title: the network and the data that ran here, and the paper's network.

    Args:
        role: The paper's network, such as ``ResNet-50``.
        ours: The network that ran here; empty where it is the same.
        data: The dataset that it ran on here; empty where there is none.
    """
    ran = f"{ours} for {role}" if ours and ours != role else role
    return f"ours: {ran}{f', {data}' if data else ''}"
