"""What micro-batching convolutions gains and costs: the targets of `repro.microconv`.

    python -m benchmarks.microconv [--repeats 15] [--threads 2] [--processes 5]

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
"""

import argparse
import copy
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch
from scipy import stats

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
from repro.microconv.backends import choose, run_division
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
    bench = Bench(choose(None, "cpu"), BenchmarkCache(None), max_error=1e-4)
    found = bench.candidates(kernel, batch, micro_batch_sizes(batch, "powerOfTwo"), 64 * MIB)
    limit = limit_mib * MIB
    divisions: dict[str, Division] = {
        "divided": best_division(batch, found, limit),
        "undivided": best_division(batch, {batch: found[batch]}, limit),
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
    own = max(way.workspace_bytes for way in found[batch] if way.algorithm == "torch:native")
    print(
        f"  {'torch':10} {1e3 * timed['torch'].median_s:7.1f} ms  {own / MIB:5.1f} MiB  (no limit)"
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


def optimisers(repeats: int) -> None:
    """Time the optimisers on made-up input."""
    generator = random.Random(0)
    found = made_up_kernel(generator)
    calls: dict[str, Callable[[], object]] = {
        "pareto_front, B = 256, 6 algorithms, all (target 500)": lambda: pareto_front(256, found),
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
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = keep_freed_memory()
    device = describe_device("cpu")
    print(
        f"{device['name']}, {device['threads']} threads, torch {torch.__version__}, median of "
        f"{arguments.repeats} rounds, freed memory {'kept' if kept else 'not kept'}"
    )
    optimisers(min(5, arguments.repeats))
    gain = conv2(arguments.repeats)
    conv2_in_processes(gain, arguments.repeats, arguments.threads, arguments.processes)
    alexnet(arguments.repeats)


if __name__ == "__main__":
    main()
