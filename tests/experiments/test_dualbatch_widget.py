"""Any plan, live: its words, and the steps of every worker."""

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro.dualbatch import largest_k
from repro.experiments.dualbatch import widget
from repro.experiments.dualbatch.widget import describe, draw, solve


def drawn_steps(drawn: Figure) -> dict[float, list[tuple[float, float]]]:
    """Return (start, end) of every step, by the height of the worker's lane."""
    found = {}
    for collection in drawn.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.x1))
    return found


@pytest.mark.parametrize("k", [0.5, 1.0, 3.0, float("nan")])
def test_the_infeasible_is_said_in_words(k):
    said = solve(k, 1, 500)
    assert f"k is {k:g}" in said and "feasible k are above 1 and at most" in said
    assert f"{largest_k(widget.TIMES, 1, 3, 500):.6g}" in said
    assert describe(said).startswith("no such plan: k is")
    drawn = draw(500, said)
    assert drawn_steps(drawn) == {}
    assert [text.get_text() for text in drawn.axes[0].texts] == ["no such plan"]


@pytest.mark.parametrize("n_small", range(5))
def test_every_worker_has_its_words_and_steps(n_small):
    plan = solve(1.05, n_small, 500)
    said = describe(plan)
    for kind in set(plan.kinds):
        workers = f"{plan.kinds.count(kind)} with batches of {plan.batch_of(kind)} "
        samples, seconds = plan.share_of(kind), plan.time_of(kind)
        assert f"{workers}({samples:,} samples each, {seconds:.3f} s)" in said
    assert ("an update of small batches counts" in said) == (n_small > 0)
    drawn = draw(500, plan)
    FigureCanvasAgg(drawn).draw()
    assert plt.get_fignums() == []
    lanes = drawn_steps(drawn)
    assert sorted(lanes) == [0, 1, 2, 3]
    for number, kind in enumerate(plan.kinds):
        spans = lanes[number]
        assert len(spans) == -(-plan.share_of(kind) // plan.batch_of(kind))
        assert spans[0][0] == 0 and spans[-1][1] == pytest.approx(plan.time_of(kind))
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start == pytest.approx(end, abs=1e-9)
