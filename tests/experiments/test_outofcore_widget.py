"""The widget: one iteration under any budget and window."""

import pytest

from repro.experiments.outofcore import runs, widget


@pytest.fixture(scope="module")
def shown():
    return widget.iteration(runs.RESNET, 256)


class TestWidget:
    @pytest.mark.slow
    def test_budgets_from_the_smallest_to_all(self, shown):
        low, high = shown.limits
        assert widget.budget_bytes(shown, 0) == low == shown.trace.smallest_budget
        assert widget.budget_bytes(shown, 100) == high == shown.trace.peak_bytes
        assert low < widget.budget_bytes(shown, 30) < widget.budget_bytes(shown, 31) < high

    @pytest.mark.slow
    def test_every_end_of_the_sliders(self, shown):
        for percent in (0, 25, 100):
            for window in (0, 150, 300):
                budget = widget.budget_bytes(shown, percent)
                result = widget.simulate(shown, budget, window)
                assert result.peak_bytes <= budget
                assert (result.stall_s < 1e-9) == (percent == 100)

    def test_what_is_said(self, shown):
        text = widget.describe(shown, widget.budget_bytes(shown, 100), 150)
        assert text.startswith("SIMULATED V100, ResNet-50, batch 256: budget ")
        assert "(100% of in core), stall 0.00 of" in text
        assert text.endswith("0.0 GB moved")
        rate = 256 / shown.times.sum()
        assert f"{rate:,.0f} images/s" in text

    def test_what_no_schedule_beats_is_told_where_the_link_limits(self, shown):
        budget = widget.budget_bytes(shown, 0)
        result, least = widget.simulate(shown, budget, 100), widget.least_s(shown, budget)
        assert result.compute_s < least <= result.time_s
        text = widget.describe(shown, budget, 100)
        assert f"link-limited: at best {256 / least:,.0f} images/s" in text
        lines = widget.draw(shown, budget, 100).axes[2].get_lines()
        assert [line.get_xdata()[0] for line in lines] == [least]

    def test_what_is_drawn(self, shown):
        budget = widget.budget_bytes(shown, 10)
        memory, speed, lanes, moved = widget.draw(shown, budget, 100).axes
        assert memory.get_title() == "ours: ResNet-50, SIMULATED V100, batch 256"
        assert memory.get_ylabel() == "device memory (GiB)"
        assert lanes.get_xlabel() == "time of one iteration (s)"
        result = widget.simulate(shown, budget, 100)
        bars = {c.get_label(): len(c.get_paths()) for c in lanes.collections}
        assert bars["compute waits"] > 0
        assert sum(bars.values()) >= len(result.transfers) + len(result.starts_s)
        _, chosen = speed.get_lines()
        assert chosen.get_ydata() == [256 / result.time_s]
        assert moved.get_lines()[1].get_ydata() == [result.bytes_moved / 1e9]

    @pytest.mark.slow
    def test_axes_stand_still(self, shown):
        drawn = [
            widget.draw(shown, widget.budget_bytes(shown, percent), window)
            for percent, window in ((0, 0), (30, 150), (100, 300))
        ]
        limits = [[(a.get_xlim(), a.get_ylim()) for a in figure.axes] for figure in drawn]
        assert limits[0] == limits[1] == limits[2]
        for figure in drawn:
            lanes = figure.axes[2]
            bars = [bar.get_extents() for drawn in lanes.collections for bar in drawn.get_paths()]
            assert max(bar.x1 for bar in bars) <= lanes.get_xlim()[1]

    def test_batch_sizes_of_every_network(self):
        assert set(widget.BATCHES) == set(runs.ROLES)
