"""The golden rerun: records are computed again and compared, so that a changed result is noticed.

On the kind of processor that made a record, everything but times is compared to the bit. On another
kind, rounding differs and grows along a training: its plan is compared, and its first steps as far
as rounding allows; everything else completely, to 1e-5. A run of more than a minute is compared by
its first steps alone.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from repro.experiments import arguments
from repro.experiments.design import Experiment, Paper, Run, imported
from repro.experiments.one_run import carry_out, load
from repro.experiments.processes import WorkerDied, Workers, default_count
from repro.experiments.query import find_source
from repro.experiments.run import Setting, Step, seconds_of
from repro.records import Record, library_versions

CLOSE = 1e-5  # relative, on another kind of processor
# On another kind of processor a loss may differ by `EARLY`, relative, or by `GROWS` times the
# largest difference of the steps before. Without oneDNN, on one machine, the losses of 45 reference
# records differ by up to 1e-3, or 200 times that; the norm of the weights by less than the losses.
EARLY, GROWS = 1e-3, 1000.0
NOTHING = 1e-8  # absolute, on another kind of processor: errors of gradients are rounding alone
WHOLE_S = 60  # a run that took longer is compared by its first steps
FURTHER_S = 3  # a further record of an experiment is chosen only where it took at most this long


class Differs(Exception):
    """The code gives something else now; the text names the first metric that differs."""


class NotCompared(Exception):
    """Nothing could be compared; the text says why."""


def verify(
    papers: Sequence[Paper],
    everything: bool = False,
    profile: str | None = None,
    device: str | None = None,
    root: str | None = None,
) -> Iterator[tuple[str, bool | None]]:
    """Compute reference records again; yield a line on each, and whether it agrees.

    None stands for a record that could not be compared. With `everything` all records are computed
    again, and not just those of `golden`; profile and device are those of `find_source`.
    """
    chosen: list[Record] = []
    for paper in papers:
        source = find_source(paper, profile, device, local=device is not None)
        records = [record for held in source.records.values() for record in held]
        again = _here(records, root) if everything else golden(paper, records, root)
        chosen += again
        for name, experiment in paper.experiments.items():
            of_it = [record for record in records if record.experiment == name]
            if of_it and experiment.derive:
                yield _derived(experiment, of_it)
            if not any(record.experiment == name for record in again):
                absent = f"no record of its version {experiment.version}"
                why = "data or device of its records is not here" if of_it else absent
                yield f"{paper.key} {name} not compared: {why}", None
    chosen.sort(key=lambda record: -seconds_of(record))  # the longest first
    with Workers(default_count("long", "cpu")) as workers:
        function = partial(_again, {paper.key: paper for paper in papers}, root)
        try:
            for record, (text, agrees) in workers.map(function, chosen):
                yield f"{_name(record)} {text}", agrees
        except WorkerDied as died:
            yield f"{died}; the rest was not compared", False


def _here(records: Iterable[Record], root: str | None) -> list[Record]:
    """Return the records whose data and device are here."""
    from repro.measure import accelerator

    data = {*arguments.data_at_hand(root), None}
    return [
        record
        for record in records
        if record.device["type"] in ("cpu", accelerator.present())
        and (record.config.get("dataset") or {"name": None})["name"] in data
    ]


def _name(record: Record) -> str:
    return f"{record.paper} {record.experiment} {record.key} seed {record.seed}"


def golden(paper: Paper, records: Sequence[Record], root: str | None = None) -> list[Record]:
    """Return the cheapest record of each experiment, and a few more with other settings.

    Only records whose data and device are here count; those of this kind of processor come first. A
    further one took at most `FURTHER_S`, and its configuration has a text or a truth value, such as
    a strategy, that no chosen record has.
    """
    chosen: list[Record] = []
    here = [record for record in _here(records, root) if record.status == "ok"]
    for name, experiment in paper.experiments.items():
        found = [record for record in here if record.experiment == name]
        cost = {r.key: _seconds(experiment, r, records) for r in found}
        found.sort(key=lambda r: (not _is_alike(r) or cost[r.key] > WHOLE_S, cost[r.key], r.key))
        shown: set[tuple[str, Any]] = set()
        for number, record in enumerate(found):
            words = set(_words(record.config))
            if not number or (words - shown and cost[record.key] <= FURTHER_S):
                chosen.append(record)
                shown |= words
    return chosen


def _seconds(experiment: Experiment, record: Record, records: Iterable[Record]) -> float:
    if not experiment.shares:
        return seconds_of(record)
    # It took its measurements from an earlier run of the same network, which it may have to make.
    network = [record.config.get(name) for name in ("model", "batch", "image")]
    same = (r for r in records if [r.config.get(n) for n in ("model", "batch", "image")] == network)
    return max(map(seconds_of, same))


def _words(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the texts and truth values of a configuration; of a number, that it is one."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _words(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _words(part, path)
    else:
        yield path, value if value is None or isinstance(value, str | bool) else "a number"


def _derived(experiment: Experiment, records: Sequence[Record]) -> tuple[str, bool]:
    """Compute again the metrics that follow from measured ones."""
    derive, names = imported(experiment.derive), dict[str, None]()
    for record in records:
        if record.status != "ok":
            continue
        try:
            derived = json.loads(json.dumps(derive(record.config, record.metrics)))
            before = {name: record.metrics[name] for name in derived}
            compare("", before, derived, CLOSE)
        except Exception as problem:  # changed code may raise whatever it likes
            said = problem if isinstance(problem, Differs) else repr(problem)
            return f"{_name(record)} DIFFERS, derived from its measurements: {said}", False
        names |= dict.fromkeys(derived)
    text = f"{records[0].paper} {experiment.name} agrees in what follows from measurements"
    return f"{text} of {len(records)} records: {', '.join(names)}", True


def _again(
    papers: Mapping[str, Paper], root: str | None, record: Record
) -> tuple[str, bool | None]:
    try:
        return f"agrees {computed_again(papers[record.paper], record, root)}", True
    except Differs as problem:
        return f"DIFFERS: {problem}", False
    except NotCompared as problem:
        return f"not compared: {problem}", None
    except Exception as problem:  # changed code may raise whatever it likes
        return f"DIFFERS: {problem!r}", False


def computed_again(paper: Paper, record: Record, root: str | None = None) -> str:
    """Compute a record again, whose data and device are here; name the metrics that were compared.

    Raises `Differs` where something else came out, `NotCompared` where nothing can be compared.
    """
    experiment, data = paper.experiments[record.experiment], load(record.config, root)
    if (data.fingerprint if data else None) != (record.dataset or {}).get("fingerprint"):
        raise NotCompared("the data here is another set of the same name")
    alike, whole = _is_alike(record), seconds_of(record) <= WHOLE_S
    steps = None if "first_steps" in experiment.timed else record.first_steps
    if not whole and steps is None:
        raise NotCompared(f"it takes more than {WHOLE_S} s and keeps no first steps")
    again, told = _run(paper, record, root, stop=not whole), []
    if whole and again.status != record.status:
        why = f": {again.error.splitlines()[0]}" if again.error else ""
        raise Differs(f"it ends {again.status}, and ended {record.status}{why}")
    if whole and again.status != "ok":
        return f"in that it ends {again.status}"
    if steps is not None:
        told.append(_compare_steps(steps, again.first_steps, alike))
    if whole:
        drifts = experiment.trains and not alike
        before, after = (_compared(experiment, one, drifts) for one in (record, again))
        compare("", before, after, 0.0 if alike else CLOSE)
        told += before
    if not told:
        raise NotCompared("it keeps nothing but times")
    how = "to the bit" if alike else f"to {CLOSE:g} (another kind of processor)"
    return f"{how}: {', '.join(told)}"


def _compared(experiment: Experiment, record: Record, drifts: bool) -> dict[str, Any]:
    """Return the metrics to compare; of a training that drifts, those that are planned."""
    metrics = json.loads(json.dumps(record.metrics))
    planned = {name: metrics[name] for name in experiment.planned if name in metrics}
    all_else = {**({} if drifts else metrics), "peak_bytes": record.peak_bytes}
    kept = {**_without(all_else, experiment.timed), **planned}
    return {name: value for name, value in kept.items() if value not in (None, [], {})}


def _is_alike(record: Record) -> bool:
    """Whether this machine gives the same bits as the one that made a record."""
    # Kernels of an accelerator may add in another order each time.
    made = record.device["name"], record.versions.get("torch")
    return record.device["type"] == "cpu" and made == _this_cpu()


@cache
def _this_cpu() -> tuple[str, str]:
    from repro.measure import describe_device

    return describe_device("cpu")["name"], library_versions()["torch"]


def _run(paper: Paper, record: Record, root: str | None, stop: bool) -> Record:
    """Carry a run out again; with `stop` it ends with its first steps."""
    import torch

    threads, kind = torch.get_num_threads(), record.device["type"]
    if kind == "cpu" and record.device.get("threads"):
        torch.set_num_threads(record.device["threads"])
    step = Step(Run(record.experiment, record.config), record.seed, record.key)
    try:
        return carry_out(paper, step, Setting("", kind, root), stop)
    finally:
        torch.set_num_threads(threads)


def _compare_steps(before: Mapping[str, Any], after: Mapping[str, Any] | None, alike: bool) -> str:
    """Compare the losses of first steps, and the weights after them; see `EARLY` and `GROWS`."""
    count = len(before["losses"])
    if after is None:
        raise Differs(f"the training ends before step {count}")
    drift = 0.0
    for number, (one, now) in enumerate(zip(before["losses"], after["losses"], strict=True), 1):
        tolerance = 0.0 if alike else max(EARLY, GROWS * drift)
        compare(f"the loss of step {number}", one, now, tolerance)
        drift = max([drift, *(abs(b - a) / abs(a) for a, b in zip(one, now, strict=True) if a)])
    tolerance = 0.0 if alike else max(CLOSE, drift)
    compare("the norm of the weights", before["norm"], after["norm"], tolerance)
    if alike and after["digest"] != before["digest"]:
        raise Differs(f"the weights after step {count} are others")
    return f"first {count} steps" + f" to {drift:.0e}" * (not alike)


def _without(metrics: Any, timed: Sequence[str]) -> Any:
    """Return metrics without times, at any depth."""
    if isinstance(metrics, Mapping):
        return {
            name: _without(value, timed)
            for name, value in metrics.items()
            if not name.endswith("_s") and name not in timed
        }
    if isinstance(metrics, list | tuple):
        return [_without(value, timed) for value in metrics]
    return metrics


def compare(name: str, before: Any, after: Any, closeness: float) -> None:
    """Compare values, floating-point numbers to a relative closeness; `Differs` names the place."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            if key not in before or key not in after:
                raise Differs(f"{name} {key} is {'new' if key in after else 'gone'}".strip())
            compare(f"{name}.{key}" if name else key, before[key], after[key], closeness)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            raise Differs(f"{name} has {len(after)} values, and had {len(before)}")
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            compare(f"{name}[{index}]", one, other, closeness)
    elif isinstance(before, float) and isinstance(after, float | int):
        both_nan = math.isnan(before) and math.isnan(after)
        nothing = NOTHING if closeness else 0.0
        if not both_nan and not math.isclose(before, after, rel_tol=closeness, abs_tol=nothing):
            raise Differs(f"{name} is {after!r}, and was {before!r}")
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        raise Differs(f"{name} is {after!r}, and was {before!r}")
