"""What the experiments of out-of-core training run, on toys; traces, rates and fitting budgets."""

import gc
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from repro.experiments.outofcore import building, measuring, runs
from repro.experiments.outofcore.building import limit_bytes, published_times, trace_at
from repro.experiments.outofcore.fitting import best_fit, can_train, chunked, fit, largest_budget
from repro.experiments.outofcore.runs import PIX2PIXHD, RESNET
from repro.measure import MemoryMeter, accelerator
from repro.measure.accelerator import HostMemoryError
from repro.outofcore import Function, Trace, plan_swaps, record

pytestmark = pytest.mark.usefixtures("memory_is_not_kept")
SMOKE = runs.MODELS["smoke"]
SMALL = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [8, 8]}
_TOY = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [12, 12]}
_MEASURED = _TOY | {
    "role": RESNET, "warmup": 3, "repeats": 2, "threads": 1, "base_batch": 8,
    "limit_between": [8, 16],
}  # fmt: skip


class TestMeasured:
    def test_what_does_not_fit_runs_out_of_memory(self):
        with pytest.raises(torch.OutOfMemoryError, match="simulated limit"):
            measuring.measured(_MEASURED | {"mode": "in_core", "batch": 32}, 0, None, "cpu")
        with pytest.raises(torch.OutOfMemoryError, match="no budget can be served"):
            measuring.measured(_MEASURED | {"mode": "schedule_va", "batch": 4000}, 0, None, "cpu")

    @pytest.mark.slow
    def test_a_plan_that_runs_otherwise_than_it_was_fitted_gets_a_smaller_budget(self, monkeypatch):
        config, refused = _MEASURED | {"mode": "schedule", "batch": 32}, []

        def once(plan, make):
            if not refused:
                refused.append(plan.budget_bytes)
                return None
            return fit(plan, make)

        monkeypatch.setattr(measuring, "fit", once)
        metrics = measuring.measured(config, 0, None, "cpu").metrics
        smallest = trace_at(_TOY, 32).smallest_budget
        assert metrics["budget_bytes"] == max(smallest, int(0.9 * refused[0])) < refused[0]


class TestChild:
    """On a GPU each measurement has a process of its own; the same on the CPU."""

    @pytest.mark.slow
    def test_it_returns_what_it_measured(self):
        outcome = measuring.measure_in_child(_MEASURED | {"mode": "schedule", "batch": 32}, "cpu")
        assert len(outcome.timings["iteration"].samples_s) == 2
        assert outcome.timings["iteration"].warmup == 3 and outcome.metrics["bytes_moved"] > 0
        assert outcome.peak_bytes == outcome.metrics["held_bytes"]


@pytest.mark.gpu
class TestAccelerator:
    """The same on an accelerator: its own allocator, under a limit that is really set."""

    @pytest.fixture(autouse=True)
    def nothing_is_held(self, device):
        """Free what other tests left: cuBLAS keeps a workspace for each stream that it ran on."""
        gc.collect()
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        accelerator.empty_cache(device)

    @pytest.mark.parametrize(
        "mode", ["in_core", "schedule", "checkpointing", "save_on_cpu", "offload"]
    )
    def test_what_the_allocator_takes_is_within_the_limit(self, device, mode):
        outcome = measuring.measure(_MEASURED | {"mode": mode, "batch": 32}, str(device))
        metrics = outcome.metrics
        assert 0 < metrics["held_bytes"] <= metrics["reserved_bytes"] <= metrics["limit_bytes"]
        assert outcome.peak_bytes == metrics["reserved_bytes"]
        assert set(outcome.timings) == {"iteration"}
        if mode == "schedule":
            assert metrics["held_bytes"] <= metrics["budget_bytes"]
            assert metrics["budget_bytes"] <= limit_bytes(_MEASURED)
            assert metrics["bytes_moved"] > 0 and metrics["replayed"] >= 2
            assert metrics["host_bytes"] > 0
        assert accelerator.limit_bytes(device) == accelerator.total_bytes(device)  # put back

    def test_chunks_are_simulated_where_they_are_not_cudas(self, device):
        if device.type == "cuda":
            pytest.skip("CUDA has them, in a process of its own")
        config = _MEASURED | {"mode": "schedule_va", "batch": 32}
        outcome = measuring.measured(config, 0, None, str(device))
        metrics = outcome.metrics
        assert metrics["held_bytes"] <= metrics["reserved_bytes"] <= metrics["limit_bytes"]
        assert metrics["bytes_moved"] > 0
        with pytest.raises(NotImplementedError, match="expandable segments are CUDA's"):
            measuring.measured(_MEASURED | {"mode": "expandable_segments"}, 0, None, str(device))

    def test_a_lack_of_the_host_is_no_lack_of_the_device(self, device, monkeypatch):
        """It says which memory was short, and tries no smaller budgets, which would need more."""
        tried = []

        def short(*given):
            tried.append(given)
            raise HostMemoryError("the host cannot provide 5 bytes to pin: out of memory")

        monkeypatch.setattr(accelerator, "empty_pinned", short)
        with pytest.raises(HostMemoryError):
            measuring.measure(_MEASURED | {"mode": "schedule", "batch": 32}, str(device))
        assert len(tried) == 1


TOY = {"model": {"name": "resnet_cifar", "depth": 8, "width": 2}, "image": [8, 8]}
TRACED = [TOY, SMOKE[PIX2PIXHD]]
NAMES = [toy["model"]["name"] for toy in TRACED]


def gradients_of(config, checkpointing=False):
    """Return the gradients that an optimizer's step is given."""
    seen: list[torch.Tensor] = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.extend(
            p.grad.clone() for group in optimizer.param_groups for p in group["params"]
        )
    )
    try:
        building.training_step(config, "cpu", checkpointing)()
    finally:
        handle.remove()
    return seen


class TestTraces:
    @pytest.mark.slow
    @pytest.mark.parametrize("toy", TRACED, ids=NAMES)
    def test_an_extended_trace_is_that_of_training(self, toy):
        computed = record(building.training_step(toy | {"batch": 7}, "cpu"), warmup=2, device="cpu")
        extended = trace_at(toy, 7)
        assert extended.peak_bytes == computed.peak_bytes
        assert extended.smallest_budget == computed.smallest_budget
        if toy["model"]["name"] == "pix2pixhd":  # its gradients of views go through other copies
            return
        assert extended.functions == computed.functions and extended.sizes == computed.sizes
        assert extended.deaths == computed.deaths and extended.kinds == computed.kinds

    def test_iterations_that_change_with_the_batch_size_are_refused(self, monkeypatch):
        def training_step(config, device):
            model = nn.Linear(3, 3)

            def step() -> None:
                for _ in range(config["batch"]):
                    model(torch.randn(2, 3)).sum().backward()

            return step

        monkeypatch.setattr(building, "training_step", training_step)
        with pytest.raises(ValueError, match="differ in more than sizes"):
            trace_at({"model": {"name": "changing"}, "image": [1, 1]}, 5)

    @pytest.mark.slow
    @pytest.mark.parametrize("role", [RESNET, "DenseNet"])
    def test_checkpointing_changes_memory_and_no_gradient(self, role):
        gradients, peaks = [], []
        for checkpointing in (False, True):
            with MemoryMeter("cpu") as meter:
                gradients.append(gradients_of(SMOKE[role] | {"batch": 24}, checkpointing))
            peaks.append(meter.peak_bytes)
        assert len(gradients[0]) == len(gradients[1]) > 10
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert (peaks[1] < peaks[0]) == (role == RESNET)


def test_planted_rates_are_found():
    """A quarter of a second, and 10 MB a second beyond it."""
    toy, batches = TRACED[0], [4, 16, 64]
    planted = [0.25 + sum(trace_at(toy, batch).needs_bytes) / 1e7 for batch in batches]
    rates = [batch / seconds for batch, seconds in zip(batches, planted, strict=True)]
    baseline = toy | {"batches": batches, "images_per_s": rates}
    for batch, seconds in zip(batches, planted, strict=True):
        trace = trace_at(toy, batch)
        found = published_times(trace, baseline)
        assert found.sum() == pytest.approx(seconds)
        assert found[0] == pytest.approx(0.25 / len(found) + trace.needs_bytes[0] / 1e7)


def random_chain(seed: int) -> Trace:
    """Return forward and backward passes over layers of random sizes."""
    rng = random.Random(seed)
    layers = rng.randint(4, 10)
    sizes = {f"a{i}": rng.randint(1_000, 40_000) for i in range(layers + 1)}
    functions = [Function("in", (), ("a0",))]
    functions += [Function("forward", (f"a{i}",), (f"a{i + 1}",)) for i in range(layers)]
    sizes[f"g{layers}"] = sizes[f"a{layers}"]
    functions.append(Function("loss", (f"a{layers}",), (f"g{layers}",)))
    for i in reversed(range(layers)):
        sizes[f"g{i}"] = sizes[f"a{i}"]
        functions.append(Function("backward", (f"g{i + 1}", f"a{i}"), (f"g{i}",)))
    return Trace(tuple(functions), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("allocator", [best_fit, chunked])
@pytest.mark.parametrize("seed", range(3))
def test_fitting_against_trying_many_budgets(seed, allocator):
    trace = random_chain(seed)
    limit = int(random.Random(seed).uniform(0.6, 1.1) * trace.peak_bytes)
    make, low = partial(allocator, limit), trace.smallest_budget
    tried = [low + (limit - low) * k // 200 for k in range(201)]
    served = [budget for budget in tried if budget >= low and fit(plan_swaps(trace, budget), make)]
    found = largest_budget(trace, limit, make)
    if found is None:
        assert low not in served and limit not in served
        assert not can_train(trace, limit, make)
        return
    budget = found.plan.budget_bytes
    assert found.plan.verify() <= budget <= limit and found.peaks["reserved_bytes"] <= limit
    # No smaller than what is served of the ends and quarters, and beyond it something is not.
    starts = [low + (limit - low) * k // 4 for k in range(5)]
    assert budget >= max(start for start in starts if start in served)
    if budget < limit:
        assert limit not in served
    assert can_train(trace, limit, make)


def test_float16s_loss_is_scaled_and_its_gradients_are_not():
    gradients = {}
    for precision in ("float32", *runs.HALVES):
        seen = gradients_of(SMALL | {"precision": precision, "batch": 8})
        gradients[precision] = torch.cat([gradient.flatten() for gradient in seen])
    for precision in runs.HALVES:
        off = (gradients[precision] - gradients["float32"]).norm()
        assert 0 < off < 0.2 * gradients["float32"].norm()
