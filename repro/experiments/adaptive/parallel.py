"""The command ``parallel``: a training of the paper in all processes of torchrun, which resumes.

With ``--record`` it measures steps instead, and writes a record for Figures 7 to 9 and 11. With a
checkpoint, ``torchrun --max-restarts=3 ... -m repro parallel ... --checkpoint FILE`` starts
all processes again where one is lost, and goes on after the last epoch.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from repro import datasets
from repro.adaptive import (
    METHODS,
    CheckpointError,
    DataParallel,
    PeerError,
    join_processes,
    leave_processes,
    load_checkpoint,
    meeting_place,
    save_checkpoint,
)
from repro.adaptive.processes import with_peers
from repro.datasets import ImageData
from repro.experiments import load_paper
from repro.experiments.adaptive import building, nodes, settings, variants
from repro.experiments.adaptive.building import Config
from repro.experiments.adaptive.experiments import Training
from repro.experiments.adaptive.worker import TIMEOUT_S
from repro.experiments.arguments import choose_datasets
from repro.experiments.outcome import UsageError
from repro.experiments.running import Setting, record_of
from repro.measure import accelerator
from repro.records import local_store


def train_in_parallel(
    config: Config,
    data: ImageData,
    averaging: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    checkpoint: str | None = None,
    micro_batch: int | None = None,
    timeout_s: float = TIMEOUT_S,
    report: Any = print,
) -> dict[str, Any]:
    """Train by a strategy in all processes that torchrun started; resumes from its checkpoint.

    Args:
        config: Of a training, as `settings.training` makes it.
        data: Its dataset.
        averaging: One of `repro.adaptive.METHODS`.
        seed: Of the training.
        device: ``cpu``, or an accelerator such as ``cuda``, one for each process.
        checkpoint: File that rank 0 writes after each epoch, and all read at the start.
        micro_batch: Most samples that a process computes at a time.
        timeout_s: After which a process that does not answer counts as lost.
        report: Told one line per epoch, in rank 0.

    Returns:
        The history of the training, and of each epoch the seconds by kind.

    Raises:
        PeerError: Another process was lost. Under torchrun's ``--max-restarts`` all processes are
            then started again, and go on from the checkpoint.
        UsageError: The checkpoint is of another training.
    """
    rank, processes = join_processes(device, timeout_s)
    if processes > 1 and rank == 0:
        report(meeting_place())
    run: Training = variants.start(config, seed, data, device)
    trainer = DataParallel(
        run.model,
        building.loss_of(config),
        run.optimizer,
        averaging,  # type: ignore[arg-type]
        micro_batch=micro_batch,
        timeout_s=timeout_s,
        autocast=building.low_precision(config),
    )
    path = Path(checkpoint) if checkpoint else None
    identity = json.dumps({"config": dict(config), "seed": seed, "data": data.fingerprint})
    how = {"averaging": averaging, "processes": processes, "micro_batch": micro_batch}
    spent: list[dict[str, float]] = []
    going = True
    # The first process reads for all, whose disks may be others.
    saved = [load_checkpoint(path) if path is not None and rank == 0 and path.exists() else None]
    if processes > 1:
        with with_peers("reading the checkpoint"):
            torch.distributed.broadcast_object_list(saved, 0)
    if saved[0] is not None:
        going = _resume(run, saved[0], identity, checkpoint, spent)
        if rank == 0:
            changed = {name: was for name, was in saved[0]["how"].items() if how[name] != was}
            note = f"; NOT EXACTLY, it was trained with {changed}" if changed else ""
            report(f"going on after epoch {run.setting.epoch - 1} from {path}{note}")
            if not going:
                report("which is complete: nothing is left to train")

    step = variants.stepping(run, trainer.step)

    def ended() -> None:
        trainer.average_buffers()

    while going:
        trainer.timings.clear()
        going = run.epoch(step, device, trainer.mean, ended)
        names = ("total_s", "computation_s", "communication_s", "summation_s", "blocked_s")
        spent.append({n: sum(getattr(t, n) for t in trainer.timings) for n in names})
        if rank == 0:
            if path is not None:
                save_checkpoint(path, _state(run, identity, how, spent, going))
            if run.history["train_cost"]:
                report(_line(run, spent[-1], processes))
    trainer.close()
    leave_processes()
    return {**run.history, "diverged": run.diverged, "processes": processes, "spent": spent}


def _line(run: Any, spent: dict[str, float], processes: int) -> str:
    last = {name: values[-1] for name, values in run.history.items() if values}
    metric = building.metric_of(run.config)
    theta = "–" if last["theta"] is None else f"{last['theta']:.4g}"
    return (
        f"epoch {len(run.history['train_cost'])}: batch {last['batch_size']} on {processes} "
        f"process{'es' * (processes > 1)}, rate {last['lr']:.4g}, cost {last['train_cost']:.4f}, "
        f"θ {theta}, K {last['interval'] or '–'}, {metric} {last[metric]:.2f}, "
        f"{last['updates']} updates in {spent['total_s']:.2f} s (communication "
        f"{spent['communication_s']:.2f}, blocked {spent['blocked_s']:.2f})"
    )


def _state(
    run: Any, identity: str, how: dict[str, Any], spent: list[dict[str, float]], going: bool
) -> dict[str, Any]:
    return {
        "identity": identity,
        "how": how,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "controller": run.controller.state_dict(),
        "stop": run.stop.state_dict() if run.stop else None,
        "history": run.history,
        "spent": spent,
        "going": going,
        "diverged": run.diverged,
    }


def _resume(
    run: Any, saved: dict[str, Any], identity: str, path: str | None, spent: list[dict[str, float]]
) -> bool:
    if saved["identity"] != identity:
        was, now = json.loads(saved["identity"]), json.loads(identity)
        was, now = ({**part.pop("config"), **part} for part in (was, now))
        changes = ", ".join(
            f"{name} {was.get(name)!r}, here {now.get(name)!r}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        )
        raise UsageError(
            f"{path} is the checkpoint of another training ({changes}); give its options, or "
            "another path"
        )
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.controller.load_state_dict(saved["controller"])
    if run.stop is not None:
        run.stop.load_state_dict(saved["stop"])
    run.history, run.diverged, run.setting = (
        saved["history"],
        saved["diverged"],
        run.controller.setting,
    )
    spent += saved["spent"]
    return bool(saved["going"])


def run_parallel(
    task: str,
    strategy: str,
    averaging: str,
    profile: str,
    device: str,
    root: str | None,
    wanted: Sequence[str],
    seed: int,
    epochs: int | None,
    checkpoint: str | None,
    micro_batch: int | None,
) -> None:
    """Carry out the command ``parallel``: a training of the paper in all processes of torchrun.

    Where a process is lost, torchrun's ``--max-restarts`` starts all again, and a training with a
    checkpoint goes on from it.

    Raises:
        UsageError: An option is not one of its choices, or another process was lost.
    """
    strategies = (*settings.STRATEGIES, settings.GIVEN, settings.DECAY, "noise")
    _check_choices(task, averaging, strategy, strategies)
    if seed < 0:
        raise UsageError(f"seed is {seed}; give at least 0")
    for name, number in (("epochs", epochs), ("micro-batch", micro_batch)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}; give at least 1")
    chosen = choose_datasets(load_paper("adaptive"), profile, wanted, root)
    config = dict(settings.training(profile, task, chosen, strategy).config)
    config |= {"epochs": epochs} if epochs else {}
    options = dict(config["dataset"])
    data = datasets.load(options.pop("name"), root, **options)
    try:
        record(train_in_parallel)(
            config,
            data,
            averaging,
            seed=seed,
            device=device,
            checkpoint=checkpoint,
            micro_batch=micro_batch,
            report=lambda line: print(line, flush=True),
        )
    except (PeerError, CheckpointError) as error:
        raise UsageError(str(error)) from error


def _check_choices(task: str, averaging: str, strategy: str, strategies: Sequence[str]) -> None:
    for name, value, allowed in (
        ("task", task, settings.TASKS),
        ("strategy", strategy, strategies),
        ("averaging", averaging, METHODS),
    ):
        if value not in allowed:
            raise UsageError(f"unknown {name} {value!r}; choose {', '.join(allowed)}")


def record_steps(
    task: str, averaging: str, profile: str, device: str, micro_batch: int | None = None
) -> Path | None:
    """Carry out ``parallel --record``: measure steps in all processes, and write their record.

    Figures 7 to 9 and 11 then show it, whatever the number of processes.

    Args:
        task: Whose model at the profile's batch sizes.
        averaging: One of `repro.adaptive.METHODS`.
        profile: Whose scale.
        device: ``cpu``, or an accelerator such as ``cuda``, one for each process.
        micro_batch: Most samples that a process computes at a time.

    Returns:
        Where the record was written, in rank 0.

    Raises:
        UsageError: An option is not one of its choices, the measurement failed, or another process
            was lost.
    """
    _check_choices(task, averaging, "theta", settings.STRATEGIES)
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    accelerated = accelerator.is_accelerator(device)
    machines = -(-processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    run = settings.recorded_job(
        profile, task, averaging, processes, accelerated, micro_batch, machines
    )
    if rank:
        try:
            record(nodes.steps)(run.config, 0, None, device)
        except PeerError as error:
            raise UsageError(str(error)) from error
        return None
    store = local_store(profile)
    store.check_writable("adaptive")  # before the others are kept waiting
    made = record_of(load_paper("adaptive"), run, 0, Setting(profile, device))
    if made.status != "ok":
        raise UsageError(f"nothing was recorded, for the measurement failed: {made.error}")
    options = " ".join(map(shlex.quote, sys.argv[1:]))
    started = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', '1')} "
    started += f"--nnodes {made.metrics['machines']} -m repro {options}"
    return store.write(replace(made, command=started))
