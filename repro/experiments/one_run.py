"""One run: its data, its function, and how it ends, as a record that is not written."""

import errno
import gc
import json
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Outcome, Paper, UsageError
from repro.records import Record, commit_state, library_versions, now

if TYPE_CHECKING:
    from repro.datasets import EpochTimes, ImageData
    from repro.experiments.run import Setting, Step

    Data = ImageData | EpochTimes

_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}


def carry_out(paper: Paper, step: "Step", setting: "Setting", stop: bool = False) -> Record:
    """Carry out one run, and return its record, which is not written.

    With `stop` a training ends with its first steps, as an error of its own perhaps.
    """
    from repro.datasets import TIMES
    from repro.experiments.replay import recording
    from repro.measure import accelerator, describe_device, is_out_of_memory
    from repro.measure.accelerator import HostMemoryError

    experiment, config = paper.experiments[step.run.experiment], step.run.config
    data = load(config, setting.root)
    started = now()
    status, error, outcome = "ok", None, Outcome({})
    with (
        noting_interrupts() as interrupted,
        # A hook would cost the time that other experiments measure.
        recording(stop) if experiment.trains else nullcontext() as first,
        algorithms_timed(config),
    ):
        try:
            outcome = experiment.function(config, step.seed, data, setting.device)
        except Exception as problem:
            raise_if_no_result(problem, interrupted)
            out_of_memory = is_out_of_memory(problem) or isinstance(problem, HostMemoryError)
            status = "out_of_memory" if out_of_memory else "failed"
            error = f"{type(problem).__name__}: {problem}"
            if status == "failed":
                error += "\n" + "".join(traceback.format_tb(problem.__traceback__)[-2:])
    if status != "ok":
        gc.collect()  # a model in a cycle with its error would take memory from the next run
    accelerator.empty_cache(setting.device)
    commit, dirty = commit_state()
    # The authors' own times are found, not chosen.
    asked_for = None if data is None or data.name == TIMES else data.name
    return Record(
        key=step.key,
        paper=paper.key,
        experiment=experiment.name,
        version=experiment.version,
        config=config,
        seed=step.seed,
        status=status,
        error=error,
        metrics=outcome.metrics,
        timings={
            name: {"samples_s": list(timing.samples_s), "warmup": timing.warmup}
            for name, timing in outcome.timings.items()
        },
        peak_bytes=outcome.peak_bytes,
        dataset=None
        if data is None
        else {
            "name": data.record_name,
            "fingerprint": data.fingerprint,
            "provenance": data.provenance,
            "kind": data.kind,
        },
        device=describe_device(setting.device),
        versions=library_versions(),
        commit=commit,
        dirty=dirty,
        started=started,
        finished=now(),
        command=setting.command(paper.key, asked_for),
        first_steps=first.entry if first is not None and (status == "ok" or stop) else None,
    )


@contextmanager
def algorithms_timed(config: Mapping[str, Any]) -> Iterator[None]:
    """Let cuDNN time its algorithms for each new shape where the configuration says so.

    Where steps are captured in a graph, this is done before.
    """
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = config.get("benchmark", before)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """Note every Ctrl-C inside: code that it ends may turn it into an error of its own."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted  # it is another thread's, or ignored
        return

    def note(number: int, frame: Any) -> Any:
        noted.append(number)
        return before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def raise_if_no_result(problem: Exception, interrupted: Sequence[int]) -> None:
    """Raise an error that is no result of a method: an interruption, a full disk, no cluster."""
    if interrupted:
        raise KeyboardInterrupt from problem
    if isinstance(problem, UsageError):
        raise problem
    if isinstance(problem, OSError) and problem.errno in _OF_THE_MACHINE:
        where = f" ({problem.filename})" if problem.filename else ""
        raise UsageError(
            f"a run was given up, for {os.strerror(problem.errno)}{where}: the records so far are "
            "kept; mend that, then run again to go on"
        ) from problem


def load(config: Mapping[str, Any], root: str | None) -> "Data | None":
    """Load the dataset that a configuration names, once in a process; None where it has none."""
    wanted = config.get("dataset")
    return None if wanted is None else _load_cached(json.dumps(wanted, sort_keys=True), root)


@cache
def _load_cached(wanted: str, root: str | None) -> "Data":
    from repro import datasets

    options = json.loads(wanted)
    if options["name"] == datasets.TIMES:
        return datasets.load_times(root)
    return datasets.load(options.pop("name"), root, **options)
