"""Planning a mini-batch from the measured models, against a simulation sample by sample."""

import math

import numpy as np
import pytest

from repro.experiments.mbs.widget import default_limit_mib, draw_plan, plan_streaming
from repro.report import figure_png

MIB = 2**20


def size_record(make_record, fixed=1000.0, each=100.0, step_s=0.5, sample_s=0.25, **changes):
    sizes = (2, 4, 8, 16, 32)
    values = {
        "config": {"role": "ResNet-50", "model": {"name": "resnet_cifar", "depth": 8, "width": 8}},
        "metrics": {"fixed_bytes": fixed, "bytes_per_sample": each, "limit_bytes": int(fixed * 3)},
        # A median, so that one slow sample does not matter.
        "timings": {
            str(n): {"samples_s": [step_s + sample_s * n] * 4 + [99.0], "warmup": 2} for n in sizes
        },
    }
    return make_record("size", **values | changes)


def simulate(fixed, each, step_s, sample_s, limit, mini_batch):
    """Fill micro-batches sample by sample as long as they fit; return sizes and seconds."""
    if fixed + each > limit:
        return [], math.nan
    largest = 0
    while largest < mini_batch and fixed + each * (largest + 1) <= limit:
        largest += 1
    sizes, left = [], mini_batch
    while left:
        sizes.append(min(left, largest))
        left -= sizes[-1]
    return sizes, sum(step_s + sample_s * n for n in sizes)


def test_against_a_simulation(make_record):
    random = np.random.default_rng(0)
    for _ in range(300):
        fixed, each = map(int, random.integers(1, 2000, 2))
        step_s, sample_s = map(float, random.integers(1, 9, 2) / 8)
        limit, mini_batch = map(int, random.integers(1, [9000, 130]))
        record = size_record(make_record, float(fixed), float(each), step_s, sample_s)
        plan = plan_streaming(record, limit / MIB, mini_batch)
        sizes, seconds = simulate(fixed, each, step_s, sample_s, limit, mini_batch)
        each_ms = 1e3 * seconds / mini_batch
        assert (plan.number, plan.size) == (len(sizes), sizes[0] if sizes else 0)
        assert plan.undivided_mib * MIB == fixed + each * mini_batch
        assert plan.streamed_mib * MIB == fixed + each * max(1, plan.size)
        assert plan.streamed_ms == pytest.approx(each_ms, nan_ok=True)
        undivided = each_ms if len(sizes) == 1 else math.nan
        assert plan.undivided_ms == pytest.approx(undivided, nan_ok=True)
        assert not sizes or plan.streamed_mib * MIB <= limit


@pytest.mark.parametrize(
    ("limit_mib", "batch", "shown"),
    [
        (10.0, 4, "4 samples, which fit undivided"),
        (10.0, 64, "64 samples, in 8 micro-batches of at most 8"),
        (1.0, 64, "64 samples, of which not one fits"),
    ],
)
def test_the_drawing_says_what_fits_on_axes_that_stay(make_record, limit_mib, batch, shown):
    record = size_record(make_record, 2.0 * MIB, 1.0 * MIB)
    figure = draw_plan(record, limit_mib, batch)
    assert figure_png(figure, dpi=50)
    memory, duration = figure.axes
    assert figure.get_suptitle().endswith(shown)
    # Memory in MiB: all of the mini-batch, and no more than fits or a sample needs.
    drawn = {line.get_label(): line for line in memory.get_lines()}
    place = list(drawn["without MBS"].get_xdata()).index(batch)
    assert drawn["without MBS"].get_ydata()[place] == 2 + batch
    assert drawn["with MBS"].get_ydata()[place] == (2 + min(batch, 8) if limit_mib > 3 else 3)
    # No time is drawn of what does not fit.
    times = {line.get_label(): line.get_ydata()[place] for line in duration.get_lines()[1::2]}
    assert math.isnan(times["without MBS"]) == (2 + batch > limit_mib)
    assert math.isnan(times["with MBS"]) == (limit_mib < 3)
    others = draw_plan(record, 6.0, 1024).axes
    ends = [[(axis.get_xlim(), axis.get_ylim()) for axis in axes] for axes in (figure.axes, others)]
    assert ends[0] == ends[1]


def test_on_the_smoke_records(smoke):
    for record in smoke.store.load("mbs"):
        if record.experiment == "size":
            plan = plan_streaming(record, default_limit_mib(record), 64)
            assert math.isnan(plan.undivided_ms) and plan.streamed_ms > 0
            assert plan.size == record.metrics["predicted_largest"]
