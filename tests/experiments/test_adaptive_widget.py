"""Any θ curve, live: the schedule that follows from it, at the ends of every slider."""

import itertools
import math
import re

import pytest

from repro.experiments.adaptive.runs import PAPER, TASKS
from repro.experiments.adaptive.widget import describe, follow, rising

CORNERS = [*itertools.product(TASKS, (1, 80), ((0.0, 2**5), (0.5, 2**13)))]


@pytest.mark.parametrize(("task", "peak", "ends"), CORNERS)
def test_the_schedule_and_what_is_said_of_it(task, peak, ends):
    tolerance, largest = ends
    theta = rising(task, peak)
    steps = follow(task, theta, tolerance, largest)
    interval, own = steps[-1].interval, PAPER[task]["theta"]
    assert [step.theta for step in steps[1:]] == pytest.approx(theta[:-1])
    assert steps[0].batch_size == own["batch"] and steps[0].lr == own["lr"]
    assert steps[-1].batch_size == (max(largest, own["batch"]) if interval else own["batch"])
    said = describe(task, steps)
    assert f"K = {interval or 'not found'}; " in said and "nan" not in said
    count = sum(math.ceil(PAPER[task]["samples"] / step.batch_size) for step in steps)
    assert f";\n{count:,} updates, " in said
    listed = [(int(n), int(e)) for n, e in re.findall(r"(\d+) for (\d+) epochs", said)]
    assert sum(epochs for _, epochs in listed) == len(theta)
    assert int(re.search(r"on (\d+) nodes", said)[1]) <= steps[-1].batch_size
    assert float(re.search(r"speed-up ([\d.]+)", said)[1]) >= 1
