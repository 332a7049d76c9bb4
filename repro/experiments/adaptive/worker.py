"""What runs in each process under torchrun: measured steps, and a training that resumes."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    StepTiming,
    join_processes,
    leave_processes,
    load_checkpoint,
    make_buckets,
    measure_messages,
    save_checkpoint,
)
from repro.datasets import ImageData
from repro.experiments import load_paper
from repro.experiments.adaptive import building, grids
from repro.experiments.adaptive.building import Config
from repro.experiments.design import Outcome
from repro.experiments.running import UsageError, choose_datasets
from repro.measure import describe_device

TIMEOUT_S = 120.0
ALONE_S = 1800.0  # in which one process measures by itself


def parallel(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Measure training steps of one and of several processes on this machine's CPU (Figure 9)."""
    found = launch({**config, "seed": seed}, config["processes"])
    return Outcome({"tasks": found, "device": describe_device("cpu")["name"]})


def launch(job: Config, processes: int, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run `measure` under torchrun and return what rank 0 wrote.

    Raises:
        RuntimeError: A process failed, or the time is over; the text is the end of what torchrun
            told, which names the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "job.json", Path(folder) / "found.json"
        asked.write_text(json.dumps(job))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={processes}", "-m", __name__, str(asked),
                   str(found)]  # fmt: skip
        # One thread a process, as torchrun has it where nothing else is said.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
            try:
                _, told = run.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                run.terminate()  # and it ends the processes that it started
                _, told = run.communicate()
                told += f"\nended after {timeout_s:g} s"
        if run.returncode:
            raise RuntimeError(
                f"{processes} processes ended with {run.returncode}:\n{told[-2000:]}"
            )
        outcome: dict[str, Any] = json.loads(found.read_text())
        return outcome


def measure(config: Config) -> dict[str, Any]:
    """Measure steps in this process alone, then with the others; return what rank 0 found.

    Images are random numbers. What is compared is measured in turns.
    """
    ways = config["averaging"]
    torch.set_num_threads(1)
    common = {name: value for name, value in config.items() if name != "jobs"}
    jobs = {task: {**common, **job} for task, job in config["jobs"].items()}
    first = os.environ["RANK"] == "0"
    alone = {task: _steps(job, ["none"]) if first else [] for task, job in jobs.items()}
    rank, processes = join_processes("cpu", ALONE_S)  # the others wait for the first
    messages = {
        way: measure_messages(config["messages"], way, repeats=config["repeats"]) for way in ways
    }
    found = {}
    for task, job in jobs.items():
        model = building.build_model(job, 10, "cpu")
        size = sum(p.nbytes for p in model.parameters())
        found[task] = {
            "processes": processes,
            "steps": alone[task] + _steps(job, ways),
            "messages": messages,
            "difference": _weights(job),
            "gradient_bytes": size,
            "buckets": len(make_buckets(model, processes, config["bucket_bytes"])),
        }
    leave_processes()
    return {} if rank else found


def _batch(job: Config, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, *job["input"], generator=generator)
    if job["target"] is None:
        targets = torch.randint(10, (size,), generator=generator)
    else:
        targets = torch.rand(size, *job["target"], generator=generator)
    return inputs, targets


def _trainer(job: Config, way: str) -> DataParallel:
    torch.manual_seed(job["seed"])
    model = building.build_model(job, 10, "cpu").train()
    return DataParallel(
        model, building.loss_of(job), building.build_optimizer(job, model),
        "allreduce" if way == "none" else way,  # type: ignore[arg-type]
        bucket_bytes=job["bucket_bytes"], timeout_s=TIMEOUT_S,
    )  # fmt: skip


def _steps(job: Config, ways: list[str]) -> list[dict[str, Any]]:
    """Time steps of every batch size and way of averaging, in turns; medians over the repeats."""
    kinds = ("total_s", "computation_s", "communication_s", "summation_s", "blocked_s")
    found = []
    trainers = {way: _trainer(job, way) for way in ways}
    for size in job["sizes"]:
        batch = _batch(job, size, job["seed"])
        samples: dict[str, list[StepTiming]] = {way: [] for way in ways}
        for turn in range(job["warmup"] + job["repeats"]):
            for way in ways if turn % 2 == 0 else reversed(ways):
                trainer = trainers[way]
                trainer.timings.clear()
                for _ in range(4):  # in a row, as in training: the next forward pass hides some
                    trainer.step(*batch)
                trainer.finish()
                if turn >= job["warmup"]:
                    samples[way].append(_mean(trainer.timings))
        found += [
            {"batch": size, "processes": trainers[way].processes, "averaging": way}
            | {kind: statistics.median(getattr(t, kind) for t in timings) for kind in kinds}
            | {"samples_s": [timing.total_s for timing in timings]}
            for way, timings in samples.items()
        ]
    for trainer in trainers.values():
        trainer.close()
    return found


def _mean(timings: list[StepTiming]) -> StepTiming:
    names = ("total_s", "communication_s", "summation_s", "blocked_s")
    return StepTiming(*(statistics.fmean(getattr(t, name) for t in timings) for name in names))


def _weights(job: Config) -> float:
    """Return the largest difference between weights trained by the ways, with a growing batch."""
    found = []
    for way in job["averaging"]:
        trainer = _trainer(job, way)
        for number, size in enumerate(job["sizes"]):
            trainer.step(*_batch(job, size, number))
            trainer.step(*_batch(job, size, number + 100))
        trainer.close()
        found.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    return max(float((weights - found[0]).abs().max()) for weights in found)


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
        config: Of a training, as `grids.training` makes it.
        data: Its dataset.
        averaging: One of `repro.adaptive.METHODS`.
        seed: Of the training.
        device: ``cpu``, or ``cuda`` with a GPU for each process.
        checkpoint: File that rank 0 writes after each epoch, and all read at the start.
        micro_batch: Most samples that a process computes at a time.
        timeout_s: After which a process that does not answer counts as lost.
        report: Told one line per epoch, in rank 0.

    Returns:
        The history of the training, and of each epoch the seconds by kind.

    Raises:
        PeerError: Another process was lost.
        UsageError: The checkpoint is of another training.
    """
    from repro.experiments.adaptive.runs import Training

    rank, processes = join_processes(device, timeout_s)
    run = Training.start(config, seed, data, device)
    trainer = DataParallel(
        run.model, building.loss_of(config), run.optimizer, averaging,  # type: ignore[arg-type]
        micro_batch=micro_batch, timeout_s=timeout_s,
    )  # fmt: skip
    path = Path(checkpoint) if checkpoint else None
    identity = json.dumps({"config": dict(config), "seed": seed, "data": data.fingerprint})
    how = {"averaging": averaging, "processes": processes, "micro_batch": micro_batch}
    spent: list[dict[str, float]] = []
    going = True
    # The first process reads for all, whose disks may be others.
    saved = [load_checkpoint(path) if path is not None and rank == 0 and path.exists() else None]
    if processes > 1:
        torch.distributed.broadcast_object_list(saved, 0)
    if saved[0] is not None:
        going = _resume(run, saved[0], identity, checkpoint, spent)
        if rank == 0:
            changed = {name: was for name, was in saved[0]["how"].items() if how[name] != was}
            note = f"; NOT EXACTLY, it was trained with {changed}" if changed else ""
            report(f"going on after epoch {run.setting.epoch - 1} from {path}{note}")
            if not going:
                report("which is complete: nothing is left to train")

    def ended() -> None:
        trainer.average_buffers()

    while going:
        trainer.timings.clear()
        going = run.epoch(trainer.step, device, trainer.mean, ended)
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
        told = ", ".join(
            f"{name} {was.get(name)!r}, here {now.get(name)!r}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        )
        raise UsageError(
            f"{path} is the checkpoint of another training ({told}); give its options, or another "
            "path"
        )
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.controller.load_state_dict(saved["controller"])
    if run.stop is not None:
        run.stop.load_state_dict(saved["stop"])
    run.history, run.diverged, run.setting = (
        saved["history"], saved["diverged"], run.controller.setting,
    )  # fmt: skip
    spent += saved["spent"]
    return bool(saved["going"])


def run_parallel(
    task: str, strategy: str, averaging: str, profile: str, device: str, root: str | None,
    wanted: Sequence[str], seed: int, epochs: int | None, checkpoint: str | None,
    micro_batch: int | None,
) -> None:  # fmt: skip
    """Carry out the command ``parallel``: a training of the paper in all processes of torchrun.

    Raises:
        UsageError: An option is not one of its choices, or another process was lost.
    """
    for name, value, allowed in (
        ("task", task, grids.TASKS),
        ("strategy", strategy, (*grids.STRATEGIES, "noise")),
        ("averaging", averaging, METHODS),
    ):
        if value not in allowed:
            raise UsageError(f"unknown {name} {value!r}; choose {', '.join(allowed)}")
    if seed < 0:
        raise UsageError(f"seed is {seed}; give at least 0")
    for name, number in (("epochs", epochs), ("micro-batch", micro_batch)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}; give at least 1")
    chosen = choose_datasets(load_paper("adaptive"), profile, wanted, root)
    config = dict(grids.training(profile, task, chosen, strategy).config)
    config |= {"epochs": epochs} if epochs else {}
    options = dict(config["dataset"])
    data = datasets.load(options.pop("name"), root, **options)
    try:
        record(train_in_parallel)(
            config, data, averaging, seed=seed, device=device, checkpoint=checkpoint,
            micro_batch=micro_batch, report=lambda line: print(line, flush=True),
        )  # fmt: skip
    except (PeerError, CheckpointError) as error:
        raise UsageError(str(error)) from error


@record
def main() -> None:
    """Measure what the first argument's file asks for; rank 0 writes the second."""
    asked, found = sys.argv[1:]
    outcome = measure(json.loads(Path(asked).read_text()))
    if outcome:
        Path(found).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
