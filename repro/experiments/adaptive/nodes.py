"""Training steps in all processes of a job, measured: what ``parallel --record`` keeps.

Of the paper's models at a chosen scale, on random images. On a CPU the parts of a step are those
that its threads tell. On an accelerator the host's clock says nothing of them: the computation of a
process's share is timed by itself by the device's events, and so is the averaging of all gradients;
blocked is what a step takes longer than its computation.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from repro.adaptive import (
    DataParallel,
    join_processes,
    leave_processes,
    make_buckets,
    measure_messages,
    share,
)
from repro.experiments.adaptive import building
from repro.experiments.adaptive.building import Config
from repro.experiments.outcome import Outcome
from repro.measure import accelerator, synchronize

ALONE_S = 3600.0  # in which the first process measures by itself, while the others wait for it
CLASSES = 10


def steps(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Measure steps of one process, then of all; every process that torchrun started calls it.

    Returns:
        Seconds of each batch size's step and its parts, medians over turns and every turn; of
        messages; the number of processes, and on how many machines.

    Raises:
        PeerError: Another process was lost.
    """
    rank = int(os.environ.get("RANK", 0))
    alone = _steps(config, seed, device, ["none"]) if rank == 0 else []
    _, processes = join_processes(device, ALONE_S)
    way = config["averaging"]
    together, messages = [], []
    model = building.build_model(config, CLASSES, "cpu")
    size = sum(p.nbytes for p in model.parameters())
    buckets = len(make_buckets(model, processes, config["bucket_bytes"]))
    if processes > 1:
        each = 4 * max(1, size // buckets // 4)
        wanted = sorted({*config["messages"], each})
        messages = measure_messages(wanted, way, repeats=config["repeats"], device=device)
        averaging_s = buckets * next(s for nbytes, _, s in messages if nbytes == each)
        together = _steps(config, seed, device, [way], averaging_s)
        leave_processes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Outcome(
        {
            "processes": processes,
            "machines": -(-processes // local),
            "steps": alone + together,
            "messages": {way: messages},
            "gradient_bytes": size,
            "buckets": buckets,
        }
    )


def _trainer(config: Config, seed: int, device: str, way: str) -> DataParallel:
    torch.manual_seed(seed)
    model = building.build_model(config, CLASSES, device).train()
    return DataParallel(
        model,
        building.loss_of(config),
        building.build_optimizer(config, model),
        "allreduce" if way == "none" else way,  # type: ignore[arg-type]
        micro_batch=config["micro_batch"],
        bucket_bytes=config["bucket_bytes"],
        timeout_s=ALONE_S,
        autocast=building.low_precision(config),
    )


def _batch(config: Config, size: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, *config["input"], generator=generator)
    if config["target"] is None:
        targets = torch.randint(CLASSES, (size,), generator=generator)
    else:
        targets = torch.rand(size, *config["target"], generator=generator)
    return inputs.to(device), targets.to(device)


def _timed(device: str, work: Callable[[], None]) -> float:
    """Return the seconds of some work between two events of the device, or of a CPU's clock."""
    begin, end = (accelerator.new_event(device, timing=True) for _ in range(2))
    synchronize(device)
    begin.record(accelerator.current_stream(device))
    work()
    end.record(accelerator.current_stream(device))
    synchronize(device)
    return accelerator.elapsed_s(begin, end)


def _steps(
    config: Config, seed: int, device: str, ways: list[str], averaging_s: float = 0.0
) -> list[dict[str, Any]]:
    """Time steps of every batch size; ``config["row"]`` of them in a row, as in training.

    Args:
        config: Of `steps`.
        seed: Of the weights and the images.
        device: Of this process.
        ways: Of averaging; ``none`` in one process.
        averaging_s: On an accelerator, seconds of the averaging of all gradients by itself.
    """
    kinds = ("total_s", "computation_s", "communication_s", "summation_s", "blocked_s")
    measured = []
    for way in ways:
        trainer = _trainer(config, seed, device, way)
        queued = accelerator.is_accelerator(device) and trainer.processes > 1
        by_itself = _plain(config, seed, device) if queued else None
        for size in config["sizes"]:
            batch = _batch(config, size, seed, device)
            rounds = []
            for turn in range(config["warmup"] + config["repeats"]):
                parts = _turn(config["row"], trainer, batch, device)
                if by_itself is not None:
                    mine = share(size, trainer.rank, trainer.processes)
                    # Without a share it computes its first sample all the same.
                    local_batch = [part[mine] if len(part[mine]) else part[:1] for part in batch]
                    computed = _timed(
                        device, partial(_repeated, config["row"], by_itself, local_batch)
                    )
                    computed /= config["row"]
                    parts |= {
                        "computation_s": min(computed, parts["total_s"]),
                        "communication_s": averaging_s,
                        "blocked_s": max(0.0, parts["total_s"] - computed),
                    }
                if turn >= config["warmup"]:
                    rounds.append(parts)
            measured.append(
                {"batch": size, "processes": trainer.processes, "averaging": way}
                | {kind: statistics.median(parts[kind] for parts in rounds) for kind in kinds}
                | {"samples_s": [parts["total_s"] for parts in rounds]}
            )
        trainer.close()
    return measured


def _plain(config: Config, seed: int, device: str) -> Callable[..., None]:
    """Return a step that tells no other process of its gradients."""
    torch.manual_seed(seed)
    model = building.build_model(config, CLASSES, device).train()
    optimizer = building.build_optimizer(config, model)
    loss_fn, low = building.loss_of(config), building.low_precision(config)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        count = config["micro_batch"] or len(inputs)
        for x, y in zip(inputs.split(count), targets.split(count), strict=True):
            with torch.autocast(x.device.type, low) if low else nullcontext():
                loss = loss_fn(model(x), y) * (len(x) / len(inputs))
            loss.backward()
        optimizer.step()

    return step


def _repeated(count: int, step: Callable[..., Any], batch: Sequence[torch.Tensor]) -> None:
    for _ in range(count):
        step(*batch)


def _turn(
    count: int, trainer: DataParallel, batch: Sequence[torch.Tensor], device: str
) -> dict[str, float]:
    """Return the mean seconds of a step and its parts over `count` in a row."""

    def row() -> None:
        _repeated(count, trainer.step, batch)
        trainer.finish()

    trainer.timings.clear()
    total = _timed(device, row) / count
    # On an accelerator there are none.
    sent, summed, blocked = (
        sum(getattr(timing, f"{kind}_s") for timing in trainer.timings) / count
        for kind in ("communication", "summation", "blocked")
    )
    return {
        "total_s": total,
        "computation_s": total - blocked,
        "communication_s": sent,
        "summation_s": summed,
        "blocked_s": blocked,
    }
