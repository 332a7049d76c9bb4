"""Whether a record whose code has changed since still stands: by comparison, or by replay.

First the definitions that ran are compared with those of the commit that the record was made or
last verified at: code that only moved is the same. Where they differ, the record is run again, and
all but times is compared; of a training that took longer than 20 s only the first steps, with those
that its record kept, where nothing has changed that they do not run, such as an evaluation. Where
they agree the record stands, and says by what.
"""

import math
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from repro import paths
from repro.experiments.design import Artefact, Experiment, Paper
from repro.experiments.outcome import UsageError
from repro.experiments.running import (
    code_of,
    is_current,
    load,
    noting_interrupts,
    raise_if_no_result,
)
from repro.experiments.sources import find_source, results_of
from repro.records import Record, RecordStore, commit_state, library_versions
from repro.source_code import Tree, at_commit, present

CLOSE = 1e-5  # on another kind of machine, relative
LONG_S = 20  # a training that takes longer is judged by its first steps


class Differs(Exception):
    """The present code gives something else; the text says where first."""


class CannotTell(Exception):
    """Nothing was kept that could be compared; the text says what."""


def verify(
    paper: Paper,
    artefacts: Sequence[Artefact],
    profile: str | None = None,
    device: str | None = None,
    root: str | None = None,
) -> Iterator[tuple[str, bool]]:
    """Verify the stale records of artefacts; yield a line on each, and whether it stands.

    Args:
        paper: The paper.
        artefacts: Some of its artefacts.
        profile: Only records of this one.
        device: Only records of this device; see `find_source`.
        root: Folder searched first for datasets.
    """
    source = find_source(paper, profile, device)
    for origin in source.records:
        source.stores[origin].sweep()
    stale: dict[int, Record] = {}
    stand: set[int] = set()
    for name in dict.fromkeys(origin[1] for origin in source.records):
        part = replace(source, stores={p: s for p, s in source.stores.items() if p[1] == name})
        for artefact in artefacts:
            results = results_of(artefact, part)
            stale |= {id(record): record for record in results.stale}
            stand |= {id(record) for record in results.records} - stale.keys()
    homes = {
        id(record): source.stores[origin]
        for origin, records in source.records.items()
        for record in records
    }
    for store in {homes[key].folder: homes[key] for key in stale}.values():
        store.check_writable(paper.key)  # before a training is run again in vain
    yield f"{paper.key}: {len(stand)} records stand already, {len(stale)} are stale", True
    for key, record in stale.items():
        try:
            by, first_steps = verified(paper, record, root)
        except (Differs, CannotTell) as problem:
            yield f"{_name(record)}: {_word(problem)}: {problem}", False
            continue
        _write(homes[key], paper, replace(record, first_steps=first_steps), by)
        yield f"{_name(record)}: stands, {by}", True


def _word(problem: Exception) -> str:
    return "DIFFERS" if isinstance(problem, Differs) else "cannot tell"


def _name(record: Record) -> str:
    return f"{record.paper} {record.experiment} {record.key} seed {record.seed}"


def _write(store: RecordStore, paper: Paper, record: Record, by: str) -> None:
    experiment = paper.experiments[record.experiment]
    commit, dirty = commit_state()
    entry = {
        "code": code_of(experiment, record.config),
        "entry": experiment.entry,
        "commit": commit,
        "dirty": dirty,
        "by": by,
    }
    store.write(replace(record, stands=[*record.stands, entry], schema=2))


def verified(
    paper: Paper, record: Record, root: str | None = None
) -> tuple[str, dict[str, Any] | None]:
    """Return by what a record stands under the present code, and the first steps to keep with it.

    A training that was run again whole, to the same end, leaves its first steps to a record that
    has none.

    Raises:
        Differs: It does not.
        CannotTell: Nothing can be compared.
    """
    if is_current(paper, record):
        return "its code has not changed", record.first_steps
    experiment = paper.experiments[record.experiment]
    commit = same_definitions(experiment, record)
    if commit is not None:
        return f"the definitions that run are those of commit {commit[:10]}", record.first_steps
    return replayed(experiment, record, root)


def same_definitions(experiment: Experiment, record: Record) -> str | None:
    """Return a commit at which the record's code ran and all it used is as it is now."""
    now = present()
    for commit, tree, entry in _known(record):
        same = tree.definitions(entry, record.config) == now.definitions(
            experiment.entry, record.config
        )
        if same and _other_files_agree(tree, entry, now, experiment.entry, record.config):
            return commit
    return None


def _known(record: Record) -> Iterator[tuple[str, Tree, str]]:
    """Yield the commits under whose code a record is known to stand, with its entry, last first."""
    known = [
        (record.commit, record.entry, record.code),
        *((entry["commit"], entry["entry"], entry["code"]) for entry in record.stands),
    ]
    for commit, entry, code in reversed(known):
        if commit and entry:
            with suppress(LookupError, SyntaxError):
                tree = at_commit(commit)
                # Otherwise it was made with changes that were not committed.
                if tree.hash_of(entry, record.config) == code:
                    yield commit, tree, entry


def _other_files_agree(
    then: Tree, old: str, now: Tree, new: str, config: Mapping[str, Any]
) -> bool:
    """Whether C++ is the same and every number of the paper that was there still is."""
    before, after = then.closure(old, config), now.closure(new, config)
    for file in before | after:
        if file.endswith((".cpp", ".hpp")) and (
            file not in before or file not in after or then.read(file) != now.read(file)
        ):
            return False
        if file.endswith(".toml") and file in before:
            if file not in now.files:
                return False
            old_, new_ = (tomllib.loads(tree.read(file).decode()) for tree in (then, now))
            if not _within(old_, new_):
                return False
    return True


def _within(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and _within(value, new[key]) for key, value in old.items())
    return bool(old == new)


def replayed(
    experiment: Experiment, record: Record, root: str | None
) -> tuple[str, dict[str, Any] | None]:
    """Run a record again, of a long training the first steps, and compare; see `verified`.

    Raises:
        Differs: Something else came out.
        CannotTell: The dataset or the device is not here; or something has changed that the first
            steps of a long training do not run.
    """
    took_s = datetime.fromisoformat(record.finished) - datetime.fromisoformat(record.started)
    steps = record.first_steps if took_s.total_seconds() > LONG_S else None
    again = _run_again(experiment, record, _data_of(record, root), steps is not None)
    if again.status != record.status:
        raise Differs(f"it ends {again.status}, and ended {record.status}{again.error}")
    if again.status != "ok":
        return f"run again, it ends {again.status} as before", None
    alike, kept = again.alike, record.first_steps
    if kept is not None and again.first_steps is not None:
        alike = alike and again.first_steps["instructions"] == kept["instructions"]
        _compare_steps(kept, again.first_steps, alike)
    if steps is None:
        closeness = 0.0 if alike else CLOSE
        compare("metrics", record.metrics, again.metrics, closeness)
        compare("peak_bytes", record.peak_bytes, again.peak_bytes, closeness)
        by = f"run again whole, {_how(alike)}{', times aside' * bool(record.timings)}"
        return by, kept or (again.first_steps if alike else None)
    count = len(steps["losses"])
    if again.first_steps is None:
        raise Differs(f"the training ends before step {count}")
    if unseen := _unseen(experiment, record, again.executed):
        raise CannotTell(
            f"its first {count} steps are the same, but do not run {', '.join(unseen)}, which "
            "changed; run it again"
        )
    return f"its first {count} steps run again, {_how(alike)}", steps


def _compare_steps(before: Mapping[str, Any], after: Mapping[str, Any], alike: bool) -> None:
    closeness = 0.0 if alike else CLOSE
    pairs = list(zip(before["losses"], after["losses"], strict=True))
    for number, (one, other) in enumerate(pairs, 1):
        compare(f"step {number}, loss", one, other, closeness)
    compare(f"weights after step {len(pairs)}, norm", before["norm"], after["norm"], closeness)
    if alike and after["digest"] != before["digest"]:
        raise Differs(f"the weights after step {len(pairs)} are others")


@dataclass
class _Again:
    """What became of a run that was carried out again."""

    alike: bool  # whether this kind of machine gives the same bits
    status: str = "ok"
    error: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    first_steps: dict[str, Any] | None = None
    executed: set[tuple[str, str]] = field(default_factory=set)  # file and top-level name


def _data_of(record: Record, root: str | None) -> Any:
    from repro.datasets import DatasetError

    try:
        data = load(record.config, root)
    except DatasetError as missing:
        raise CannotTell(f"its dataset is not here: {str(missing).splitlines()[0]}") from missing
    expected = record.dataset["fingerprint"] if record.dataset else None
    if (data.fingerprint if data else None) != expected:
        raise CannotTell("the dataset here is another one of the same name")
    return data


def _run_again(experiment: Experiment, record: Record, data: Any, steps_only: bool) -> _Again:
    import torch

    from repro.experiments.replay import recording
    from repro.measure import accelerator, describe_device, is_out_of_memory

    kind = record.device["type"]
    if kind not in ("cpu", accelerator.present()):
        raise CannotTell(f"it is of a device {kind!r}, and there is none here")
    again = _Again(
        describe_device(kind)["name"] == record.device["name"]
        and library_versions()["torch"] == record.versions.get("torch")
    )
    threads = torch.get_num_threads()
    if kind == "cpu" and record.device.get("threads"):
        torch.set_num_threads(record.device["threads"])
    first = None
    try:
        # Others may compute on tensors without values, whose losses cannot be noted.
        watched = recording(stop=steps_only)
        with (
            noting_interrupts() as interrupted,
            watched if experiment.trains else nullcontext() as first,
            _executed(again.executed) if steps_only else nullcontext(),
        ):
            outcome = experiment.function(record.config, record.seed, data, kind)
            again.metrics, again.peak_bytes = outcome.metrics, outcome.peak_bytes
    except Exception as problem:
        if interrupted:
            raise KeyboardInterrupt from problem
        # A training may turn whatever ends it into an error of its own.
        if not (steps_only and first is not None and first.fingerprint()):
            try:
                raise_if_no_result(problem, interrupted)
            except UsageError as reason:
                raise CannotTell(str(reason)) from problem
            again.status = "out_of_memory" if is_out_of_memory(problem) else "failed"
            again.error = f": {problem}"
    finally:
        torch.set_num_threads(threads)
    again.first_steps = first.fingerprint() if first is not None else None
    return again


@contextmanager
def _executed(names: set[tuple[str, str]]) -> Iterator[None]:
    """Note the functions of this package that run: their file and their name at its top level."""
    root = f"{paths.PACKAGE.parent}{os.sep}"

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            file = Path(code.co_filename).relative_to(paths.PACKAGE.parent).as_posix()
            names.add((file, code.co_qualname.partition(".")[0]))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _unseen(experiment: Experiment, record: Record, executed: set[tuple[str, str]]) -> list[str]:
    """Return what has changed since the record's commit, and was not run; none for no commit."""
    for _, tree, entry in _known(record):
        before = tree.reached(entry, record.config)
        after = present().reached(experiment.entry, record.config)
        texts = {text.rpartition("\n")[0] for text in before}
        changed = {where for text, where in after.items() if text.rpartition("\n")[0] not in texts}
        return sorted(f"{file}:{name}" for file, name in changed - executed if name)
    return []


def _how(alike: bool) -> str:
    return "to the bit" if alike else f"to {CLOSE:g}, on another kind of machine"


def compare(name: str, before: Any, after: Any, closeness: float) -> None:
    """Compare values to a relative closeness; times, whose names end in ``_s``, do not count.

    Raises:
        Differs: They differ; the first place is named.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            one, other = before.get(key), after.get(key)
            if not key.endswith("_s") or isinstance(one, Mapping) or isinstance(other, Mapping):
                compare(f"{name}, {key}", one, other, closeness)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            raise Differs(f"{name}: {len(after)} values for {len(before)}")
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            compare(f"{name}[{index}]", one, other, closeness)
    elif isinstance(before, float) and isinstance(after, float | int):
        both_nan = math.isnan(before) and math.isnan(after)
        if not both_nan and not math.isclose(before, after, rel_tol=closeness, abs_tol=0.0):
            raise Differs(f"{name}: {after!r} for {before!r}")
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        raise Differs(f"{name}: {after!r} for {before!r}")
