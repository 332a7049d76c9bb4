"""Micro-Batch Streaming against its peers: throughput, overhead, peak memory, streaming.

1. Throughput of `MicroBatchStreamer` over that of Hugging Face Accelerate's ``accumulate()``, with
   the same model, optimizer and micro-batches. Target: at least 1.0.
2. Time of a training step with streaming over that of one on the undivided mini-batch, where the
   latter fits. The paper's tables 4 and 5 give 1.003 to 1.051. Target: at most 1.05.
   Also, per sample, over an undivided mini-batch of the micro-batch's size, which is what most
   rows of those tables compare. Beside it, without a target: over a loop of the same
   micro-batches written by hand.
3. Peak memory with a mini-batch of 16 micro-batches over that of one micro-batch in plain PyTorch.
   Accumulation keeps the gradients in memory during the forward passes: once the plain step does
   as well, once it has freed them, as ``zero_grad`` does. Target: at most 1.02.
4. On a GPU: a step that streams from host memory over one on data that is on the device already.
   Target: at most 1.02.

A ratio of times is the median over rounds of the two times of one round (both run in each round,
in alternating order, after a warm-up). Run from the repository root:
``python -m benchmarks.mbs [--device cpu|cuda] [--repeats 15]``.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

try:
    from accelerate import Accelerator
except ImportError:
    Accelerator = None

from repro.mbs import MicroBatchStreamer
from repro.measure import MemoryMeter, describe_device, time_interleaved
from repro.models import resnet20, resnet50

IMAGE_SIZE = {"cpu": 32, "cuda": 224}
SPLITS = {"cpu": [(16, 8), (64, 32), (256, 32)], "cuda": [(32, 16), (128, 64), (512, 64)]}


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio, its target, and whether it may not exceed or undercut it."""

    quantity: str
    setting: str
    ratio: float | None
    target: str
    met: bool | None
    n: int


@dataclass(frozen=True)
class Step:
    """A training step and the model that it trains."""

    run: Callable[[], None]
    model: nn.Module


def make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return ResNet-20 on a CPU, ResNet-50 on a GPU, and SGD as in section 4.2.4."""
    torch.manual_seed(0)
    model = (resnet50(num_classes=102) if device.type == "cuda" else resnet20(102)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def batch(num_samples: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mini-batch of noise in host memory."""
    size = IMAGE_SIZE[device.type]
    return torch.randn(num_samples, 3, size, size), torch.randint(102, (num_samples,))


def streaming_step(device: torch.device, micro: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Return a training step that streams."""
    model, optimizer = make(device)
    streamer = MicroBatchStreamer(model, F.cross_entropy, micro, device=device)

    def step() -> None:
        optimizer.zero_grad()
        streamer.backward(x, y)
        optimizer.step()

    return Step(step, model)


def undivided_step(device: torch.device, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Return a plain training step, which reads its loss as training loops do."""
    model, optimizer = make(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        loss.item()
        optimizer.step()

    return Step(step, model)


def loop_step(device: torch.device, micro: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Return the same training step as a loop written by hand, with none of the checks."""
    model, optimizer = make(device)

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for start in range(0, len(x), micro):
            inputs = x[start : start + micro].to(device, non_blocking=True)
            targets = y[start : start + micro].to(device, non_blocking=True)
            loss = F.cross_entropy(model(inputs), targets) * (len(inputs) / len(x))
            loss.backward()
            total += loss.detach()
        total.item()
        optimizer.step()

    return Step(step, model)


def accelerate_step(device: torch.device, micro: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Return the same training step by ``Accelerator.accumulate``."""
    accelerator = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=len(x) // micro)
    model, optimizer = accelerator.prepare(*make(device))

    def step() -> None:
        total = torch.zeros((), device=device)
        for start in range(0, len(x), micro):
            inputs = x[start : start + micro].to(device, non_blocking=True)
            targets = y[start : start + micro].to(device, non_blocking=True)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
        total.item()

    return Step(step, model)


def ratio_of(above: Step, below: Step, device: torch.device, repeats: int) -> float:
    """Return the median over rounds of the ratio of two steps' times."""
    timings = time_interleaved({"a": above.run, "b": below.run}, repeats=repeats, device=device)
    pairs = zip(timings["a"].samples_s, timings["b"].samples_s, strict=True)
    return statistics.median(a / b for a, b in pairs)


def throughput(device: torch.device, repeats: int) -> Iterator[Row]:
    """Compare with Accelerate."""
    name = "throughput / Accelerate's"
    if Accelerator is None:
        yield Row(name, "skipped: accelerate is not installed", None, ">= 1.00", None, 0)
        return
    for mini, micro in SPLITS[device.type]:
        data = batch(mini, device)
        steps = accelerate_step(device, micro, *data), streaming_step(device, micro, *data)
        ratio = ratio_of(*steps, device, repeats)
        setting = f"{mini} in micro-batches of {micro}"
        yield Row(name, setting, ratio, ">= 1.00", ratio >= 1.0, repeats)


def overhead(device: torch.device, repeats: int) -> Iterator[Row]:
    """Compare with the undivided mini-batch."""
    for mini, micro in SPLITS[device.type]:
        data = batch(mini, device)
        streaming, setting = (
            streaming_step(device, micro, *data),
            f"{mini} in micro-batches of {micro}",
        )
        ratio = ratio_of(streaming, undivided_step(device, *data), device, repeats)
        yield Row("time / undivided", setting, ratio, "<= 1.05", ratio <= 1.05, repeats)
        ratio = ratio_of(streaming, loop_step(device, micro, *data), device, repeats)
        yield Row("time / loop by hand", setting, ratio, "", None, repeats)
        # Most rows of the paper's tables: the undivided mini-batch is as large as a micro-batch.
        smaller = undivided_step(device, *(part[:micro] for part in data))
        ratio = ratio_of(streaming, smaller, device, repeats) * micro / mini
        setting = f"{mini} in {micro}s, against {micro} undivided"
        yield Row("time per sample / undivided", setting, ratio, "<= 1.05", ratio <= 1.05, repeats)


def memory(device: torch.device, repeats: int) -> Iterator[Row]:
    """Compare peak memory at 16 micro-batches with one micro-batch in plain PyTorch."""
    micro = 64 if device.type == "cuda" else 16
    data = batch(16 * micro, device)
    streaming = streaming_step(device, micro, *data)
    plain = undivided_step(device, *(part[:micro] for part in data))
    peaks: dict[str, int] = {}
    for name, step in (("streamed", streaming), ("freed", plain), ("allocated", plain)):
        for _ in range(2):  # a first step allocates momentum and workspace
            step.run()
        for parameter in step.model.parameters():
            parameter.grad = None
        with MemoryMeter(device, resident=step.model) as meter:
            if name == "allocated":
                gradients = [torch.zeros_like(p) for p in step.model.parameters()]
                x, y = (part[:micro].to(device) for part in data)
                for parameter, gradient in zip(step.model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                F.cross_entropy(step.model(x), y).backward()
            else:
                step.run()
        # On a GPU both models are there; neither counts for the other.
        peaks[name] = meter.peak_bytes - (meter.start_bytes if device.type == "cuda" else 0)
    for name in ("allocated", "freed"):
        ratio = peaks["streamed"] / peaks[name]
        setting = f"16 x {micro}, gradients {name} at the forward pass"
        yield Row("peak memory / 1 micro-batch", setting, ratio, "<= 1.02", ratio <= 1.02, 1)


def host_streaming(device: torch.device, repeats: int) -> Iterator[Row]:
    """Compare data in host memory with data on the device."""
    mini, micro = SPLITS[device.type][-1]
    for kind in ("pageable", "pinned"):
        name, setting = f"{kind} host / on the device", f"{mini} in micro-batches of {micro}"
        if device.type != "cuda":
            yield Row(name, "skipped: needs a GPU", None, "<= 1.02", None, 0)
            continue
        x, y = batch(mini, device)
        source = (x.pin_memory(), y.pin_memory()) if kind == "pinned" else (x, y)
        host = streaming_step(device, micro, *source)
        resident = streaming_step(device, micro, x.to(device), y.to(device))
        ratio = ratio_of(host, resident, device, repeats)
        yield Row(name, setting, ratio, "<= 1.02", ratio <= 1.02, repeats)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = (
        torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    )

    model = "ResNet-50" if device.type == "cuda" else "ResNet-20"
    size = IMAGE_SIZE[device.type]
    table = Table(
        title=f"Micro-Batch Streaming, {model}, {size}x{size}, {describe_device(device)['name']}, "
        f"torch {torch.__version__}"
    )
    for column in ("ratio", "setting", "measured", "target", "", "n"):
        table.add_column(column)
    for measure in (throughput, overhead, memory, host_streaming):
        for row in measure(device, arguments.repeats):
            measured = "-" if row.ratio is None else f"{row.ratio:.3f}"
            verdict = {None: "-", True: "met", False: "missed"}[row.met]
            table.add_row(row.quantity, row.setting, measured, row.target, verdict, str(row.n))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
