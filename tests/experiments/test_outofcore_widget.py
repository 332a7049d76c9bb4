"""The widget: one iteration under any budget and window."""

import pytest

from repro.experiments.outofcore import runs, widget


@pytest.fixture(scope="module")
def shown():
    return widget.iteration(runs.RESNET, 256)


def test_budgets_from_the_smallest_to_all(shown):
    low, high = shown.limits
    assert widget.budget_bytes(shown, 0) == low == shown.trace.smallest_budget
    assert low < widget.budget_bytes(shown, 30) < widget.budget_bytes(shown, 31) < high
    assert widget.budget_bytes(shown, 100) == high == shown.trace.peak_bytes
    assert set(widget.BATCHES) == set(runs.ROLES)


def test_a_window_within_all_memory_waits_for_nothing(shown):
    text = widget.describe(shown, shown.limits[1], 150)
    assert text.startswith("SIMULATED V100, ResNet-50, batch 256: budget ")
    assert "(100% of in core), stall 0.00 of" in text and text.endswith("0.0 GB moved")
    assert f"{256 / shown.times.sum():,.0f} images/s" in text


def test_the_bound_is_told_and_drawn_where_the_link_limits(shown):
    budget = widget.budget_bytes(shown, 0)
    result, least = widget.simulate(shown, budget, 100), widget.least_s(shown, budget)
    assert result.compute_s < least <= result.time_s and result.peak_bytes <= budget
    text = widget.describe(shown, budget, 100)
    assert f"link-limited: at best {256 / least:,.0f} images/s" in text
    memory, lanes = widget.draw(shown, budget, 100).axes
    assert memory.get_title() == "ours: ResNet-50, SIMULATED V100, batch 256"
    assert [line.get_xdata()[0] for line in lanes.get_lines()] == [least]
    bars = [len(c.get_paths()) for c in lanes.collections]
    assert bars[1] > 0 and sum(bars) >= len(result.transfers) + len(result.starts_s)
