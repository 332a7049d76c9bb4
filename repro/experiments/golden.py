"""The golden rerun: records are computed again and compared, so that a changed result is noticed.

On the kind of processor that made a record, everything but times is compared to the bit. On another
kind, rounding differs and grows along a training: a training's first steps and its plan are
compared, and everything else completely, to 1e-5. A run of more than a minute is compared by its
first steps alone.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
LOOSEST = 1e-2  # a step that rounding alone moves further is not compared
EARLY = 1e-3  # relative, of a curve's first value on another kind of processor
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

    None stands for a record that could not be compared.

    Args:
        papers: Of the records.
        everything: Whether all records are computed again, and not just those of `golden`.
        profile: Only records of this one.
        device: Only records of this device folder, or ``local``; see `find_source`.
        root: Folder searched first for datasets.
    """
    chosen: list[Record] = []
    for paper in papers:
        source = find_source(paper, profile, device, local=device is not None)
        records = [record for held in source.records.values() for record in held]
        again = records if everything else golden(paper, records, root)
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


def _name(record: Record) -> str:
    return f"{record.paper} {record.experiment} {record.key} seed {record.seed}"


def golden(paper: Paper, records: Sequence[Record], root: str | None = None) -> list[Record]:
    """Return the cheapest record of each experiment, and a few more with other settings.

    Only records whose data and device are here count; those of this kind of processor come first. A
    further one took at most `FURTHER_S`, and its configuration has a text or a truth value, such as
    a strategy, that no chosen record has.
    """
    from repro.measure import accelerator

    here = set(arguments.data_at_hand(root))
    devices = ("cpu", accelerator.present())
    chosen: list[Record] = []
    for name, experiment in paper.experiments.items():
        found = [
            record
            for record in records
            if record.experiment == name
            and record.status == "ok"
            and record.device["type"] in devices
            and (not (data := record.config.get("dataset")) or data["name"] in here)
        ]
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
    """Compute a record again and name the metrics that were compared.

    Raises:
        Differs: Something else came out.
        NotCompared: Nothing can be compared; the data or the device is not here, for example.
    """
    experiment = paper.experiments[record.experiment]
    _check_data(record, root)
    alike, rounds = _is_alike(record), _device_of(record) == "cpu" and not _is_alike(record)
    steps = None if "first_steps" in experiment.timed else record.first_steps
    run = partial(_run, paper, record, root)
    how = "to the bit" if alike else f"to {CLOSE:g} (another kind of processor)"
    if seconds_of(record) > WHOLE_S:
        if steps is None:
            raise NotCompared(f"it takes more than {WHOLE_S} s and keeps no first steps")
        again = run(stop=True)
        other = _rounding_otherwise(run, stop=True) if rounds else None
        return f"{how}: {_compare_steps(steps, again, other, alike)}"
    drifts = experiment.trains and not alike

    def compared(metrics: Mapping[str, Any], peak_bytes: int | None) -> dict[str, Any]:
        planned = {name: metrics[name] for name in experiment.planned if name in metrics}
        all_else = {**({} if drifts else metrics), "peak_bytes": peak_bytes}
        kept = {**_without(all_else, experiment.timed), **planned}
        return {name: value for name, value in kept.items() if value not in (None, [], {})}

    before = compared(record.metrics, record.peak_bytes)
    if record.status == "ok" and not before and steps is None:
        raise NotCompared("it keeps nothing but times")
    again = run()
    if again.status != record.status:
        why = f": {again.error.splitlines()[0]}" if again.error else ""
        raise Differs(f"it ends {again.status}, and ended {record.status}{why}")
    if again.status != "ok":
        return f"in that it ends {again.status}"
    told = []
    if steps is not None:
        other = _rounding_otherwise(run, stop=not experiment.early) if rounds else None
        told.append(_compare_steps(steps, again, other, alike))
        for name in experiment.early if drifts else ():
            # After an epoch in which rounding had time to grow.
            one, now = record.metrics[name][0], again.metrics[name][0]
            drift = abs(now - other.metrics[name][0]) / abs(now) if other else 0.0
            compare(f"{name}[0]", one, now, max(EARLY, 10 * drift))
            told.append(f"first {name}")
    after = compared(json.loads(json.dumps(again.metrics)), again.peak_bytes)
    compare("", before, after, 0.0 if alike else CLOSE)
    return f"{how}: {', '.join([*told, *before])}"


def _is_alike(record: Record) -> bool:
    """Whether this machine gives the same bits as the one that made a record."""
    # Kernels of an accelerator may add in another order each time.
    made = record.device["name"], record.versions.get("torch")
    return _device_of(record) == "cpu" and made == _this_cpu()


@cache
def _this_cpu() -> tuple[str, str]:
    from repro.measure import describe_device

    return describe_device("cpu")["name"], library_versions()["torch"]


def _device_of(record: Record) -> str:
    from repro.measure import accelerator

    kind: str = record.device["type"]
    if kind not in ("cpu", accelerator.present()):
        raise NotCompared(f"it is of a device {kind!r}, and there is none here")
    return kind


def _check_data(record: Record, root: str | None) -> None:
    from repro.datasets import DatasetError

    try:
        data = load(record.config, root)
    except DatasetError as missing:
        raise NotCompared(f"its data is not here: {str(missing).splitlines()[0]}") from missing
    expected = record.dataset["fingerprint"] if record.dataset else None
    if (data.fingerprint if data else None) != expected:
        raise NotCompared("the data here is another set of the same name")


def _run(paper: Paper, record: Record, root: str | None, stop: bool = False) -> Record:
    """Carry a run out again; with `stop` it ends with its first steps."""
    import torch

    threads, kind = torch.get_num_threads(), _device_of(record)
    if kind == "cpu" and record.device.get("threads"):
        torch.set_num_threads(record.device["threads"])
    step = Step(Run(record.experiment, record.config), record.seed, record.key)
    try:
        return carry_out(paper, step, Setting("", kind, root), stop)
    finally:
        torch.set_num_threads(threads)


def _rounding_otherwise(run: Callable[..., Record], stop: bool) -> Record:
    """Run once more with other kernels, which round differently: without oneDNN."""
    import torch

    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        return run(stop=stop)


def _compare_steps(
    before: Mapping[str, Any], again: Record, other: Record | None, alike: bool
) -> str:
    """Compare first steps, and last the weights' norm; say which.

    On another kind of processor to 1e-5, or to ten times the difference that rounding alone makes
    here, and no more from the first step on where that is above `LOOSEST`.
    """
    count = len(before["losses"])
    if again.first_steps is None:
        raise Differs(f"the training ends before step {count}")
    names = [f"the loss of step {n}" for n in range(1, count + 1)] + ["the norm of the weights"]
    after = _flat(again.first_steps)
    rounded = _flat(other.first_steps) if other and other.first_steps else after
    compared, drift, tolerance = 0, 0.0, 0.0 if alike else CLOSE
    for name, one, now, two in zip(names, _flat(before), after, rounded, strict=False):
        pairs = zip(now, two, strict=False)
        drift = max(drift, *(abs(a - b) / abs(a) for a, b in pairs if a), 0.0)
        if 10 * drift > LOOSEST:
            break
        tolerance = max(tolerance, 10 * drift)
        compare(name, one, now, tolerance)
        compared += 1
    if not compared:
        raise NotCompared(f"rounding alone moves its first step by {drift:.0e}")
    if alike and again.first_steps["digest"] != before["digest"]:
        raise Differs(f"the weights after step {count} are others")
    return f"first {min(count, compared)} steps" + f" to {tolerance:.0e}" * (tolerance > CLOSE)


def _flat(steps: Mapping[str, Any]) -> list[list[float]]:
    """Return the losses of each step, and last the weights' norm."""
    return [*steps["losses"], [steps["norm"]]]


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
    """Compare values, floating-point numbers to a relative closeness.

    Raises:
        Differs: They differ; the first place is named.
    """
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
