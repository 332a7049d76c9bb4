"""The widget: one iteration under any budget and window."""

import pytest

from repro.experiments.outofcore import runs, widget
from repro.outofcore import bound


@pytest.fixture(scope="module")
def shown():
    return widget.iteration(runs.RESNET, 256)


def test_budgets_from_the_smallest_to_all(shown):
    low, high = shown.limits
    assert shown.budget_bytes(0) == low == shown.trace.smallest_budget
    assert low < shown.budget_bytes(30) < shown.budget_bytes(31) < high
    assert shown.budget_bytes(100) == high == shown.trace.peak_bytes
    assert set(widget.BATCHES) == set(runs.ROLES)


def test_a_window_within_all_memory_waits_for_nothing(shown):
    text = widget.describe(shown, shown.limits[1], widget.simulate(shown, shown.limits[1], 150))
    assert text.startswith("SIMULATED V100, ResNet-50, batch 256: budget ")
    assert "(100% of in core; " in text and "stall 0.00 of" in text
    assert text.endswith("0.0 GB moved") and f"{256 / shown.times.sum():,.0f} images/s" in text


def test_no_schedule_is_faster_than_the_bound(shown):
    budget = shown.budget_bytes(0)
    result = widget.simulate(shown, budget, 100)
    least = bound(shown.trace, budget, shown.times, runs.RATE)
    assert result.compute_s < least <= result.time_s and result.peak_bytes <= budget
    assert f"at best {256 / least:,.0f} by any schedule" in widget.describe(shown, budget, result)
    memory, lanes = widget.draw(shown, budget, result).axes
    assert memory.get_title() == "ours: ResNet-50, simulated, V100, batch 256"
    bars = [len(c.get_paths()) for c in lanes.collections]
    assert sum(bars) == len(result.transfers) + len(result.starts_s)
