"""Traces that are extended, times of a published device, largest budgets that are served."""

import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from repro.experiments.outofcore import building, modelled, settings
from repro.experiments.outofcore.fitting import (
    GIB,
    best_fit,
    can_train,
    chunk_bytes,
    chunked,
    in_core,
    largest_budget,
    serve,
)
from repro.experiments.outofcore.modelled import Rates, trace_at
from repro.measure import MemoryMeter
from repro.outofcore import Function, Trace, plan_swaps, record
from repro.outofcore.allocator import MIB, BestFitAllocator

TOYS = [
    {"model": {"name": "resnet_cifar", "depth": 8, "width": 2}, "image": [8, 8]},
    settings.MODELS["smoke"][settings.PIX2PIXHD],
]
names = [toy["model"]["name"] for toy in TOYS]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestTraces:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "toy", [TOYS[0], pytest.param(TOYS[1], marks=pytest.mark.thorough)], ids=names
    )
    def test_an_extended_trace_is_that_of_training(self, toy):
        step = building.training_step(toy | {"batch": 7}, "cpu")
        computed = record(step, warmup=2, device="cpu")
        extended = trace_at(toy, 7)
        assert extended.peak_bytes == computed.peak_bytes
        assert extended.smallest_budget == computed.smallest_budget
        if toy["model"]["name"] == "pix2pixhd":  # its gradients of views go through other copies
            return
        assert extended.functions == computed.functions
        assert extended.sizes == computed.sizes
        assert extended.deaths == computed.deaths
        assert extended.kinds == computed.kinds

    def test_iterations_that_change_with_the_batch_size_are_refused(self, monkeypatch):
        def training_step(config, device):
            model = nn.Linear(3, 3)

            def step() -> None:
                for _ in range(config["batch"]):
                    model(torch.randn(2, 3)).sum().backward()

            return step

        monkeypatch.setattr(modelled, "training_step", training_step)
        with pytest.raises(ValueError, match="differ in more than sizes"):
            trace_at({"model": {"name": "changing"}, "image": [1, 1]}, 5)

    @pytest.mark.slow
    @pytest.mark.parametrize("role", settings.ROLES)
    def test_checkpointing_changes_memory_and_no_gradient(self, role):
        config = settings.MODELS["smoke"][role] | {"batch": 24}
        seen: list[torch.Tensor] = []
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: seen.extend(
                p.grad.clone() for group in optimizer.param_groups for p in group["params"]
            )
        )
        gradients, peaks = [], []
        try:
            for checkpointing in (False, True):
                seen.clear()
                with MemoryMeter("cpu") as meter:
                    building.training_step(config, "cpu", checkpointing)()
                gradients.append(list(seen))
                peaks.append(meter.peak_bytes)
        finally:
            handle.remove()
        assert len(gradients[0]) == len(gradients[1]) > 10
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert (peaks[1] < peaks[0]) == (
            role in (settings.RESNET, settings.PIX2PIXHD, settings.DEEPLAB)
        )


class TestRates:
    def test_planted_rates_are_found(self):
        toy, planted = TOYS[0], Rates(0.25, 1e7)
        batches = [4, 16, 64]
        rates = [batch / planted.times(trace_at(toy, batch)).sum() for batch in batches]
        found = Rates.fit(toy, batches, rates)
        assert found.fixed_s == pytest.approx(0.25)
        assert found.bytes_per_s == pytest.approx(1e7)

    def test_one_throughput_fixes_the_rate_alone(self):
        toy = TOYS[0]
        found = Rates.fit(toy, [8], [4.0])
        assert found.fixed_s == 0
        assert found.times(trace_at(toy, 8)).sum() == pytest.approx(2.0)
        assert found.times(trace_at(toy, 24)).sum() == pytest.approx(
            2.0 * sum(trace_at(toy, 24).needs_bytes) / sum(trace_at(toy, 8).needs_bytes)
        )

    def test_times_are_in_proportion_to_bytes(self):
        trace = Trace((Function("a", (), ("x",)), Function("b", ("x",), ("y",))), {"x": 3, "y": 5})
        assert Rates(0.5, 2.0).times(trace) == pytest.approx([0.25 + 1.5, 0.25 + 4.0])

    def test_the_papers_throughputs_in_core(self):
        base = settings.simulated(settings.RESNET, 64).config["baseline"]
        rates = Rates.fit(base, base["batches"], base["images_per_s"])
        for batch, published in zip(base["batches"], base["images_per_s"], strict=True):
            ours = batch / rates.times(trace_at(base, batch)).sum()
            assert ours == pytest.approx(published, rel=0.01)
        assert rates.fixed_s > 0


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


class TestFitting:
    def test_the_papers_limit_has_torchs_own_sizes(self):
        ours, theirs = best_fit(16 * GIB), BestFitAllocator(16 * GIB)
        assert vars(ours) == vars(theirs)
        assert chunk_bytes(16 * GIB) == 40 * MIB

    def test_sizes_are_in_proportion_to_the_limit(self):
        half, tiny = best_fit(8 * GIB), best_fit(100_000)
        assert half.large_segment_bytes == 10 * MIB
        assert half.small_bytes == MIB // 2
        assert chunk_bytes(8 * GIB) == 20 * MIB
        assert tiny.small_bytes >= 512
        assert tiny.capacity_bytes == chunked(100_000).capacity_bytes == 100_000

    @pytest.mark.slow
    @pytest.mark.parametrize("allocator", [best_fit, chunked])
    @pytest.mark.parametrize("seed", range(8))
    def test_against_trying_many_budgets(self, seed, allocator):
        trace = random_chain(seed)
        limit = int(random.Random(seed).uniform(0.6, 1.1) * trace.peak_bytes)
        make = partial(allocator, limit)
        low = trace.smallest_budget
        tried = [low + (limit - low) * k // 200 for k in range(201)]
        served = [
            budget
            for budget in tried
            if budget >= low and serve(plan_swaps(trace, budget), make) is not None
        ]
        found = largest_budget(trace, limit, make)
        if found is None:
            assert low not in served
            assert limit not in served
            assert not can_train(trace, limit, make)
            return
        budget = found.plan.budget_bytes
        assert found.plan.verify() <= budget <= limit
        assert found.report.peak_reserved_bytes <= limit
        # No smaller than what is served of the ends and quarters, and beyond it something is not.
        starts = [low + (limit - low) * k // 4 for k in range(5)]
        assert budget >= max(start for start in starts if start in served)
        if budget < limit:
            assert limit not in served
        assert can_train(trace, limit, make)

    def test_nothing_fits_below_what_one_function_needs(self):
        trace = random_chain(0)
        assert largest_budget(trace, trace.smallest_budget - 1, partial(chunked, 10**9)) is None

    def test_in_core(self):
        trace = random_chain(1)
        assert in_core(trace, partial(best_fit, 2 * trace.peak_bytes)) is not None
        assert in_core(trace, partial(best_fit, trace.peak_bytes - 1)) is None
        report = in_core(trace, partial(chunked, 2 * trace.peak_bytes))
        assert report.peak_requested_bytes == trace.peak_bytes
