"""One measurement in a process of its own: torch's CUDA allocator is chosen before CUDA is used."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from repro.experiments.design import Outcome
from repro.experiments.outofcore.measuring import is_refusal, measure
from repro.measure import Timing
from repro.measure.accelerator import HostMemoryError

_ANSWER = "outcome: "
# Threads touch the memory before it is pinned: 4 GiB took 0.59 s instead of 1.48 by an H100.
_PINNING = ("pinned_use_cuda_host_register:True", "pinned_num_register_threads:8")


def measure_in_child(config: Mapping[str, Any], device: str) -> Outcome:
    """Run `measuring.measure` in a new process, and return what it returns.

    Raises:
        HostMemoryError: The host had not the memory that the child wanted to pin.
        torch.OutOfMemoryError: The child ran out of the device's memory.
        RuntimeError: It failed otherwise; the text ends as its error output does.
    """
    options = list(_PINNING)
    if config["mode"] == "expandable_segments":
        options.append("expandable_segments:True")
    environment = dict(os.environ) | {"PYTORCH_CUDA_ALLOC_CONF": ",".join(options)}
    done = subprocess.run(
        [sys.executable, "-m", "repro.experiments.outofcore.child", device],
        input=json.dumps(dict(config)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        raise RuntimeError(f"the measuring process failed: {done.stderr[-2000:]}")
    answer = json.loads(answers[-1].removeprefix(_ANSWER))
    if "host_memory" in answer:
        raise HostMemoryError(answer["host_memory"])
    if "out_of_memory" in answer:
        raise torch.OutOfMemoryError(answer["out_of_memory"])
    timings = {
        name: Timing(tuple(samples), config["warmup"])
        for name, samples in answer["timings"].items()
    }
    return Outcome(answer["metrics"], timings, answer["peak_bytes"])


def main() -> None:
    """Measure the configuration on standard input, and print the outcome."""
    config = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        outcome = measure(config, sys.argv[1])
        answer = {
            "metrics": dict(outcome.metrics),
            "timings": {name: timing.samples_s for name, timing in outcome.timings.items()},
            "peak_bytes": outcome.peak_bytes,
        }
    except HostMemoryError as error:
        answer = {"host_memory": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_refusal(error):
            raise
        answer = {"out_of_memory": str(error)[:2000]}
    print(_ANSWER + json.dumps(answer))


if __name__ == "__main__":
    main()
