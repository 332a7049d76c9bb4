"""`repro.advise` beside measurements: seconds of a step by each method over the undivided step's.

Run as ``python -m benchmarks.advise``. Small networks on this machine's CPU, batches of four times
what fits undivided within the limit; each method and the undivided step run in turns, without a
limit on the latter.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from repro.advise import Workload, predict, probe
from repro.mbs import MicroBatchStreamer
from repro.measure import time_interleaved
from repro.models import build
from repro.outofcore import OutOfCore

FITS, TIMES, ROUNDS = 8, 4, 7
Step = Callable[[], Any]


def _networks() -> dict[str, Workload]:
    resnet = build("resnet18", width=16, num_classes=10)
    densenet = build("densenet40", growth=8)
    unet = build("unet", width=8, depth=3)
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    labels = torch.arange(FITS) % 10
    small, large = torch.randn(FITS, 3, 16, 16), torch.randn(FITS, 3, 32, 32)
    of = Workload.of
    return {
        "ResNet-18": of(resnet, example=(small, labels)),
        "DenseNet-40": of(densenet, example=(small, labels)),
        "U-Net": of(
            unet,
            example=(large, torch.ones(FITS, 1, 32, 32)),
            loss_fn=functional.binary_cross_entropy_with_logits,
        ),
        "transformer": of(
            encoder,
            example=(torch.randn(FITS, 64, 64), torch.randn(FITS, 64, 64)),
            loss_fn=functional.mse_loss,
        ),
    }


def _accumulated(parts: Any, micro: int) -> None:
    parts.optimizer.zero_grad(set_to_none=True)
    batch = len(parts.inputs)
    for some, wanted in zip(parts.inputs.split(micro), parts.targets.split(micro), strict=True):
        loss = parts.loss_fn(parts.model(some), wanted)
        (loss * (len(some) / batch)).backward()
    parts.optimizer.step()


def _streamed(parts: Any, streamer: MicroBatchStreamer) -> None:
    parts.optimizer.zero_grad(set_to_none=True)
    streamer.backward(parts.inputs, parts.targets)
    parts.optimizer.step()


def main() -> None:
    """Print for each network and method what was foretold and what was measured."""
    torch.set_num_threads(1)
    batch, errors = FITS * TIMES, []
    print("| network | method | foretold | measured | error |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, workload in _networks().items():
        limit = predict(workload, "undivided", FITS, 1 << 40, simulated=True).peak_bytes
        speed = probe(workload, "cpu", batch, 1 << 40, seconds=6)
        for method in ("mbs", "accumulation", "checkpointing", "outofcore"):
            prediction = predict(workload, method, batch, limit, speed, simulated=True)
            if prediction.slowdown is None:
                continue
            micro = prediction.settings.get("micro_batch", batch)
            with ExitStack() as stack:
                plain, whole = workload.built(batch, "cpu")
                parts, step = workload.built(batch, "cpu", checkpointing="checkpointing" in method)
                undivided: Step = whole
                if method == "mbs":
                    streamer = MicroBatchStreamer(parts.model, parts.loss_fn, micro, check="off")
                    step = partial(_streamed, parts, streamer)
                elif method == "accumulation":
                    step = partial(_accumulated, parts, micro)
                steps = {"method": step, "undivided": undivided}
                if method == "outofcore":
                    timed_alone = time_interleaved({"undivided": whole}, repeats=ROUNDS)
                    block = OutOfCore(
                        limit, device="cpu", exclude=(parts.inputs, parts.targets),
                        model=parts.model, optimizer=parts.optimizer,
                    )  # fmt: skip
                    stack.enter_context(block)
                    for _ in range(4):
                        step()
                    steps = {"method": step}
                timed = time_interleaved(steps, repeats=ROUNDS)
                if method == "outofcore":
                    timed |= timed_alone
            ratio = timed["method"].median_s / timed["undivided"].median_s
            errors.append(abs(prediction.slowdown / ratio - 1))
            print(
                f"| {name} | {method} | {prediction.slowdown:.2f} | {ratio:.2f} | "
                f"{100 * (prediction.slowdown / ratio - 1):+.0f} % |"
            )
            del plain
    close = sum(error <= 0.15 for error in errors)
    print(f"\nwithin 15 %: {close} of {len(errors)}; the largest: {100 * max(errors):.0f} %")


if __name__ == "__main__":
    main()
