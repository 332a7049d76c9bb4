"""`Bench` with invented backends, whose calls take the time that they state on their own clock."""

from types import SimpleNamespace

import pytest
import torch

from repro.microconv import BenchmarkCache, Convolution, Kernel, backends, measuring
from repro.microconv.backends import BACKENDS
from repro.microconv.cache import key_of
from repro.microconv.cudnn import UnsupportedError
from repro.microconv.kernels import KINDS, Backend
from repro.microconv.measuring import Bench

CONV = Convolution(2, 5, 5, 3, (3, 3))
KERNEL = Kernel("forward", CONV)
OUTPUT = 3 * 3 * 3 * 4  # bytes of one sample's output
MS = 1e-3


class Invented(Backend):
    """A backend of algorithms with a time and a workspace, each a function of the micro-batch."""

    def __init__(self, name, clock, **algorithms):
        self.name, self.clock, self.known = name, clock, algorithms
        self.calls, self.listed, self.errors, self.stated = [], [], {}, {}

    def version(self, device):
        return f"{self.name} 1"

    def error(self, algorithm, kernel):
        return self.stated.get(algorithm, 1e-6)

    def algorithms(self, kernel, b):
        self.listed.append(b)
        return [(name, size(b)) for name, (_, size) in self.known.items()]

    def given_bytes(self, algorithm, kernel, b):
        return 0 if self.name == "torch" else self.known[algorithm][1](b)

    def run(self, algorithm, kernel, operands, workspace, bias=None):
        first, _, out = operands
        b, start = len(first), first.storage_offset() // max(1, first[0].numel())
        size = workspace.numel()
        call = SimpleNamespace(algorithm=algorithm, b=b, workspace=size, out=len(out), start=start)
        self.calls.append(call)
        assert size >= self.given_bytes(algorithm, kernel, b)
        if error := self.errors.get(algorithm):
            raise error
        self.clock.now += self.known[algorithm][0](b)

    def counted(self, algorithm):
        return sum(call.algorithm == algorithm for call in self.calls)


def linear(ms):
    return lambda b: ms * MS * b


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("repro.measure.timing.time", clock)
    return clock


@pytest.fixture
def builtin(clock, monkeypatch):
    """Torch's own convolution: 4 ms a sample, 1000 bytes."""
    builtin = Invented("torch", clock, native=(linear(4), lambda b: 1000 * b))
    monkeypatch.setitem(BACKENDS, "torch", builtin)
    nothing = torch.empty(0)

    def native(kernel, first, second, bias=None, like=None):
        builtin.run("native", kernel, (first, second, first), nothing)

    monkeypatch.setattr(measuring, "native", native)  # of a whole mini-batch
    return builtin


@pytest.fixture
def fast(clock, builtin, monkeypatch):
    """Two algorithms: 1 ms a sample with workspace by sample, 2 ms with a fixed one."""
    known = {"big": (linear(1), lambda b: 4096 * b), "small": (linear(2), lambda b: 512)}
    fast = Invented("fast", clock, **known)
    monkeypatch.setitem(BACKENDS, "fast", fast)
    return fast


@pytest.fixture
def store():
    return BenchmarkCache()


def make(store, *chosen, names=None, max_error=None):
    return Bench(names or [backend.name for backend in chosen], store, max_error)


def names_of(ways):
    return [way.algorithm for way in ways]


ALL = ["torch:native", "fast:big", "fast:small"]


def test_candidates_of_every_size(store, builtin, fast):
    candidates = make(store, fast).candidates(KERNEL, 8, [8, 1, 2])
    assert list(candidates) == [1, 2, 8]
    for b, ways in candidates.items():
        # The output of the whole mini-batch is no workspace.
        sizes = [1000 * b - (8 * OUTPUT if b == 8 else 0), 4096 * b, 512]
        assert names_of(ways) == ALL and [way.workspace_bytes for way in ways] == sizes
        times = [4 * MS * b, MS * b, 2 * MS * b]
        assert [way.time_s for way in ways] == [pytest.approx(time) for time in times]
    assert {c.workspace for c in fast.calls} == {8 * 4096}  # the largest of all
    builtin.known["native"] = (linear(4), lambda b: 16)
    (native, *_) = make(BenchmarkCache(), fast).candidates(KERNEL, 4, [4])[4]
    assert native.workspace_bytes == 0  # never below
    bench = make(BenchmarkCache(), builtin)
    for kind in KINDS:  # another kernel is measured anew
        assert names_of(bench.candidates(Kernel(kind, CONV), 2, [2])[2]) == ["torch:native"]
    assert (bench.measured, bench.cached) == (3, 0)


def test_what_is_listed_is_rounded_as_what_is_timed(store, fast, monkeypatch):
    products, seen, algorithms = torch.backends.mkldnn.matmul, [], fast.algorithms

    def listed(kernel, b):
        seen.append(products.fp32_precision)
        return algorithms(kernel, b)

    monkeypatch.setattr(fast, "algorithms", listed)
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        make(store, fast).candidates(KERNEL, 2, [1, 2])
    finally:
        products.fp32_precision = before
    assert seen == [KERNEL.math] * 2 == ["ieee"] * 2


def test_only_what_was_asked_for_and_native_and_errs_little_is_measured(store, builtin, fast):
    builtin.known["direct"] = (linear(1), lambda b: 0)
    (ways,) = make(store, fast, names=("fast:small",)).candidates(KERNEL, 4, [4]).values()
    assert names_of(ways) == ["torch:native", "fast:small"]
    assert fast.counted("big") == builtin.counted("direct") == 0
    del builtin.known["direct"]
    fast.stated = {"big": 1e-4, "small": 1e-5}
    builtin.stated = {"native": 1e-2}  # measured besides, whatever it states
    for dtype in ("float32", "bfloat16"):  # a coarser type rounds by more with any algorithm
        for max_error, wanted in ((None, ALL), (1e-4, ALL), (2e-5, ALL[::2]), (1e-7, ALL[:1])):
            fast.calls.clear()
            bench = make(BenchmarkCache(), fast, max_error=max_error)
            assert names_of(bench.candidates(Kernel("forward", CONV, dtype), 1, [1])[1]) == wanted
            assert {f"fast:{call.algorithm}" for call in fast.calls} == set(wanted[1:])


def test_a_second_call_measures_what_is_new(store, builtin, fast, monkeypatch):
    made, tensors = [], Kernel.tensors
    monkeypatch.setattr(Kernel, "tensors", lambda *a: made.append(a[1]) or tensors(*a))
    first = make(store, fast)
    before = first.candidates(KERNEL, 8, [1, 4, 8])
    assert (first.measured, first.cached) == (9, 0)
    calls = len(builtin.calls), len(fast.calls)
    for bench in (first, make(store, fast)):
        counts = bench.measured
        assert bench.candidates(KERNEL, 8, [1, 4, 8]) == before
        assert (bench.measured - counts, bench.cached) == (0, 9)
    assert (len(builtin.calls), len(fast.calls)) == calls and made == [8]
    assert fast.listed == [1, 4, 8]  # nor asked for its algorithms
    fast.calls.clear()
    first.candidates(KERNEL, 8, [1, 2, 8])
    assert {call.b for call in fast.calls} == {2} and (first.measured, first.cached) == (12, 15)
    first.candidates(KERNEL, 2, [1, 2])  # of a smaller mini-batch
    assert first.measured == 12 and made == [8, 8]


def test_what_cudnn_lists_and_refuses_is_remembered(store, builtin, fast):
    fast.errors["big"] = UnsupportedError("no")
    candidates = make(store, fast).candidates(KERNEL, 2, [1, 2])
    assert [names_of(ways) for ways in candidates.values()] == [ALL[::2]] * 2
    assert fast.counted("big") == 2 and fast.counted("small") > 4
    assert store.times(key_of(KERNEL), 1)["fast:big"] == []
    del fast.errors["big"]
    again = make(store, fast)
    assert again.candidates(KERNEL, 2, [1, 2]) == candidates and fast.counted("big") == 2
    assert (again.measured, again.cached) == (0, 6)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_what_runs_out_of_memory_is_tried_another_day(store, builtin, fast, error):
    fast.errors["big"] = error
    assert names_of(make(store, fast).candidates(KERNEL, 1, [1])[1]) == ALL[::2]
    assert "fast:big" not in store.times(key_of(KERNEL), 1)
    del fast.errors["big"]
    bench = make(store, fast)
    assert names_of(bench.candidates(KERNEL, 1, [1])[1]) == ALL
    assert (bench.measured, bench.cached) == (1, 2)
    builtin.errors["native"] = error  # torch's own convolution has to run
    with pytest.raises(type(error)):
        make(BenchmarkCache(), fast).candidates(KERNEL, 1, [1])
    builtin.errors.clear()
    fast.errors["small"] = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):  # others are passed on
        make(BenchmarkCache(), fast).candidates(KERNEL, 1, [1])


PARTS = [(4, "fast:big"), (2, "fast:small"), (2, "torch:native")]


def test_compare(store, builtin, fast, monkeypatch):
    outs, run_division = [], backends.run_division

    def watched(parts, kernel, first, second, out, *rest):
        outs.append(out)  # kept, so that no address comes twice
        return run_division(parts, kernel, first, second, out, *rest)

    monkeypatch.setattr(backends, "run_division", watched)
    bench = make(store, fast)
    trial = bench.compare(KERNEL, 8, PARTS)
    assert trial.medians_s == (pytest.approx((4 + 4 + 8) * MS), pytest.approx(8 * 4 * MS))
    assert trial.ratio == pytest.approx(0.5)
    rounds = len(trial.native_s)
    assert rounds == len(trial.division_s) >= 5
    assert len({out.data_ptr() for out in outs}) == rounds + 1  # allocated at each call
    assert (bench.measured, bench.cached) == (2, 0)
    calls = [call.b for call in builtin.calls]
    assert calls.count(8) == calls.count(2) == len(fast.calls) // 2 == rounds + 1  # and a warm-up
    assert [c.b for c in fast.calls[:2]] == [4, 2]
    assert {c.workspace for c in fast.calls} == {4 * 4096}  # torch's own takes none of it
    for again in (bench, make(store, fast)):
        cached = again.cached
        assert again.compare(KERNEL, 8, PARTS) == trial and again.cached == cached + 2
    assert len(builtin.calls) == len(calls) == 2 * (rounds + 1)
    # The machine slows down for most rounds of the one and, less so, of the other.
    trial = measuring.Trial((1.0, 1.0, 8.0, 8.0, 8.0), (2.0, 2.0, 16.0, 9.0, 9.0))
    assert trial.ratio == 0.5 and trial.medians_s == (8.0, 9.0)
