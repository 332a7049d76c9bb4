import itertools
import random
from dataclasses import replace

import pytest

from repro.adaptive import MeasuredStep, ScalingModel, updates

PARTS = ("computation_s", "communication_s", "blocked_s")


def drawn(seed, **changes):
    draw = random.Random(seed)
    costs = {
        "sample_s": draw.uniform(0.5, 2), "overhead_s": draw.uniform(0, 2),
        "latency_s": draw.uniform(0, 0.05), "transfer_s": draw.uniform(0, 3),
        "overlap": draw.uniform(0, 1),
    }  # fmt: skip
    return ScalingModel(**(costs | changes))


def counted(model, schedule, samples, processes):
    """Seconds by kind: go through epochs and steps, samples dealt out one by one to nodes."""
    totals = dict.fromkeys((*PARTS, "total_s"), 0.0)
    sizes = [
        batch for batch, epochs in schedule for _ in range(0, samples, batch) for _ in range(epochs)
    ]
    for batch in sizes:
        nodes = [len(range(node, batch, processes)) for node in range(processes)]
        busy = sum(n > 0 for n in nodes)
        computation = model.sample_s * max(nodes) + model.overhead_s
        # All-to-all, then allgather, each with every other node.
        communication = 2 * (busy - 1) * (model.latency_s + model.transfer_s / busy)
        blocked = communication - min(communication, model.overlap * computation)
        seconds = computation, communication, blocked, computation + blocked
        for name, value in zip(totals, seconds, strict=True):
            totals[name] += value
    return totals, len(sizes)


SCHEDULE = [(4, 3), (8, 2), (24, 1), (100, 2)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("processes", [1, 2, 8, 40])
def test_the_model_against_counting(seed, processes):
    model = drawn(seed)
    wanted, steps = counted(model, SCHEDULE, 90, processes)
    assert model.training_time(SCHEDULE, 90, processes) == pytest.approx(wanted["total_s"])
    parts = model.breakdown(SCHEDULE, 90, processes)
    for part in PARTS:
        assert getattr(parts, part) == pytest.approx(wanted[part])
    assert parts.total_s == pytest.approx(wanted["total_s"]) and updates(SCHEDULE, 90) == steps
    alone = counted(model, SCHEDULE, 90, 1)[0]["total_s"]
    assert model.speedup(SCHEDULE, 90, processes) == pytest.approx(alone / wanted["total_s"])


def measured(model, points):
    steps = []
    for batch, processes in points:
        cost = model.step(batch, processes)
        steps.append(MeasuredStep(batch, processes, *(getattr(cost, part) for part in PARTS)))
    return steps


class TestFit:
    @pytest.mark.parametrize("seed", range(3))
    def test_recovers_what_made_the_measurements(self, seed):
        draw = random.Random(seed)
        alpha, beta, size, rounds = draw.uniform(1e-4, 1e-2), draw.uniform(1e-9, 1e-8), 4e8, 7
        model = drawn(seed, latency_s=rounds * alpha, transfer_s=beta * size)
        points = [(8, 1), (4, 2), (16, 2), (4, 4), (8, 8)]
        cases = itertools.product((10**4, 10**6, 10**8), (2, 4))
        messages = [(n, p, 2 * (p - 1) * (alpha + beta * n / p)) for n, p in cases]
        steps = measured(model, points)
        assert any(step.blocked_s > 0.02 * step.computation_s for step in steps)
        fitted = ScalingModel.fit(steps, messages, int(size), rounds)
        for name in vars(model):
            assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-6), name

    def test_steps_give_the_level_of_what_messages_give_the_ratio(self):
        model = ScalingModel(1.0, 0.5, 0.02, 2.0)
        messages = [(n, p, 2 * (p - 1) * (0.02 + n / p)) for n in (1, 2) for p in (2, 4)]
        steps = measured(model, [(8, 1), (4, 2), (8, 4)])
        slower = [replace(s, communication_s=3 * s.communication_s) for s in steps]
        fitted = ScalingModel.fit(slower, messages, 2)
        assert (fitted.latency_s, fitted.transfer_s) == pytest.approx((0.06, 6.0))
        # More is hidden than there is computation, such as below the step before: all can be.
        assert fitted.overlap == 1

    def test_of_one_process_knows_no_communication(self):
        fitted = ScalingModel.fit(measured(ScalingModel(0.2, 0.3), [(1, 1), (2, 1), (5, 1)]))
        assert (fitted.sample_s, fitted.overhead_s) == pytest.approx((0.2, 0.3))
        assert (fitted.latency_s, fitted.transfer_s) == (0, 0) and fitted.overlap == 1

    def test_errors(self):
        same = [MeasuredStep(8, 2, 1.0), MeasuredStep(4, 1, 1.0)]
        with pytest.raises(ValueError, match=r"2 points .* do not determine the costs"):
            ScalingModel.fit(same)
        falling = [MeasuredStep(1, 1, 4.0), MeasuredStep(100, 1, 0.1)]
        with pytest.raises(ValueError, match=r"does not grow with their number; give larger"):
            ScalingModel.fit(falling)
        steps = [MeasuredStep(1, 1, 1.0), MeasuredStep(2, 1, 2.0)]
        with pytest.raises(ValueError, match=r"2 points .* give at least two sizes"):
            ScalingModel.fit(steps, [(100, 2, 0.1), (100, 2, 0.2)])


class TestFitSpeedups:
    @pytest.mark.parametrize("overhead", [0.1, 0.6, 1.1])
    def test_the_overhead_is_found_between_its_bounds(self, overhead):
        model = ScalingModel(1.0, overhead, 0.02, 2.0)
        schedules = [([(16, 1)], 4), ([(16, 1)], 16), ([(64, 1)], 64), ([(256, 1)], 128)]
        points = [(s, [p], model.speedup(s, 800, p)) for s, p in schedules]
        fitted = ScalingModel.fit_speedups(points, 800, (0.0, 7 / 6))
        assert fitted.overhead_s == pytest.approx(overhead, abs=1e-3)
        assert (fitted.latency_s, fitted.transfer_s) == pytest.approx((0.02, 2.0), rel=1e-2)

    def test_where_no_number_of_nodes_is_known_it_is_the_best(self):
        """The largest on 4 of these; a fit to any one of the others would be another model."""
        model = ScalingModel(1.0, 0.5, 0.5, 8.0)
        nodes, one, two = [1, 2, 4, 8, 16], [(16, 1)], [(64, 1)]
        speedups = [model.speedup(one, 800, p) for p in nodes]
        assert speedups.index(max(speedups)) not in (0, len(nodes) - 1)
        points = [(one, nodes, max(speedups)), (two, [16], model.speedup(two, 800, 16))]
        fitted = ScalingModel.fit_speedups(points, 800, (0.5, 0.5))
        for schedule, choices, value in points:
            largest = max(fitted.speedup(schedule, 800, p) for p in choices)
            assert largest == pytest.approx(value, rel=1e-3)
