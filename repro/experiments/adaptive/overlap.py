"""How much of the averaging hides under computation? (Section IV-B, Figure 9)

The paper's overlap is measured where processes share two cores: layers sleep for as long as they
would compute, since a process asleep takes no core from those that average. The ratio of
communication to computation is that of the paper's cluster by `projection`, whose model takes the
overlap to be perfect.
"""

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from repro.adaptive import DataParallel, join_processes, leave_processes
from repro.experiments.adaptive import projection
from repro.experiments.adaptive.worker import TIMEOUT_S, launch
from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.judge import Estimate, mean_of
from repro.experiments.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = (64, 128, 256)  # of the paper's cluster: few of them leave little to hide
_SCALE = {  # processes, gradients a layer (one bucket each), repeats
    "smoke": (2, 2**12, 2),
    "quick": (8, 2**15, 9),
    "gpu": (8, 2**15, 9),  # on the CPU, as the paper's nodes are
    "paper": (8, 2**15, 9),
}


class _Sleep(torch.autograd.Function):
    """Adds the first weight to x; sleeps, and twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.size = seconds, len(weight)
        time.sleep(seconds)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], gradients[0].sum().expand(ctx.size), None


class SleepingLayer(nn.Module):
    """A layer that sleeps where it would compute.

    Attributes:
        seconds: For which each of them sleeps in the forward pass.
    """

    seconds = 0.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the first weight."""
        moved: torch.Tensor = _Sleep.apply(x, self.weight, SleepingLayer.seconds)
        return moved


def asleep(config: dict[str, Any], seed: int, data: None, device: str) -> Outcome:
    """Measure steps whose layers sleep, with the averaging within them and after them."""
    return Outcome({"ratios": launch(config, config["processes"], module=__name__)})


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Measure in this process with the others; return what rank 0 found, by ratio.

    Of each ratio the seconds of computation of a step, and by round those of a step whose layers
    sleep (``within``) and of one that sleeps first (``after``).
    """
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
        """Return the seconds of a step that computes for some seconds a layer and pass."""
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
    found = {}
    for name, ratio in config["ratios"].items():
        computation = float(alone) / ratio
        seconds = computation / (3 * layers)
        rows = [
            (a_step(seconds, within=False), a_step(seconds, within=True))
            for _ in range(config["repeats"])
        ]
        after, within = map(list, zip(*rows, strict=True))
        found[name] = {"computation_s": computation, "after_s": after, "within_s": within}
    parallel.close()
    leave_processes()
    return {} if rank else found


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurement at the ratios of the modelled cluster."""
    processes, size, repeats = _SCALE[profile]
    modelled = projection.breakdowns()["fitted"][1]
    ratios = {
        str(n): round(modelled[n]["communication"] / modelled[n]["computation"], 3) for n in NODES
    }
    config = {
        "processes": processes,
        "layers": 8,
        "size": size,
        "steps": 4,
        "repeats": repeats,
        "ratios": ratios,
    }
    return [Run("asleep", config, seeds=(0,), label=f"{processes} processes, layers asleep")]


def hidden(row: dict[str, Any]) -> Estimate:
    """Return the share of what can hide that does, in percent, by the rounds.

    That is the time which the averaging within a step saves, over the shorter of computation and
    communication.
    """
    computation = row["computation_s"]
    can_hide = min(computation, statistics.median(row["after_s"]) - computation)
    shares = [
        100 * (after - within) / can_hide
        for after, within in zip(row["after_s"], row["within_s"], strict=True)
    ]
    return mean_of(shares, unit="%", digits=0, trials="rounds")


def table(results: Results) -> list[dict[str, Any]]:
    """Return by nodes of the modelled cluster what hides, and what blocks beside the model's."""
    modelled = projection.breakdowns()["fitted"][1]
    return [
        {
            "nodes modelled": int(nodes),
            "communication over computation": f"×{record.config['ratios'][nodes]:.2f}",
            "processes here": record.config["processes"],
            "computation, asleep (ms)": f"{1e3 * row['computation_s']:.1f}",
            "step, averaging after (ms)": f"{1e3 * statistics.median(row['after_s']):.1f}",
            "step, averaging within (ms)": f"{1e3 * statistics.median(row['within_s']):.1f}",
            "hidden, of what can (%)": str(hidden(row)),
            "blocked, measured (%)": f"{100 * _blocked(row):.0f}",
            "blocked, model (%)": f"{100 * _modelled(modelled[int(nodes)]):.0f}",
        }
        for record in results.ok("asleep")
        for nodes, row in _in_order(record.metrics["ratios"]).items()
    ]


def _in_order(ratios: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(ratios.items(), key=lambda item: int(item[0])))


def _blocked(row: dict[str, Any]) -> float:
    step = statistics.median(row["within_s"])
    return 1 - float(row["computation_s"]) / step


def _modelled(row: dict[str, float]) -> float:
    return row["blocked"] / (row["computation"] + row["blocked"])


def figure(results: Results) -> "Figure":
    """Draw steps with the averaging after and within the computation, by nodes modelled."""
    from repro.plots import legend_below, new_axes

    drawn, axes = new_axes(1, 1, 7, 3.2)
    axis = axes[0, 0]
    record = results.first("asleep")
    rows = _in_order(record.metrics["ratios"]) if record else {}
    for place, row in enumerate(rows.values()):
        for shift, (name, seconds, colour) in enumerate(
            (
                ("computation, asleep", [row["computation_s"]], "#0072b2"),
                ("step, averaging after", row["after_s"], "#d8dde6"),
                ("step, averaging within", row["within_s"], "#e69f00"),
            )
        ):
            middle = statistics.median(seconds)
            spread = [[middle - min(seconds)], [max(seconds) - middle]]
            axis.bar(
                place + 0.27 * (shift - 1),
                1e3 * middle,
                0.25,
                yerr=None if len(seconds) < 2 else [[1e3 * s for s in end] for end in spread],
                color=colour,
                label=None if place else name,
            )
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set_xlabel("nodes modelled")
    axis.set_ylabel("time of a step (ms)")
    axis.grid(axis="x", visible=False)
    axis.set_title(
        "ours: layers asleep, gloo; ratios of the paper's cluster (SIMULATED)", fontsize=9
    )
    legend_below(drawn, 3)
    return drawn


OVERLAP = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Layers sleep for as long as they would compute at the ratio of the modelled cluster "
        "(SIMULATED); averaging is real, over gloo. Blocked: share of a step that is not "
        "computation.",
        lambda results: (),
    ),
)
