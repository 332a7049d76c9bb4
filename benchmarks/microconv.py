"""What micro-batching convolutions gains and costs: the targets of `repro.microconv`.

    python -m benchmarks.microconv [--repeats 15] [--threads 2] [--processes 5] [--where]

On a CPU with NNPACK, freed memory kept by the process. A ratio is the median over rounds of the
ratio of the two times of one round; of conv2 with its 95 % interval over processes, each of which
measures and divides anew:

- AlexNet's conv2 forward at N = 64 within 8 MiB: the best division over the best undivided choice
  under the same limit, with every temporary byte counted, torch's own convolution's included.
  Target: at least 1.25 times as fast.
- AlexNet forward, tuned with ``strict=False``, over plain torch, at 8, 64 and 512 MiB. Target: at
  least as fast, never more than 2 % slower. Whole iterations held to a limit are
  ``python -m repro run microconv/iterations``.
- The optimisers: `pareto_front` for B = 256, 6 algorithms, policy all (under 0.5 s), WD with 562
  variables (under 0.25 s) and with 465 kernels and 2,500 variables (under 1 s).

``--where`` looks for where dividing pays on this CPU instead, without a limit, side by side with
plain torch: layers in turn on micro-batches that stay in the processor's cache, forward alone and
with a backward pass; single layers by `tune`, by data type, dilation and groups; and iterations of
networks that `tune` has gone through, beside the noise of plain torch against itself. No target: it
tells whether to use the method for speed on a machine.

``--rivals`` runs iterations of Caffe's AlexNet at N = 256 on CUDA by torch's own convolutions under
each of its settings, in processes of their own: `cudnn.benchmark` with 10 plans and with all, with
and without a cap of 64 MiB on the workspace; and tuned within as much. No target.
"""

import argparse
import copy
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from scipy import stats
from torch import nn

from repro.experiments.microconv import iterating, runs
from repro.experiments.microconv.experiments import made_up_fronts, made_up_kernel
from repro.measure import Timing, describe_device, time_interleaved
from repro.measure.allocations import keep_freed_memory
from repro.microconv import (
    BenchmarkCache,
    Convolution,
    Division,
    Kernel,
    assign_workspaces,
    best_division,
    micro_batch_sizes,
    pareto_front,
    tune,
)
from repro.microconv.backends import run_division
from repro.microconv.measuring import Bench
from repro.microconv.torch_backend import native
from repro.models import build

MIB = 2**20
CONV2 = Convolution(64, 27, 27, 192, (5, 5), padding=(2, 2))
LIMITS_MIB = (8, 64, 512)


def _rounds(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    return time_interleaved(calls, warmup=2, repeats=repeats)


def _ratio(slower: Timing, faster: Timing) -> float:
    """Return the median over rounds of the ratio of the two times of one round."""
    pairs = zip(slower.samples_s, faster.samples_s, strict=True)
    return statistics.median(a / b for a, b in pairs)


def conv2(repeats: int, batch: int = 64, limit_mib: int = 8) -> float:
    """Run conv2's best division and its best undivided algorithm in turns; return their ratio."""
    kernel = Kernel("forward", CONV2)
    bench = Bench(None, BenchmarkCache(None), max_error=1e-4)
    ways = bench.candidates(kernel, batch, micro_batch_sizes(batch, "powerOfTwo"), 64 * MIB)
    limit = limit_mib * MIB
    divisions: dict[str, Division] = {
        "divided": best_division(batch, ways, limit),
        "undivided": best_division(batch, {batch: ways[batch]}, limit),
    }
    first, second, out = kernel.tensors(batch)
    workspace = torch.zeros(limit, dtype=torch.uint8)
    timed = _rounds(
        {
            name: lambda parts=division.parts: run_division(  # type: ignore[misc]
                parts, kernel, first, second, out, workspace
            )
            for name, division in divisions.items()
        }
        | {"torch": lambda: native(kernel, first, second)},
        repeats,
    )
    print(f"\nAlexNet conv2 forward, N = {batch}, within {limit_mib} MiB")
    for name, division in divisions.items():
        memory = division.workspace_bytes / MIB
        print(f"  {name:10} {1e3 * timed[name].median_s:7.1f} ms  {memory:5.1f} MiB  {division}")
    size = max(way.workspace_bytes for way in ways[batch] if way.algorithm == "torch:native")
    print(
        f"  {'torch':10} {1e3 * timed['torch'].median_s:7.1f} ms  {size / MIB:5.1f} MiB  (no limit)"
    )
    gain = _ratio(timed["undivided"], timed["divided"])
    over_torch = _ratio(timed["torch"], timed["divided"])
    print(f"  divided over undivided: {gain:.3f} (target 1.25)")
    print(f"  divided over torch without a limit: {over_torch:.3f}")
    return gain


def conv2_in_processes(first: float, repeats: int, threads: int, processes: int) -> None:
    """Repeat `conv2` in other processes, and print the interval of all ratios."""
    gains = [first]
    call = (
        f"import torch; torch.set_num_threads({threads}); "
        f"from repro.measure.allocations import keep_freed_memory; keep_freed_memory(); "
        f"from benchmarks.microconv import conv2; print('RATIO', conv2({repeats}))"
    )
    for _ in range(processes - 1):
        done = subprocess.run(
            [sys.executable, "-c", call], capture_output=True, text=True, check=True
        )
        gains.append(float(done.stdout.rsplit("RATIO", 1)[1]))
    if len(gains) > 1:
        logs = [math.log(gain) for gain in gains]
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs)
        half /= math.sqrt(len(logs))
        mean = statistics.mean(logs)
        low, middle, high = (math.exp(mean + sign * half) for sign in (-1, 0, 1))
        print(f"  over {len(gains)} processes: {middle:.3f} [{low:.3f}, {high:.3f}]")


def alexnet(repeats: int, batch: int = 64) -> None:
    """Run AlexNet forward, tuned at each limit and plain, in turns."""
    torch.manual_seed(0)
    plain = build("torchvision/alexnet").eval()
    images = torch.randn(batch, 3, 224, 224)
    cache = BenchmarkCache(None)
    print(f"\nAlexNet forward, N = {batch}, tune() against plain torch")
    for limit in LIMITS_MIB:
        tuned = copy.deepcopy(plain)
        report = tune(tuned, images, limit * MIB, strict=False, cache=cache)
        with torch.no_grad():
            timed = _rounds(
                {"tuned": lambda m=tuned: m(images), "plain": lambda: plain(images)},  # type: ignore[misc]
                repeats,
            )
        kernels = ", ".join(
            f"{entry.layer} {entry.division}" for entry in report.kernels if entry.division
        )
        print(
            f"  {limit:3} MiB: {1e3 * timed['tuned'].median_s:7.1f} ms, plain "
            f"{1e3 * timed['plain'].median_s:7.1f} ms, ratio "
            f"{_ratio(timed['plain'], timed['tuned']):.3f} "
            f"(target 1.00, never below 0.98); {kernels or 'every kernel left to torch'}"
        )


def chains(repeats: int, batch: int = 32, depth: int = 4) -> None:
    """Run several layers in turn on micro-batches, and layer by layer on the whole mini-batch."""
    print(f"\n{depth} layers of 3×3 in turn, N = {batch}: micro-batches over the whole mini-batch")
    for channels, side in ((16, 112), (64, 56), (256, 14)):
        torch.manual_seed(0)
        chain = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
              for _ in range(depth))
        )  # fmt: skip
        images = torch.randn(batch, channels, side, side)
        each = images[0].nbytes / MIB

        def forward(size: int, chain: nn.Module = chain, images: torch.Tensor = images) -> None:
            with torch.no_grad():
                for part in images.split(size):
                    chain(part)

        def step(size: int, chain: nn.Module = chain, images: torch.Tensor = images) -> None:
            chain.zero_grad()
            for part in images.split(size):
                chain(part).square().mean().backward()

        for name, run in (("forward", forward), ("forward and backward", step)):
            sizes = [batch, batch // 4, batch // 16, 1]
            timed = _rounds({str(b): lambda run=run, b=b: run(b) for b in sizes}, repeats)  # type: ignore[misc]
            gains = ", ".join(f"{b}: {_ratio(timed[str(batch)], timed[str(b)]):.2f}" for b in sizes)
            print(f"  {channels:3} × {side}² ({each:.2f} MiB a sample), {name}: {gains}")


def layers(repeats: int) -> None:
    """Tune single layers without a limit, and run them in turns with plain torch."""
    print("\nSingle layers without a limit, forward: plain torch over tuned")
    shapes: dict[str, tuple[Convolution, int]] = {
        "AlexNet conv2": (CONV2, 16),
        "5×5, 192 to 32 channels": (Convolution(192, 28, 28, 32, (5, 5), padding=(2, 2)), 16),
        "3×3, 128 to 256": (Convolution(128, 28, 28, 256, (3, 3), padding=(1, 1)), 8),
        "3×3, dilation 2": (Convolution(64, 32, 32, 64, (3, 3), (1, 1), (2, 2), (2, 2)), 8),
        "5×5 in 2 groups": (Convolution(96, 27, 27, 256, (5, 5), (1, 1), (2, 2), (1, 1), 2), 16),
        "11×11, 3 to 64": (Convolution(3, 112, 112, 64, (11, 11), padding=(5, 5)), 4),
    }
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for name, (conv, batch) in shapes.items():
            torch.manual_seed(0)
            options = {"padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}
            plain = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, **options)  # type: ignore[arg-type]
            plain = plain.to(dtype).eval()
            images = torch.randn(conv.input_shape(batch)).to(dtype)
            tuned = copy.deepcopy(plain)
            given = {"workspace_limit": 512 * MIB, "strict": False, "cache": None}
            report = tune(tuned, images, **given)  # type: ignore[arg-type]
            runs = {
                name: lambda m=model, x=images: m(x)  # type: ignore[misc]
                for name, model in (("tuned", tuned), ("plain", plain))
            }
            with torch.no_grad():
                timed = _rounds(runs, repeats)
            ratio = _ratio(timed["plain"], timed["tuned"])
            chosen = str(report.kernels[0].division or "left to torch")
            plain_ms = 1e3 * timed["plain"].median_s
            print(
                f"  {str(dtype)[6:]:8} {name:24} N = {batch:2} {plain_ms:8.1f} ms  {ratio:.2f}  "
                f"{chosen}"
            )


def networks(repeats: int) -> None:
    """Tune networks without a limit; run iterations in turns with plain torch, which runs twice."""
    print("\nIterations of networks without a limit: plain torch over tuned, and over itself")
    for name, batch, side in (
        ("alexnet", 16, 224),
        ("vgg11", 4, 112),
        ("squeezenet1_1", 16, 224),
        ("resnet18", 4, 96),
        ("googlenet", 4, 96),
    ):
        torch.manual_seed(0)
        options = {"aux_logits": False} if name == "googlenet" else {}
        plain = build(f"torchvision/{name}", **options)
        images = torch.randn(batch, 3, side, side)
        tuned = copy.deepcopy(plain)
        report = tune(tuned, images, 512 * MIB, strict=False, cache=None)
        kernels = [entry.division for entry in report.kernels if entry.division]
        divided = sum(len(division.parts) > 1 for division in kernels)

        def forward(model: nn.Module, images: torch.Tensor = images) -> None:
            with torch.no_grad():
                model(images)

        def step(model: nn.Module, images: torch.Tensor = images) -> None:
            model.zero_grad()
            model(images).square().mean().backward()

        told = []
        for run in (forward, step):
            models = {"tuned": tuned, "plain": plain, "again": copy.deepcopy(plain)}
            timed = _rounds({name: partial(run, model) for name, model in models.items()}, repeats)
            told += [
                f"{run.__name__} {_ratio(timed['plain'], timed['tuned']):.3f}, itself "
                f"{_ratio(timed['plain'], timed['again']):.3f} "
                f"({1e3 * timed['plain'].median_s:.0f} ms)"
            ]
        print(
            f"  {name:14} N = {batch:2}, {side}²: {'; '.join(told)}; of {len(report.kernels)} "
            f"kernels {len(kernels)} not torch's own, {divided} of these divided"
        )


def rivals(repeats: int) -> None:
    """Run AlexNet's iterations under torch's settings on CUDA, and tuned within the cap."""
    settings_run = runs.rivals("gpu")[0]
    print(f"\n{runs.CAFFE}, N = 256, torch's own settings, median of {repeats} iterations")
    if not torch.cuda.is_available():
        print("  skipped: cudnn.benchmark and the cap of its workspace need CUDA")
        return
    shared = {"processes": 1, "repeats": repeats}
    every = {"rivals": list(iterating.SETTINGS)[1:]}
    torchs = iterating.iterations(settings_run.config | shared | every, 0, None, "cuda").metrics
    ways = {"ways": [["WR", None, "undivided"], ["WR", None, "powerOfTwo"]]}
    config = runs.iterations("gpu", runs.CAFFE).config | shared | ways
    tuned = iterating.iterations(config, 0, None, "cuda").metrics
    for found in (torchs, tuned):
        for name, samples in found["samples_s"][0].items():
            if name in found.get("rivals", {}):
                seen = f", {found['rivals'][name]['seen_bytes'] / MIB:,.0f} MiB of workspace"
            else:
                seen = ""
            print(f"  {name:36} {1e3 * statistics.median(samples):8.2f} ms{seen}")
    for name, found in torchs["rivals"].items():
        if "error" in found:
            print(f"  {name}: failed, {found['error']}")


def optimisers(repeats: int) -> None:
    """Time the optimisers on made-up input."""
    generator = random.Random(0)
    ways = made_up_kernel(generator)
    calls: dict[str, Callable[[], object]] = {
        "pareto_front, B = 256, 6 algorithms, all (target 500)": lambda: pareto_front(256, ways),
    }
    for kernels, variables, target in ((159, 562, 250), (465, 2500, 1000)):
        fronts, total = made_up_fronts(generator, kernels, variables)
        calls[f"WD, {kernels} kernels, {variables} variables (target {target})"] = (
            lambda f=fronts, t=total: assign_workspaces(f, t)  # type: ignore[misc]
        )
    print("\nOptimisers")
    for name, call in calls.items():
        print(f"  {name}: {1e3 * _rounds({name: call}, repeats)[name].median_s:.1f} ms")


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--where", action="store_true", help="look for where dividing pays instead")
    parser.add_argument("--rivals", action="store_true", help="torch's settings on CUDA instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = keep_freed_memory()
    device = describe_device("cpu")
    print(
        f"{device['name']}, {device['threads']} threads, torch {torch.__version__}, median of "
        f"{arguments.repeats} rounds, freed memory {'kept' if kept else 'not kept'}"
    )
    if arguments.rivals:
        rivals(arguments.repeats)
        return
    if arguments.where:
        chains(arguments.repeats)
        layers(arguments.repeats)
        networks(arguments.repeats)
        return
    optimisers(min(5, arguments.repeats))
    gain = conv2(arguments.repeats)
    conv2_in_processes(gain, arguments.repeats, arguments.threads, arguments.processes)
    alexnet(arguments.repeats)


if __name__ == "__main__":
    main()
