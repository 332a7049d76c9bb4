"""Whether a record whose code has changed since still stands: by comparison, or by replay.

First the definitions that ran are compared with those of the commit that the record was made or
last verified at: code that only moved is the same. Where they differ, the first steps of a training
are run again and compared with those that its record kept; what has no such steps is run again
whole, and all but times is compared. Where they agree the record stands, and says by what.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import Artefact, Experiment, Paper
from repro.experiments.running import code_of, is_current, load
from repro.experiments.sources import find_source, results_of
from repro.records import Record, RecordStore, commit_state, library_versions
from repro.source_code import Tree, at_commit, present

CLOSE = 1e-5  # on another kind of machine, relative


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
        device: Only records of this place; see `find_source`.
        root: Folder searched first for datasets.
    """
    source = find_source(paper, profile, device)
    stale: dict[int, Record] = {}
    stand: set[int] = set()
    for name in dict.fromkeys(place[1] for place in source.records):
        own = replace(source, stores={p: s for p, s in source.stores.items() if p[1] == name})
        for artefact in artefacts:
            results = results_of(artefact, own)
            stale |= {id(record): record for record in results.stale}
            stand |= {id(record) for record in results.records} - stale.keys()
    homes = {
        id(record): source.stores[place]
        for place, records in source.records.items()
        for record in records
    }
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
    known = [
        (record.commit, record.entry, record.code),
        *((entry["commit"], entry["entry"], entry["code"]) for entry in record.stands),
    ]
    for commit, entry, code in reversed(known):
        if not commit or not entry:
            continue
        try:
            tree = at_commit(commit)
            if tree.hash_of(entry, record.config) != code:
                continue  # made with changes that were not committed
        except (LookupError, SyntaxError):
            continue
        now = present()
        same = tree.definitions(entry, record.config) == now.definitions(
            experiment.entry, record.config
        )
        if same and _other_files_agree(tree, entry, now, experiment.entry, record.config):
            return commit
    return None


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
    """Run the first steps again, or the whole of what keeps none, and compare; see `verified`.

    Raises:
        Differs: Something else came out.
        CannotTell: The dataset is not here, or is another.
    """
    import torch

    from repro.datasets import DatasetError
    from repro.experiments.replay import recording
    from repro.measure import describe_device, is_out_of_memory

    try:
        data = load(record.config, root)
    except DatasetError as missing:
        raise CannotTell(f"its dataset is not here: {missing}") from missing
    if (data.fingerprint if data else None) != (
        record.dataset["fingerprint"] if record.dataset else None
    ):
        raise CannotTell("the dataset here is another one of the same name")
    kind = "cuda" if record.device["type"] == "cuda" else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotTell("it is of a GPU, and there is none here")
    threads = torch.get_num_threads()
    if kind == "cpu" and record.device.get("threads"):
        torch.set_num_threads(record.device["threads"])
    outcome = None
    status = "ok"
    try:
        with recording(stop=record.first_steps is not None) as first:
            outcome = experiment.function(record.config, record.seed, data, kind)
    except Exception as problem:
        status = "out_of_memory" if is_out_of_memory(problem) else "failed"
        if status != record.status:
            raise Differs(f"it ends {status}: {problem}") from problem
    finally:
        torch.set_num_threads(threads)
    if status != record.status:
        raise Differs(f"it runs to its end, and ended {record.status}")
    if status != "ok":
        return f"run again, it ends {status} as before", None
    again = first.fingerprint()
    # The same kind of machine gives the same bits.
    alike = (
        describe_device(kind)["name"] == record.device["name"]
        and library_versions()["torch"] == record.versions["torch"]
    )
    if record.first_steps is None:
        assert outcome is not None
        closeness = 0.0 if alike else CLOSE
        compare("metrics", record.metrics, outcome.metrics, closeness)
        compare("peak_bytes", record.peak_bytes, outcome.peak_bytes, closeness)
        by = f"run again whole, {_how(alike)}{', times aside' * bool(record.timings)}"
        return by, again if alike and experiment.trains else None
    if again is None:
        raise Differs(f"the training ends before step {len(record.first_steps['losses'])}")
    alike = alike and again["instructions"] == record.first_steps["instructions"]
    closeness = 0.0 if alike else CLOSE
    steps = list(zip(record.first_steps["losses"], again["losses"], strict=True))
    for number, (before, after) in enumerate(steps, 1):
        compare(f"step {number}, loss", before, after, closeness)
    compare(
        f"weights after step {len(steps)}, norm",
        record.first_steps["norm"],
        again["norm"],
        closeness,
    )
    if alike and again["digest"] != record.first_steps["digest"]:
        raise Differs(f"the weights after step {len(steps)} are others")
    return f"its first {len(steps)} steps run again, {_how(alike)}", record.first_steps


def _how(alike: bool) -> str:
    return "to the bit" if alike else f"to {CLOSE:g}, on another kind of machine"


def compare(name: str, before: Any, after: Any, closeness: float) -> None:
    """Compare values to a relative closeness; times, whose names end in ``_s``, do not count.

    Raises:
        Differs: They differ; the first place is named.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before:
            if not key.endswith("_s"):
                compare(f"{name}, {key}", before[key], after.get(key), closeness)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            raise Differs(f"{name}: {len(after)} values for {len(before)}")
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            compare(f"{name}[{place}]", one, other, closeness)
    elif isinstance(before, float) and isinstance(after, float | int):
        both_nan = math.isnan(before) and math.isnan(after)
        if not both_nan and not math.isclose(before, after, rel_tol=closeness, abs_tol=0.0):
            raise Differs(f"{name}: {after!r} for {before!r}")
    elif before != after:
        raise Differs(f"{name}: {after!r} for {before!r}")
