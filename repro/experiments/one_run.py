"""One run: its data, its function, and how it ends, as a record that is not written.

The record of a training keeps its first steps, which are compared when it is computed again. While
somebody is `recording`, every optimizer tells of its steps. The training is the model that first
makes enough of them; probes of memory and warm-ups before it make two or three. Then nothing is
noted any more. Steps inside a captured graph are not seen: such a training keeps no first steps.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

from repro.console import noting_interrupts
from repro.experiments.design import Outcome, Paper, UsageError
from repro.records import Record, commit_state, library_versions, now

if TYPE_CHECKING:
    import torch

    from repro.datasets import EpochTimes, ImageData
    from repro.experiments.run import Setting, Step

    Data = ImageData | EpochTimes

STEPS = 8  # of a training, that its record keeps
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}


def carry_out(paper: Paper, step: Step, setting: Setting, stop: bool = False) -> Record:
    """Carry out one run, and return its record, which is not written.

    With `stop` a training ends with its first steps, as an error of its own perhaps.
    """
    import torch

    from repro.datasets import TIMES
    from repro.measure import accelerator, describe_device, is_out_of_memory
    from repro.measure.accelerator import HostMemoryError

    experiment, config = paper.experiments[step.run.experiment], step.run.config
    data = load(config, setting.root)
    started = now()
    status, error, outcome = "ok", None, Outcome({})
    cudnn, benchmark = torch.backends.cudnn, torch.backends.cudnn.benchmark
    # Where steps are captured in a graph, cuDNN times its algorithms before.
    cudnn.benchmark = config.get("benchmark", benchmark)
    with (
        noting_interrupts() as interrupted,
        # A hook would cost the time that other experiments measure.
        recording(stop) if experiment.trains else nullcontext() as first,
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
        finally:
            cudnn.benchmark = benchmark
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
        else {"name": data.record_name}
        | {name: getattr(data, name) for name in ("fingerprint", "provenance", "kind")},
        device=describe_device(setting.device),
        versions=library_versions(),
        commit=commit,
        dirty=dirty,
        started=started,
        finished=now(),
        command=setting.command(paper.key, asked_for),
        first_steps=first if first and (status == "ok" or stop) else None,
    )


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


def load(config: Mapping[str, Any], root: str | None) -> Data | None:
    """Load the dataset that a configuration names, once in a process; None where it has none."""
    wanted = config.get("dataset")
    return None if wanted is None else _load_cached(json.dumps(wanted, sort_keys=True), root)


@cache
def _load_cached(wanted: str, root: str | None) -> Data:
    from repro import datasets

    options = json.loads(wanted)
    if options["name"] == datasets.TIMES:
        return datasets.load_times(root)
    return datasets.load(options.pop("name"), root, **options)


class Enough(BaseException):
    """All steps that were asked for were made; not an error, and nobody's to catch."""


@contextmanager
def recording(stop: bool = False) -> Iterator[dict[str, Any]]:
    """Note the first steps of the training inside; with `stop` it ends with them.

    The record's entry is filled in: the losses that were differentiated in each step (one, or one a
    micro-batch), digest and norm of the parameters after the last one. It stays empty where no
    model made enough steps.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: dict[str, Any] = {}
    backward = torch.Tensor.backward
    pending: list[float] = []  # losses of the step under way
    # By model: a parameter, so that its address is not used again, and the losses of its steps.
    seen: dict[int, tuple[torch.Tensor, list[list[float]]]] = {}

    def watches() -> bool:
        # CUDA graphs are CUDA's alone.
        return not first and not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        )

    def noting(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if loss.numel() == 1 and not loss.is_meta and watches():
            pending.append(float(loss.detach()))
        backward(loss, *arguments, **options)

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters or not watches():
            return
        steps = seen.setdefault(id(parameters[0]), (parameters[0], []))[1]
        steps.append([*pending])
        pending.clear()
        if len(steps) == STEPS and all(steps):  # each with its loss: no graph was replayed
            first.update(_entry(parameters, steps))
            seen.clear()
            if stop:
                raise Enough

    handle = register_optimizer_step_post_hook(stepped)
    try:
        with mock.patch.object(torch.Tensor, "backward", noting), suppress(Enough):
            yield first
    finally:
        handle.remove()


def _entry(parameters: Sequence[torch.Tensor], losses: list[list[float]]) -> dict[str, Any]:
    import torch

    digest, squares = hashlib.sha256(), 0.0
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous()
        squares += float(values.double().square().sum())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return {
        "losses": losses,
        "digest": digest.hexdigest(),
        "norm": squares**0.5,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
