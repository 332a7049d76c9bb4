"""Training steps, measured in processes of their own that are joined."""

import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro import adaptive
from repro.adaptive.averaging import Method, average, make_buckets
from repro.adaptive.processes import LOOPBACK
from repro.experiments.adaptive import building
from repro.experiments.design import Config, Outcome
from repro.measure import describe_device

TIMEOUT_S = 120.0
ALONE_S = 1800.0  # in which one process measures by itself


def parallel(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Measure training steps of one and of several processes on this machine's CPU (Figure 9)."""
    tasks = launch({**config, "seed": seed}, config["processes"])
    return Outcome({"tasks": tasks, "device": describe_device("cpu")["name"]})


def launch(
    job: Config, processes: int, timeout_s: float = 3600.0, function: Any = None
) -> dict[str, Any]:
    """Run a function of a job in joined processes, until a time limit; return rank 0's result."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answered = Path(folder) / "found.json"
        given = (function or measure, job, processes, port, answered)
        started = torch.multiprocessing.spawn(_in_rank, given, processes, join=False)
        end = time.monotonic() + timeout_s
        try:
            while not started.join(max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise RuntimeError(f"{processes} processes did not end in {timeout_s:g} s")
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        outcome: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return outcome


def _in_rank(rank: int, function: Any, job: Any, processes: int, port: int, answered: Path) -> None:
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    if found := function(job):
        answered.write_text(json.dumps(found), encoding="utf-8")


def measure(config: Config) -> dict[str, Any]:
    """Measure steps on random numbers, alone and with others; return what rank 0 found."""
    ways = config["averaging"]
    torch.set_num_threads(1)
    common = {name: value for name, value in config.items() if name != "jobs"}
    jobs = {task: {**common, **job} for task, job in config["jobs"].items()}
    first = os.environ["RANK"] == "0"
    alone = {task: _steps(job, ["none"]) if first else [] for task, job in jobs.items()}
    rank, processes = adaptive.join_processes("cpu", ALONE_S)  # the others wait for the first
    messages = {way: _messages(config["messages"], way, config["repeats"]) for way in ways}
    by_task = {}
    for task, job in jobs.items():
        model = building.build_model(job, 10, "cpu")
        size = sum(p.nbytes for p in model.parameters())
        by_task[task] = {
            "processes": processes,
            "steps": alone[task] + _steps(job, ways),
            "messages": messages,
            "difference": _weights(job),
            "gradient_bytes": size,
            "buckets": len(make_buckets(model, processes, config["bucket_bytes"])),
        }
    adaptive.leave_processes()
    return {} if rank else by_task


def _messages(sizes: list[int], way: Method, repeats: int) -> list[tuple[int, int, float]]:
    """Time the averaging of buckets by their bytes: bytes, processes, median seconds of each."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    processes, warmup = dist.get_world_size(group), 2
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for size in [*sizes] * (warmup + repeats):
        flat = torch.ones(max(1, size // 4 // processes) * processes)
        received, part = torch.empty_like(flat), flat[: len(flat) // processes].clone()
        dist.barrier(group=group)
        start = time.perf_counter()
        if way == "allreduce":
            dist.all_reduce(flat, group=group)
        else:
            average(flat, received, part, way, group)
        samples[size].append(time.perf_counter() - start)
    return [(n, processes, statistics.median(times[warmup:])) for n, times in samples.items()]


def _batch(job: Config, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, *job["input"], generator=generator)
    if job["target"] is None:
        return inputs, torch.randint(10, (size,), generator=generator)
    return inputs, torch.rand(size, *job["target"], generator=generator)


def _trainer(job: Config, way: str) -> adaptive.DataParallel:
    torch.manual_seed(job["seed"])
    model = building.build_model(job, 10, "cpu")
    averaging: Any = "allreduce" if way == "none" else way
    parts = model, building.loss_of(job), building.build_optimizer(job, model), averaging
    return adaptive.DataParallel(*parts, bucket_bytes=job["bucket_bytes"], timeout_s=TIMEOUT_S)


def _steps(job: Config, ways: list[str]) -> list[dict[str, Any]]:
    """Time steps of every batch size and way of averaging, in turns; medians over the repeats."""
    kinds = ("total_s", "computation_s", "communication_s", "summation_s", "blocked_s")
    steps, trainers = [], {way: _trainer(job, way) for way in ways}
    for size in job["sizes"]:
        batch = _batch(job, size, job["seed"])
        samples: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for turn in range(job["warmup"] + job["repeats"]):
            for way in ways if turn % 2 == 0 else reversed(ways):
                trainer = trainers[way]
                trainer.timings.clear()
                for _ in range(4):  # in a row, as in training: the next forward pass hides some
                    trainer.step(*batch)
                trainer.finish()
                times = trainer.timings
                means = {k: statistics.fmean(getattr(t, k) for t in times) for k in kinds}
                samples[way].append(means)
        for way, turns in samples.items():
            step = {"batch": size, "processes": trainers[way].processes, "averaging": way}
            timed = turns[job["warmup"] :]
            step |= {kind: statistics.median(turn[kind] for turn in timed) for kind in kinds}
            steps.append(step | {"samples_s": [turn["total_s"] for turn in timed]})
    for trainer in trainers.values():
        trainer.close()
    return steps


def _weights(job: Config) -> float:
    """Return the largest difference between weights trained by the ways, with a growing batch."""
    trained = []
    for way in job["averaging"]:
        trainer = _trainer(job, way)
        for number, size in enumerate(job["sizes"]):
            trainer.step(*_batch(job, size, number))
            trainer.step(*_batch(job, size, number + 100))
        trainer.close()
        trained.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    return max(float((weights - trained[0]).abs().max()) for weights in trained)
