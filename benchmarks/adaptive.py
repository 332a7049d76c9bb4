"""What θ-adaptive training costs: the controller beside an epoch, and the ways of averaging.

python -m benchmarks.adaptive            (about a minute; --steps and --repeats change it)
python -m benchmarks.adaptive controller | averaging | buckets | alone [--device cuda]
"""

import argparse
import statistics
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from repro import models
from repro.adaptive import METHODS, DataParallel, ThetaController
from repro.adaptive.averaging import make_buckets
from repro.experiments.adaptive.worker import launch
from repro.measure import MemoryMeter, time_interleaved
from repro.training import plain_step

SAMPLES, BATCH = 50_000, 128  # CIFAR-10, the paper's best batch size


def controller(steps: int, repeats: int) -> None:
    """Compare `observe` with an epoch of ResNet-20: 391 steps, some of which are timed."""
    torch.manual_seed(0)
    model = models.build("resnet20")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = plain_step(model, nn.functional.cross_entropy, optimizer, "cpu")
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    theta_controller = ThetaController(256, 2048, 0.2)
    theta_controller.observe(2.3, model.parameters())
    times, decisions = [], []
    for number in range(steps + 3):
        start = time.perf_counter()
        step(images, labels)
        middle = time.perf_counter()
        theta_controller.observe(2.2, model.parameters())
        if number >= 3:
            times.append(middle - start)
            decisions.append(time.perf_counter() - middle)
    epoch_s = statistics.median(times) * -(-SAMPLES // BATCH)
    observe_s = statistics.median(decisions)
    resident = [*model.parameters(), *theta_controller.state_dict()["start"]]
    with MemoryMeter("cpu", resident=resident) as meter:
        theta_controller.observe(2.2, model.parameters())
    size = sum(p.nbytes for p in model.parameters())
    print(f"{torch.get_num_threads()} threads, medians of {steps} steps of {BATCH} images")
    print(
        f"ResNet-20: a step {1e3 * statistics.median(times):.1f} ms, so an epoch of {SAMPLES:,} "
        f"images {epoch_s:.1f} s; observe {1e3 * observe_s:.2f} ms, "
        f"{100 * observe_s / epoch_s:.4f} % of the epoch (target: at most 1 %)"
    )
    print(
        f"memory: w_0 {size / 2**20:.2f} MiB, kept once; a measurement of the distance takes "
        f"{(meter.peak_bytes - meter.start_bytes) / 2**20:.2f} MiB more while it lasts"
    )


def buckets(steps: int, repeats: int) -> None:
    """Time an optimizer's calls, one a bucket, for parameters as many as ResNet-50 has.

    Each has one element, so that what is timed is the host's work alone, as on a fast accelerator.
    """
    with torch.device("meta"):
        sizes = models.build("resnet50")
    print(f"ResNet-50's {len(list(sizes.parameters()))} parameters; medians of {repeats}, in turns")
    for kind in (torch.optim.SGD, torch.optim.Adam):
        ways = {}
        for mib in (1, 25):
            groups = [len(b.views) for b in make_buckets(sizes, 1, mib * 2**20)]
            parameters = [[nn.Parameter(torch.zeros(1)) for _ in range(count)] for count in groups]
            optimizer = kind([p for group in parameters for p in group], lr=0.1, fused=True)
            ways[f"{mib} MiB"] = partial(_in_buckets, parameters, optimizer)
        timings = time_interleaved(ways, warmup=3, repeats=repeats)
        for (name, timing), way in zip(timings.items(), ways.values(), strict=True):
            each = len(way.args[0])
            print(f"{kind.__name__:6}{name:>8}: {each:3} calls, {1e3 * timing.median_s:6.2f} ms")
        first, last = timings.values()
        print(f"{kind.__name__:6} 1 MiB over 25 MiB: {first.median_s / last.median_s:.1f}")


def _in_buckets(groups: list[list[nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
    for group in groups:
        for p in group:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p in group:
            p.grad = None


def averaging(steps: int, repeats: int) -> None:
    """Time the three ways of averaging side by side on two processes."""
    job = {
        "jobs": {
            "ResNet-20": {
                "task": "CIFAR", "model": {"name": "resnet20"},
                "optimizer": {"name": "SGD", "momentum": 0.9},
                "input": [3, 32, 32], "target": None, "sizes": [16, 128],
            },
            "EDSR, 8 blocks of 64": {
                "task": "DIV2K", "model": {"name": "edsr", "blocks": 8, "width": 64},
                "optimizer": {"name": "Adam", "betas": [0.9, 0.999]},
                "input": [3, 24, 24], "target": [3, 48, 48], "sizes": [4, 16],
            },
        },
        "device": "cpu", "averaging": list(METHODS), "processes": 2, "bucket_bytes": 2**18,
        "messages": [2**14, 2**20], "warmup": 1, "repeats": repeats, "seed": 0,
    }  # fmt: skip
    results = launch(job, 2)
    print(f"2 processes of one thread; means of 4 steps in a row, medians of {repeats}, in turns")
    print(f"{'':22}{'batch':>6}{'averaging':>16}{'step (ms)':>11}{'over allreduce':>16}"
          f"{'blocked (ms)':>14}{'over 1 process':>16}")  # fmt: skip
    for name, result in results.items():
        rows = {(row["batch"], row["averaging"]): row for row in result["steps"]}
        for (batch, way), row in rows.items():
            if way == "none":
                continue
            plain, alone = rows[batch, "allreduce"], rows[batch, "none"]
            print(
                f"{name:22}{batch:6}{way:>16}{1e3 * row['total_s']:11.1f}"
                f"{row['total_s'] / plain['total_s']:16.2f}{1e3 * row['blocked_s']:14.1f}"
                f"{row['total_s'] / alone['total_s']:16.2f}"
            )
        print(f"{name:22}largest difference between their weights: {result['difference']:.1g}")


def alone(steps: int, repeats: int, device: str = "cpu") -> None:
    """Time a step of one process: plain, by torch's DDP, and by each way of `DataParallel`."""
    torch.manual_seed(0)
    loss = nn.functional.cross_entropy
    images = torch.randn(BATCH, 3, 32, 32, device=device)
    labels = torch.randint(10, (BATCH,), device=device)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = models.build("resnet20").to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    backend = "gloo" if device == "cpu" else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            model, optimizer = made()
            ways = {"plain": partial(plain, *made())}
            ways["torch's DDP"] = partial(plain, DistributedDataParallel(model), optimizer)
            ours = {}
            for way in METHODS:
                model, optimizer = made()
                ours[way] = DataParallel(model, loss, optimizer, way)
                ways[way] = partial(ours[way].step, images, labels)
            timings = time_interleaved(ways, warmup=3, repeats=repeats, device=device)
            for parallel in ours.values():
                parallel.close()
        finally:
            dist.destroy_process_group()
    print(f"ResNet-20, {BATCH} images, one process ({backend}); medians of {repeats}, in turns")
    base = timings["plain"].median_s
    for name, timing in timings.items():
        print(f"{name:16}{1e3 * timing.median_s:8.2f} ms, {timing.median_s / base:.2f} of plain")


def main() -> None:
    """Run the benchmarks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"controller": controller, "buckets": buckets, "averaging": averaging, "alone": alone}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help=", ".join(parts))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of alone")
    options = parser.parse_args()
    parts["alone"] = partial(alone, device=options.device)
    for name in options.parts or parts:
        parts[name](options.steps, options.repeats)


if __name__ == "__main__":
    main()
