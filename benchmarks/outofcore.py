"""What out-of-core training costs and how it compares: the targets of `repro.outofcore`.

    python -m benchmarks.outofcore [--device cpu] [--repeats 7] [--threads 2] [--only rivals …]

- Planning a trace of 20,000 functions, at budgets from a tenth to nine tenths of its peak. Target:
  under 1 s.
- What a function costs beside itself: a chain of 60 tiny layers, recorded and replayed, with all of
  it resident and within half of its peak, where three functions in four move a variable. Target: 15
  μs a function replayed, all resident. The medians of the fastest rounds are taken, of this process
  alone.
- ResNet-50, forward, backward and SGD: an iteration within `OutOfCore` with everything resident
  over a plain one; the median over rounds of the ratio of the two times of a round. Target on a
  CPU: at most 1.08 (iterations of at least 1 s).
- The same within a half and a quarter of its peak; on a GPU beside `save_on_cpu`, checkpointing of
  its blocks, and an asynchronous offload of saved tensors: time, and most that is held.
- Five networks, most of many small operations, with everything resident, over plain. Target: 1.05.
- The same networks within what two others need on the device: `save_on_cpu`, and checkpointing of
  their blocks. Our time over theirs, in turns. Target: at most 1. Ours holds the search for better
  plans, of about a second in all. On a CPU `save_on_cpu`
  copies nothing, so that its hooks are given the two copies that it makes of a tensor on an
  accelerator.
- Simulated stall of the window schedule over that of LMS's best pair of distances, for
  every traced network and budget; compute times measured here, copies at the rate at which an
  iteration's bytes take as long as its computation. Target: at most 1.
- Simulated time over what no schedule beats, of the paper's four networks at five budgets each, at
  the rates of its V100. Target: 1.05 at most, of the faster of window and packed plans.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from repro.advise.workload import checkpoint_blocks, repeated_blocks
from repro.experiments.outofcore.building import training_step as offloaded
from repro.measure import Timing, accelerator, describe_device, time_interleaved
from repro.measure.allocations import keep_freed_memory
from repro.models import build
from repro.outofcore import (
    BudgetTooSmall,
    DoesNotFit,
    Function,
    OutOfCore,
    SwapPlan,
    Trace,
    bound,
    on_demand,
    plan_packed,
    plan_swaps,
    record,
    tune_fixed_distance,
    tune_window,
)

MIB = 2**20
NETWORKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "ResNet-20": ({"name": "resnet20"}, 32, 16),
    "ResNet-50": ({"name": "torchvision/resnet50"}, 64, 4),
    "DenseNet-121": ({"name": "torchvision/densenet121"}, 64, 4),
    "U-Net": ({"name": "unet", "width": 16}, 64, 4),
}
SHARES = (0.1, 0.35, 0.5, 0.65, 0.8)  # of the way from the smallest budget to the peak


def training_step(
    model: dict[str, Any], side: int, batch: int, device: str, recompute: bool = False
) -> Callable[[], None]:
    """Return one iteration of SGD with momentum on random images."""
    torch.manual_seed(0)
    network = build(**model).to(device).train()
    if recompute:
        checkpoint_blocks(network, repeated_blocks(network))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        out = network(images)
        loss = F.cross_entropy(out, labels) if out.ndim == 2 else out.square().mean()
        loss.backward()
        optimizer.step()

    return step


def long_chain(layers: int) -> Trace:
    """Return the trace of a chain of layers of random sizes: 4 L + 1 functions."""
    rng = random.Random(0)
    sizes = {"a0": 1000}
    functions = []
    for i in range(layers):
        sizes |= {f"w{i}": rng.randint(10, 500), f"a{i + 1}": rng.randint(500, 5000)}
        sizes |= {f"g{i}": sizes[f"a{i}"], f"d{i}": sizes[f"w{i}"], f"m{i}": sizes[f"w{i}"]}
        functions.append(Function("forward", (f"a{i}", f"w{i}"), (f"a{i + 1}",)))
    sizes[f"g{layers}"] = sizes[f"a{layers}"]
    functions.append(Function("loss", (f"a{layers}",), (f"g{layers}",)))
    for i in reversed(range(layers)):
        inputs = (f"g{i + 1}", f"a{i}", f"w{i}")
        functions.append(Function("backward", inputs, (f"g{i}", f"d{i}")))
    for i in range(layers):
        functions.append(Function("momentum", (f"m{i}", f"d{i}"), (f"m{i}",)))
        functions.append(Function("update", (f"w{i}", f"m{i}"), (f"w{i}",)))
    return Trace(tuple(functions), sizes, deaths={"a0": len(functions)})


def planning() -> None:
    """Time the planning of 20,000 functions."""
    trace = long_chain(5000)
    for share in (0.1, 0.5, 0.9):
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            plan_swaps(trace, int(share * trace.peak_bytes))
            taken.append(time.perf_counter() - start)
        print(
            f"planning {len(trace.functions)} functions at {share:.1f} of the peak: "
            f"{statistics.median(taken):.2f} s (target 1 s)"
        )


def replaying() -> None:
    """Time iterations of functions that take no time themselves, within blocks and plain."""

    def chain() -> Callable[[], None]:
        torch.manual_seed(0)
        layers = [m for _ in range(60) for m in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
        network = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, foreach=False)
        images = torch.randn(4, 8)

        def step() -> None:
            optimizer.zero_grad()
            network(images).square().mean().backward()
            optimizer.step()

        return step

    def fastest(step: Callable[[], None], count: int = 60) -> float:
        taken = []
        for _ in range(count):
            start = time.process_time()
            step()
            taken.append(time.process_time() - start)
        return statistics.median(sorted(taken)[: count // 4])

    plain = chain()
    fastest(plain, 4)
    alone, peak = fastest(plain), 0
    print("\nA function of a chain of tiny ones, beside itself")
    for name, share in (("all resident (target 15)", 1.0), ("half of the peak", 0.5)):
        step = chain()
        with OutOfCore(int(share * peak) or 1 << 50, device="cpu") as block:
            start = time.process_time()
            step()
            recorded = time.process_time() - start
            fastest(step, 8)
            replayed = fastest(step)
            assert block.trace is not None
            count, peak = len(block.trace.functions), block.trace.peak_bytes
        print(
            f"  {name}: {(replayed - alone) / count * 1e6:.1f} μs replayed, "
            f"{(recorded - alone) / count * 1e6:.0f} μs recorded; plain {alone / count * 1e6:.1f} "
            f"μs; {block.statistics.replayed} of {block.statistics.iterations} replayed"
        )


def transformer(recompute: bool = False) -> Callable[[], None]:
    """Return one iteration of AdamW of a GPT-2 small (124 million parameters) on 48 tokens."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        768, 12, 3072, activation="gelu", batch_first=True, norm_first=True
    )
    layers = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    if recompute:
        checkpoint_blocks(layers, ["TransformerEncoderLayer"])
    table = torch.nn.Embedding(50257, 768)
    tokens = torch.randint(0, 50257, (1, 48))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(48)
    optimizer = torch.optim.AdamW([*layers.parameters(), *table.parameters()], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        out = F.linear(layers(table(tokens), mask, is_causal=True), table.weight)
        F.cross_entropy(out[0], tokens[0]).backward()
        optimizer.step()

    return step


def perceptron(recompute: bool = False) -> Callable[[], None]:
    """Return one iteration of Adam of 12 layers of 1024 units on 512 samples."""
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    pairs = [torch.nn.Sequential(*layers[i : i + 4]) for i in range(0, 24, 4)]
    network = torch.nn.Sequential(*pairs, torch.nn.Linear(1024, 10))
    if recompute:
        checkpoint_blocks(network, ["Sequential"])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    samples, labels = torch.randn(512, 1024), torch.randint(0, 10, (512,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(samples), labels).backward()
        optimizer.step()

    return step


MANY: dict[str, Callable[..., Callable[[], None]]] = {
    name: partial(training_step, {"name": f"torchvision/{network}"}, side, 8, "cpu")
    for name, network, side in (
        ("ResNet-50", "resnet50", 224),
        ("EfficientNet-B0", "efficientnet_b0", 160),
        ("DenseNet-121", "densenet121", 160),
    )
} | {"MLP": perceptron, "GPT-2 small": transformer}


def within(
    block: OutOfCore, ours: Callable[[], None], repeats: int, **others: Callable[[], None]
) -> dict[str, Timing]:
    """Time a step within a block in turns with others that the block does not see."""
    with block:
        ours()  # first, so that the block takes this step's model and optimizer for its own
        steps = {name: unseen(step) for name, step in others.items()}
        return time_interleaved(
            steps | {"ours": ours}, warmup=6, repeats=repeats, device=block.device
        )


def unseen(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step that a block around it does not see."""

    def alone() -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            step()

    return alone


def ratio(timed: dict[str, Timing], above: str, below: str) -> str:
    """Say what one takes over the other: median of the rounds, lowest, highest."""
    pairs = zip(timed[above].samples_s, timed[below].samples_s, strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def watching(repeats: int) -> None:
    """Time five networks of which all stays on the device, on a CPU."""
    print("\nAll resident, over plain (target 1.05)")
    for name, make in MANY.items():
        block = OutOfCore(1 << 50, device="cpu")
        timed = within(block, make(), repeats, plain=make())
        assert block.trace is not None
        print(
            f"  {name}, {len(block.trace.functions)} functions: {ratio(timed, 'ours', 'plain')} "
            f"of a plain iteration of {timed['plain'].median_s:.2f} s"
        )


def saving(step: Callable[[], None], pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Run a step whose saved tensors are packed, as those of `save_on_cpu` are."""
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        step()


def rivals(repeats: int) -> None:
    """Time five networks within what `save_on_cpu` and checkpointing leave on the device."""
    print("\nWithin the device memory of two others, over their time (target 1)")
    for name, make in MANY.items():
        # What is saved takes none of the device's memory until it is asked for.
        away = partial(
            saving, make(), lambda t: (t.shape, t.dtype), lambda s: torch.zeros(*s[:1], dtype=s[1])
        )
        copied = partial(saving, make(), torch.clone, torch.clone)
        recomputed = make(recompute=True)
        others = {
            "save_on_cpu": (record(away, warmup=2).peak_bytes, copied),
            "checkpointing": (record(recomputed, warmup=2).peak_bytes, recomputed),
        }
        whole = record(make(), warmup=2).peak_bytes
        for other, (peak, theirs) in others.items():
            about = f"  {name}, {other}, {peak / MIB:.0f} of {whole / MIB:.0f} MiB"
            block = OutOfCore(peak, device="cpu")
            try:
                timed = within(block, make(), repeats, plain=make(), theirs=theirs)
            except BudgetTooSmall as error:
                print(f"{about}: {error}")
                continue
            print(
                f"{about}: {ratio(timed, 'ours', 'theirs')} of it; over plain "
                f"{ratio(timed, 'ours', 'plain')}, {other} {ratio(timed, 'theirs', 'plain')}; "
                f"{block.statistics.replayed} of {block.statistics.iterations} replayed"
            )


def executing(device: str, repeats: int) -> None:
    """Time ResNet-50 within blocks in turns with a plain one; on an accelerator save_on_cpu too."""
    side, batch = (224, 12) if device == "cpu" else (224, 64)
    model: dict[str, Any] = {"name": "torchvision/resnet50"}
    print(f"\nResNet-50, {batch} images of {side}×{side}, forward, backward and SGD")

    def make() -> Callable[[], None]:
        return training_step(model, side, batch, device)

    peak = 0
    for share in (1.0, 0.5, 0.25):
        block = OutOfCore(int(share * peak) or 1 << 50, device=device)
        timed = within(block, make(), repeats, plain=make())
        name = f"{share:.2f} of the peak" if peak else "everything resident (target 1.08)"
        done, moved = block.statistics, block.plan.bytes_moved if block.plan else 0
        print(
            f"  {name}: {ratio(timed, 'ours', 'plain')} of a plain iteration of "
            f"{timed['plain'].median_s:.2f} s; {done.peak_bytes / MIB:.0f} MiB, "
            f"{moved / MIB:.0f} MiB moved an iteration, {done.replayed} of {done.iterations} "
            "replayed"
        )
        peak = peak or done.peak_bytes
    if device == "cpu":
        print(
            "  save_on_cpu, checkpointing, asynchronous offload: skipped, they need a GPU (rivals)"
        )
        return
    saved = make()
    config = {"model": model, "image": [side, side], "batch": batch}
    others = {
        "plain": make(),
        "save_on_cpu": lambda: _away(saved, device),
        "checkpointing": training_step(model, side, batch, device, recompute=True),
        "asynchronous offload": offloaded(config, device, offload=True),
    }
    peaks = {}
    for name, step in others.items():
        step()
        accelerator.reset_peak_memory(device)
        before = accelerator.memory_allocated(device)  # all of them are there
        step()
        peaks[name] = (accelerator.max_memory_allocated(device) - before) / MIB
    timed = time_interleaved(others, warmup=4, repeats=repeats, device=device)
    for name in list(others)[1:]:
        print(
            f"  {name}: {ratio(timed, name, 'plain')} of a plain iteration; {peaks[name]:.0f} MiB "
            f"beside weights and state, plain {peaks['plain']:.0f}"
        )


def _away(step: Callable[[], None], device: str) -> None:
    with torch.autograd.graph.save_on_cpu(True, torch.device(device).type):
        step()


def comparing() -> None:
    """Compare simulated stalls with LMS's best."""
    print("\nSimulated, at the copy rate that makes an iteration's bytes take its computation time")
    print("  stall: window, LMS's best, on demand")
    for name, (model, side, batch) in NETWORKS.items():
        trace, times = _recorded(training_step(model, side, batch, "cpu"))
        rate = trace.peak_bytes / sum(times)
        low, high = trace.smallest_budget, trace.peak_bytes
        for share in SHARES:
            budget = low + int(share * (high - low))
            ours = tune_window(trace, budget, times, rate)
            stall = ours.simulate(times, rate).stall_s
            try:
                theirs = tune_fixed_distance(trace, budget, times, rate)
                other = theirs.simulate(times, rate).stall_s
                best = f"{other:.3f} s"
            except DoesNotFit:
                other, best = float("inf"), "does not fit"
            paged = on_demand(trace, budget).simulate(times, rate).stall_s
            verdict = "ok" if stall <= other + 1e-9 else "MISSED"
            print(
                f"  {name}, {len(trace.functions)} functions, {budget / MIB:.0f} of "
                f"{high / MIB:.0f} MiB: {stall:.3f} s, {best}, {paged:.3f} s of "
                f"{sum(times):.3f} s  {verdict}"
            )


def _recorded(step: Callable[[], None]) -> tuple[Trace, Sequence[float]]:
    """Return the trace of an iteration, and the seconds of its functions."""
    seen: list[tuple[Trace, Sequence[float]]] = []

    def planned(trace: Trace, budget: int, times: Sequence[float], rates: object) -> SwapPlan:
        seen.append((trace, times))
        return plan_swaps(trace, budget)

    with OutOfCore(1 << 50, device="cpu", schedule=planned):
        for _ in range(4):
            step()
    return seen[-1]


BOUNDED = {"ResNet-50": 1440, "DenseNet": 1024, "Pix2PixHD": 24, "DeepLabv3+": 64}


def bounding() -> None:
    """Compare simulated times with what no schedule beats, at the rates of the paper's V100."""
    from repro.experiments.outofcore.runs import RATE
    from repro.experiments.outofcore.widget import iteration

    print("\nSimulated time over what no schedule beats (target: the faster at most 1.05)")
    for role, batch in BOUNDED.items():
        shown = iteration(role, batch)
        low, high = shown.limits
        for share in (0.02, 0.05, 0.1, 0.2, 0.35):
            budget = low + int(share * (high - low))
            least = bound(shown.trace, budget, shown.times, RATE)
            plans = [make(shown.trace, budget, shown.times, RATE) for make in _FAST]
            window, packed = (p.simulate(shown.times, RATE).time_s / least for p in plans)
            print(
                f"{role} {batch}, {share:.0%} of the way: window {window:.3f}, packed "
                f"{packed:.3f}, the faster {min(window, packed):.3f}; {least:.2f} s at least, "
                f"{shown.times.sum():.2f} s of computation"
            )


_FAST = (tune_window, plan_packed)


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="functions of this file, such as rivals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        keep_freed_memory()
    about = describe_device(arguments.device)
    print(
        f"{about['name']}, {arguments.threads} threads, torch {torch.__version__}, median of "
        f"{arguments.repeats} rounds"
    )
    repeats = arguments.repeats
    parts: dict[str, Callable[[], None]] = {
        "planning": planning,
        "replaying": replaying,
        "executing": partial(executing, arguments.device, repeats),
        "comparing": comparing,
        "bounding": bounding,
    }
    if arguments.device == "cpu":
        parts |= {"watching": partial(watching, repeats), "rivals": partial(rivals, repeats)}
    unknown = set(arguments.only or ()) - set(parts)
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: choose of {', '.join(parts)}")
    for name, part in parts.items():
        if not arguments.only or name in arguments.only:
            part()


if __name__ == "__main__":
    main()
