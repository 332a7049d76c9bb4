import random

import numpy as np
import pytest
from traces import budgets, chain, random_trace

from repro.outofcore import Action, Function, Kind, SwapPlan, Trace, plan_swaps, swap_everything


def test_without_transfers_the_time_is_the_computation():
    trace = chain(3)
    result = plan_swaps(trace, trace.peak_bytes).simulate([2.0] * len(trace.functions), 1.0)
    assert result.time_s == result.compute_s == 2.0 * len(trace.functions)
    assert result.stall_s == 0
    assert result.bytes_moved == 0
    assert result.memory_bytes.tolist() == trace.live_bytes
    assert result.peak_bytes == trace.peak_bytes


def test_by_hand():
    # a0 (10 bytes) goes out after f_0, is released before f_3, and comes in before f_5 for f_6. At
    # 1 s a function and 5 bytes/s it is out from 1 to 3, in time for f_3, and in from 5 to 7, when
    # f_6 has waited for 1 s.
    plan = plan_swaps(chain(3, width=10, weight=0), 40, 40)
    result = plan.simulate([1.0] * 7, 5.0)
    assert result.transfers == (
        (Kind.SWAP_OUT, "a0", 1.0, 3.0),
        (Kind.SWAP_IN, "a0", 5.0, 7.0),
    )
    assert result.starts_s.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert result.ends_s.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert (result.time_s, result.compute_s, result.stall_s) == (8, 7, 1)
    assert (result.bytes_in, result.bytes_out) == (10, 10)
    assert result.memory_bytes.tolist() == [20, 30, 40, 40, 40, 40, 30]
    # At half the rate to the host, f_3 waits as well, until 5; all that follows is 2 s later.
    assert plan.simulate([1.0] * 7, (5.0, 2.5)).time_s == 10


def test_infinite_bandwidth_does_not_stall_and_slow_copies_bound_the_time():
    rng = random.Random(5)
    for _ in range(100):
        trace = random_trace(rng)
        for budget in budgets(trace, rng):
            plan = plan_swaps(trace, budget)
            times = [rng.random() for _ in trace.functions]
            fast = plan.simulate(times, 1e12)
            assert fast.stall_s == pytest.approx(0, abs=1e-8)
            slow = plan.simulate(times, (2.0, 3.0))
            least = max(slow.compute_s, slow.bytes_in / 2, slow.bytes_out / 3)
            assert slow.time_s >= least - 1e-9
            assert slow.time_s <= slow.compute_s + slow.bytes_in / 2 + slow.bytes_out / 3 + 1e-9
            assert (slow.bytes_in, slow.bytes_out) == (plan.bytes_in, plan.bytes_out)
            assert slow.peak_bytes <= plan.verify() <= budget
            assert np.all(np.diff(slow.starts_s) >= -1e-9)
            assert np.allclose(slow.ends_s - slow.starts_s, times)


def test_more_bandwidth_is_never_slower():
    trace = chain(12, width=40)
    plan = swap_everything(trace, trace.smallest_budget)
    times = [1.0] * len(trace.functions)
    taken = [plan.simulate(times, rate).time_s for rate in (1.0, 2.0, 4.0, 8.0, 1e9)]
    assert taken == sorted(taken, reverse=True)


def test_latency_counts_for_each_copy():
    trace = chain(3, width=10, weight=0)
    plan = plan_swaps(trace, 40, 40)
    copies = plan.simulate([0.0] * len(trace.functions), 1e12, latency_s=1.0).transfers
    assert [round(t.end_s - t.start_s, 6) for t in copies] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("times", "bandwidth", "message"),
    [
        ([1.0], 1.0, "has the shape"),
        ([-1.0] * 10, 1.0, "0 or more"),
        ([float("nan")] * 10, 1.0, "finite"),
        ([1.0] * 10, 0.0, "above 0"),
        ([1.0] * 10, (1.0, -1.0), "above 0"),
        ([1.0] * 10, (1.0, 1.0, 1.0), "pair"),
    ],
)
def test_errors(times, bandwidth, message):
    plan = plan_swaps(chain(3), 1000)
    assert len(plan.trace.functions) == 10
    with pytest.raises(ValueError, match=message):
        plan.simulate(times, bandwidth)


@pytest.mark.parametrize(("budget", "time_s"), [(10, 3.0), (9, 4.5)])
def test_what_ends_while_it_is_copied_takes_its_memory_until_the_copy_is_done(budget, time_s):
    functions = (
        Function("make a", (), ("a",)),
        Function("make b", ("a",), ("b",)),
        Function("make c", ("b",), ("c",)),  # a has ended
    )
    trace = Trace(functions, {"a": 4, "b": 2, "c": 4})
    nothing: tuple[Action, ...] = ()
    plan = SwapPlan(
        trace,
        budget,
        before=(nothing,) * 3,
        after=((Action(Kind.SWAP_OUT, "a"),), nothing, nothing),
        resident=frozenset(),
        host_valid=frozenset(),
    )
    # The copy is from 1 to 3.5 s; c takes a second from 2 s on, or from then.
    assert plan.simulate([1.0, 1.0, 1.0], 1.6).time_s == pytest.approx(time_s)
