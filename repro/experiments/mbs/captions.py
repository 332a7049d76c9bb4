"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable, Sequence

from repro.experiments.design import Results
from repro.experiments.mbs.grids import ROLES

MIB = 2**20


def caption(lead: str) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves."""

    def complete(results: Results) -> str:
        return " ".join([lead, *_facts(results)])

    return complete


def _facts(results: Results) -> Iterable[str]:
    records = results.records
    if not records:
        yield "Not run yet."
        return
    devices = sorted({record.device["name"] for record in records})
    yield f"Measured on {', '.join(devices)}."
    sets = {r.dataset["provenance"]: r.dataset for r in records if r.dataset}
    for provenance, facts in sets.items():
        synthetic = "SYNTHETIC data, " if facts["kind"] == "synthetic" else ""
        yield f"Data: {synthetic}{facts['name']}: {provenance.rstrip('.')}."
    models = {
        (role, _model(r.config["model"])): None
        for role in ROLES
        for r in records
        if r.config["role"] == role
    }
    yield f"Models: {', '.join(f'{role} is {model}' for role, model in models)}."
    trained = [r for r in records if r.experiment == "train"]
    trainings = {(r.config["train_samples"], r.config["epochs"]) for r in trained}
    extents = [
        f"{'all' if samples is None else f'{samples:,}'} training samples, {epochs} epochs"
        for samples, epochs in sorted(trainings, key=str)
    ]
    if extents:
        yield f"An epoch is {' or '.join(extents)}."
    limits = [r.metrics["limit_bytes"] for r in records if r.metrics.get("limit_bytes")]
    if limits:
        cpu = all(record.device["type"] == "cpu" for record in records)
        how = "MemoryBudget over the live tensors" if cpu else "a share of the card"
        yield (
            f"The memory limit is SIMULATED ({how}), for each model half way between the need of "
            f"the paper's initial mini-batch and of twice that ({_range_mib(limits)})."
        )
    if any(r.config.get("micro_batch") for r in records):
        yield "MBS normalises by Algorithm 1; BatchNorm sees micro-batches, as in the paper."
    if results.stale:
        yield f"{len(results.stale)} records are STALE: their code has changed since."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."


def _range_mib(sizes: Sequence[int]) -> str:
    ends = [f"{size / MIB:,.1f}" for size in (min(sizes), max(sizes))]
    return f"{' to '.join(dict.fromkeys(ends))} MiB"


def _model(model: dict[str, object]) -> str:
    options = ", ".join(f"{name} {value}" for name, value in model.items() if name != "name")
    return f"{model['name']}{f' ({options})' if options else ''}"
