"""How much of the averaging hides under computation? Section IV-B, Figure 9.

Processes share two cores: layers sleep for as long as they would compute, since a process asleep
takes no core from those that average. Ratios of times are the paper's cluster's by `projection`.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from repro.adaptive import DataParallel, join_processes, leave_processes
from repro.experiments.adaptive import projection
from repro.experiments.adaptive.read import artefact
from repro.experiments.adaptive.worker import TIMEOUT_S, launch
from repro.experiments.design import Chosen, Outcome, Run
from repro.experiments.judge import Estimate, mean_of
from repro.experiments.query import Results

NODES = (64, 128, 256)  # of the paper's cluster: few of them leave little to hide


class SleepingLayer(nn.Module):
    """A layer that sleeps where it would compute: `seconds`, twice as long in the backward pass."""

    seconds = 0.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the sum of the weights to x (B, ...)."""
        seconds = SleepingLayer.seconds
        time.sleep(seconds)
        moved = x + self.weight.sum()
        moved.register_hook(lambda _: time.sleep(2 * seconds))
        return moved


def asleep(config: dict[str, Any], seed: int, data: None, device: str) -> Outcome:
    """Measure steps whose layers sleep, with the averaging within them and after them."""
    return Outcome({"ratios": launch(config, config["processes"], function=measure)})


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Time steps whose layers sleep (``within``) and that sleep first (``after``), by ratio."""
    torch.set_num_threads(1)
    rank, processes = join_processes("cpu", TIMEOUT_S)
    layers, steps = config["layers"], config["steps"]
    model = nn.Sequential(*(SleepingLayer(config["size"]) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = DataParallel(
        model, torch.mean, optimizer, "all_to_all", bucket_bytes=0, check="off",
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    x = torch.zeros(processes, 1)

    def a_step(seconds: float, within: bool) -> float:
        """Time a step that computes for some seconds a layer and pass."""
        SleepingLayer.seconds = seconds if within else 0.0
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            if not within:
                for _ in range(3 * layers):
                    time.sleep(seconds)
            parallel.step(x)
            if not within:
                parallel.finish()
        parallel.finish()
        torch.distributed.barrier()
        return (time.perf_counter() - start) / steps

    a_step(0.0, within=False)
    alone = torch.tensor([statistics.median(a_step(0.0, within=False) for _ in range(3))])
    torch.distributed.all_reduce(alone, torch.distributed.ReduceOp.MAX)  # all sleep alike
    found: dict[str, Any] = {}
    for name, ratio in config["ratios"].items():
        computation = float(alone) / ratio
        found[name] = {"computation_s": computation, "after_s": [], "within_s": []}
        for _ in range(config["repeats"]):
            for kind in ("after", "within"):
                taken = a_step(computation / (3 * layers), within=kind == "within")
                found[name][f"{kind}_s"].append(taken)
    parallel.close()
    leave_processes()
    return {} if rank else found


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """The measurement at the ratios of the modelled cluster, on the CPU as the paper's nodes."""
    processes, size, repeats = (2, 2**12, 2) if profile == "smoke" else (8, 2**15, 9)
    costs = {nodes: projection.breakdown()[nodes] for nodes in NODES}
    ratios = {str(n): round(c.communication_s / c.computation_s, 3) for n, c in costs.items()}
    config = {"processes": processes, "layers": 8, "size": size, "steps": 4, "repeats": repeats}
    label = f"{processes} processes, layers asleep"
    return [Run("asleep", config | {"ratios": ratios}, seeds=(0,), label=label)]


def hidden(row: Mapping[str, Any]) -> Estimate:
    """Percent that hides within a step, of the shorter of computation and communication."""
    computation = row["computation_s"]
    can_hide = min(computation, statistics.median(row["after_s"]) - computation)
    pairs = zip(row["after_s"], row["within_s"], strict=True)
    shares = [100 * (after - within) / can_hide for after, within in pairs]
    return mean_of(shares, unit="%", digits=0, trials="rounds")


def table(results: Results) -> Iterator[dict[str, Any]]:
    """Hidden and blocked time by nodes of the modelled cluster, measured and modelled."""
    record = results.first("asleep")
    rows = record.metrics["ratios"].items() if record else ()
    for nodes, row in sorted((int(name), own) for name, own in rows):
        model = projection.breakdown()[nodes]
        measured = 1 - row["computation_s"] / statistics.median(row["within_s"])
        yield {
            "nodes modelled": nodes,
            "hidden, of what can (%)": str(hidden(row)),
            "blocked, measured (%)": f"{100 * measured:.0f}",
            "blocked, model (%)": f"{100 * model.blocked_s / model.total_s:.0f}",
            "n": len(row["after_s"]),
        }


OVERLAP = artefact("overlap", plan=runs, rows=table)
