"""The virtual clock, and out-of-core training by it: what is simulated is what runs."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from repro.experiments.outofcore.building import training_step
from repro.outofcore import OutOfCore, host, record, residency, simulation
from simulated_device.checking import deferred
from simulated_device.mutations import Omission, planted
from simulated_device.timing import Costs, virtual_time

SIM = torch.device("sim", 0)
COSTS = Costs(kernel_s=1e-6, bytes_per_s=4e9, copy_s=1e-6, in_bytes_per_s=4e8, out_bytes_per_s=3e8)
BYTES = 2**20
ONE_S = COSTS.kernel_s + BYTES / COSTS.bytes_per_s  # of a kernel in place
IN_S = COSTS.copy_s + BYTES / COSTS.in_bytes_per_s


def near(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


class TestClock:
    @pytest.fixture
    def tensors(self, sim):
        device = [torch.ones(BYTES // 4, device=sim) for _ in range(2)]
        return *device, torch.ones(BYTES // 4, pin_memory=True)

    def test_what_the_host_waits_for_delays_what_it_queues(self, tensors):
        a, b, pinned = tensors
        side = torch.Stream(SIM)
        with virtual_time(COSTS) as now:
            with side:
                a.copy_(pinned, non_blocking=True)
                end = torch.Event(SIM)
                end.record(side)
            assert not end.query()
            end.synchronize()
            assert end.query()
            begin, end = (torch.Event(SIM, enable_timing=True) for _ in range(2))
            begin.record()
            b.mul_(2)
            end.record()
            assert now() == near(IN_S + ONE_S)
            end.synchronize()
            assert begin.elapsed_time(end) / 1e3 == near(ONE_S)  # events measure by it

    def test_deferred_work_has_no_time(self, sim):
        with virtual_time(COSTS), pytest.raises(RuntimeError, match="virtual time"), deferred():
            pass
        with deferred(), pytest.raises(RuntimeError, match="virtual time"), virtual_time(COSTS):
            pass


def small(model: nn.Module, *size: int) -> Callable[[], None]:
    """Return an iteration of Adam on a mini-batch of random numbers."""
    network = model.to(SIM)
    optimizer = torch.optim.Adam(network.parameters())
    x = torch.randn(*size).to(SIM)

    def step() -> None:
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()

    return step


def perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


def attention() -> nn.Module:
    layer = partial(nn.TransformerEncoderLayer, 32, 2, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(layer(), layer())


RESNET = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [12, 12], "batch": 16}
NETWORKS: dict[str, Callable[[], Callable[[], None]]] = {
    "residual": lambda: training_step(RESNET, "sim:0"),
    "perceptron": lambda: small(perceptron(), 128, 64),
    "attention": lambda: small(attention(), 8, 24, 32),
}
THOROUGH = (
    ("residual", 0.05, "window"), ("residual", 0.4, "window"), ("residual", 0.3, "paper"),
    ("residual", 0.3, "on_demand"), ("residual", 0.6, "lms"), ("residual", 0.8, "vdnn"),
    ("perceptron", 0.2, "window"), ("attention", 0.4, "packed"),
)  # fmt: skip
# Network, share of the way from the smallest budget to what training needs, schedule.
CASES = [
    ("residual", 0.2, "window"),
    ("residual", 0.3, "packed"),
    ("perceptron", 0.4, "paper"),
    ("attention", 0.2, "window"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH),
]


@cache
def budget(network: str, share: float) -> int:
    """Return the bytes at a share of the way from the smallest budget to what training needs."""
    trace = record(NETWORKS[network](), warmup=2, device=SIM)
    low = trace.smallest_budget
    return low + int(share * (trace.peak_bytes - low))


def iteration(network: str, share: float, schedule: str) -> tuple[float, float, float]:
    """Return what an iteration takes on the device, what is simulated of its plan, and computing.

    The functions take what the engine's own timer has measured of them.
    """
    budget_bytes = budget(network, share)
    with virtual_time(COSTS) as now:
        step = NETWORKS[network]()
        with OutOfCore(budget_bytes, window_bytes=None, device=SIM, schedule=schedule) as block:

            def run(iterations: int) -> float:
                for _ in range(iterations):
                    step()
                    block.step()
                return now()

            began = run(6)
            before = block.statistics.replayed, block.statistics.plans
            on_demand, took = block.statistics.on_demand, (run(2) - began) / 2
            done = block.statistics
            assert (done.replayed, done.plans) == (before[0] + 2, before[1])
            assert done.on_demand == on_demand  # the plan has asked for all that came
            recorded, plan = block._iterations.recorded, block.plan
    assert recorded is not None and plan is not None and plan.bytes_moved
    assert recorded.trace.functions == plan.trace.functions
    rates = COSTS.in_bytes_per_s, COSTS.out_bytes_per_s
    foretold = plan.simulate(recorded.times, rates, COSTS.copy_s)
    return took, foretold.time_s, foretold.compute_s


class TestOutOfCore:
    @pytest.mark.parametrize(("network", "share", "schedule"), CASES)
    def test_an_iteration_takes_what_is_simulated(self, sim, network, share, schedule):
        took, foretold, compute = iteration(network, share, schedule)
        assert took == pytest.approx(foretold, rel=0.05)
        assert took > 1.05 * compute  # so that copies count

    STREAMS = "torch.Stream(device), torch.Stream(device)"
    RECORD = "        event.record(stream)"
    IN, OUT = "self.bytes_in += variable.nbytes", "self.bytes_out += variable.nbytes"
    FAULTS = (
        # Of the engine: one stream for both directions; no overlap with computing.
        Omission(host, STREAMS, "(torch.Stream(device),) * 2"),
        Omission(host, RECORD, f"{RECORD}; current.wait_event(event)"),
        Omission(residency, IN, f"{IN}; self.arrive(variable)"),
        Omission(residency, OUT, f"{OUT}; self.settle(variable)"),
        # Of the simulation: what copies and functions wait for.
        Omission(simulation, "max(self.in_free, self.compute_free)", "self.in_free"),
        Omission(
            simulation,
            "max(self.out_free, self.compute_free, self.arrives.get(name, 0.0))",
            "self.out_free",
        ),
        Omission(
            simulation, "self.compute_free = max(self.compute_free, self.leaves.pop(name, 0.0))"
        ),
        Omission(simulation, "start = max(start, self.arrives.pop(name, 0.0))"),
    )

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_a_planted_fault_is_found(self, sim, fault):
        with planted(fault):
            took, foretold, _ = iteration("residual", 0.05, "window")
        assert took != pytest.approx(foretold, rel=0.05)
