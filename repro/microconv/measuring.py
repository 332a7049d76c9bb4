"""Measure the candidates of a kernel: step 1 of WR (section III-B), through the cache."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from repro.measure import is_out_of_memory, time_interleaved
from repro.microconv import backends
from repro.microconv.backends import Choice
from repro.microconv.cache import BenchmarkCache, Key
from repro.microconv.conv import call_overhead
from repro.microconv.cudnn import UnsupportedError
from repro.microconv.kernels import Convolution, Kernel, precision
from repro.microconv.optimize import Candidate
from repro.microconv.torch_backend import native

# An algorithm this many times slower than one that needs no more workspace is timed once: no noise
# makes it win.
_HOPELESS = 3.0
_ENOUGH_S = 0.02  # of repeated samples, where a call is that short
_REPEATS = (3, 10)
_ROUNDS = 5  # of a trial


@dataclass
class Counts:
    """How many times were measured, and how many came from the cache."""

    measured: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Trial:
    """Seconds of a division and of the framework's own convolution, round by round."""

    division_s: tuple[float, ...]
    native_s: tuple[float, ...]

    @property
    def medians_s(self) -> tuple[float, float]:
        """Median seconds of the division and of the framework's own convolution."""
        return statistics.median(self.division_s), statistics.median(self.native_s)

    @property
    def ratio(self) -> float:
        """Median over the rounds of the division's time over the framework's own.

        Both run in each round, so that a slow spell of the machine does not decide.
        """
        pairs = zip(self.division_s, self.native_s, strict=True)
        return statistics.median(own / native for own, native in pairs)


class Bench:
    """Measures kernels with chosen backends, through a cache.

    Operands are random; the buffers of a kernel are allocated once and reused, and successive
    calls take successive pieces of the mini-batch, so that a small micro-batch does not find its
    data in the cache of the processor.

    Args:
        choice: The backends and algorithms. Torch's own convolution is measured besides.
        cache: Where results are looked up and kept.
        max_error: Leave out algorithms whose stated relative error is larger.
    """

    def __init__(
        self, choice: Choice, cache: BenchmarkCache, max_error: float | None = None
    ) -> None:
        self.choice = choice
        self.cache = cache
        self.max_error = max_error
        self.counts = Counts()

    def candidates(
        self, kernel: Kernel, batch: int, sizes: Iterable[int], cap_bytes: int | None = None
    ) -> dict[int, list[Candidate]]:
        """Return the candidates of a kernel by micro-batch size.

        Args:
            kernel: What is computed.
            batch: The mini-batch size.
            sizes: Micro-batch sizes to measure, at most the mini-batch.
            cap_bytes: Algorithms that need more workspace are not measured and not returned;
                the framework's own convolution always is.
        """
        buffers: list[torch.Tensor] = []  # made when something has to be measured
        return {
            size: self._measure(kernel, batch, size, cap_bytes, buffers) for size in sorted(sizes)
        }

    def _listing(self, kernel: Kernel, b: int) -> list[tuple[Key, str, int]]:
        found = []
        for backend in dict.fromkeys((backends.BACKENDS["torch"], *self.choice.backends)):
            key = Key.of(kernel, backend.name)
            listed = self.cache.listing(key, b)
            if listed is None:
                with _undisturbed(kernel):
                    algorithms = backend.algorithms(kernel, b)
                listed = [(f"{backend.name}:{name}", size) for name, size in algorithms]
                self.cache.store_listing(key, b, listed)
            found += [(key, name, size) for name, size in listed if self._admits(name, kernel)]
        return found

    def _admits(self, name: str, kernel: Kernel) -> bool:
        if name == backends.NATIVE:
            return True
        if not self.choice.admits(name):
            return False
        backend, own = backends.find(name)
        # In float32 on both sides: a coarser type rounds by more with any algorithm.
        return self.max_error is None or backend.error(own, kernel) <= self.max_error

    def _measure(
        self,
        kernel: Kernel,
        batch: int,
        b: int,
        cap_bytes: int | None,
        buffers: list[torch.Tensor],
    ) -> list[Candidate]:
        listing = [
            (key, name, size)
            for key, name, size in self._listing(kernel, b)
            if cap_bytes is None or size <= cap_bytes or name == backends.NATIVE
        ]
        known: dict[str, list[float]] = {}
        for key in dict.fromkeys(key for key, _, _ in listing):
            known |= self.cache.times(key, b)
        missing = [(name, size) for _, name, size in listing if name not in known]
        self.counts.cached += len(listing) - len(missing)
        if missing:
            if not buffers:
                buffers += kernel.tensors(batch)
            measured = self._time(kernel, b, missing, buffers)
            self.counts.measured += len(missing)
            for key in dict.fromkeys(key for key, _, _ in listing):
                own = {
                    name: measured[name] for k, name, _ in listing if k == key and name in measured
                }
                self.cache.store_times(key, b, own)
            known |= measured
        # Of a whole mini-batch, what torch's own convolution returns is the output itself.
        output = math.prod(kernel.shapes(b)[2]) * kernel.torch_dtype.itemsize if b == batch else 0
        return [
            Candidate(
                name,
                statistics.median(known[name]),
                max(0, size - output) if name == backends.NATIVE else size,
            )
            for _, name, size in listing
            if known.get(name)
        ]

    def _time(
        self, kernel: Kernel, b: int, wanted: Sequence[tuple[str, int]], buffers: list[torch.Tensor]
    ) -> dict[str, list[float]]:
        """Time algorithms in turns; one that does not run after all gets no sample."""
        needs = [backends.given_bytes(name, kernel, b) for name, _ in wanted]
        workspace = torch.zeros(max(needs), dtype=torch.uint8, device=kernel.device)
        calls = {name: self._call(name, kernel, b, buffers, workspace) for name, _ in wanted}
        samples: dict[str, list[float]] = {}
        with precision(kernel), _undisturbed(kernel):
            ran: dict[str, float] = {}
            for name, call in calls.items():
                try:
                    self._once(call, kernel)  # loads or compiles what the library needs
                    ran[name] = self._once(call, kernel)
                except UnsupportedError:
                    samples[name] = []  # listed and yet refused: not asked again
                except Exception as error:
                    # Of the device; another day it may run. Torch's own has to.
                    if name == backends.NATIVE or not is_out_of_memory(error):
                        raise
            samples |= {name: [seconds] for name, seconds in ran.items()}
            if not ran:
                return samples
            sizes = dict(wanted)
            hopeful = {
                name: calls[name]
                for name, seconds in ran.items()
                if all(
                    seconds <= _HOPELESS * other_s
                    for other, other_s in ran.items()
                    if sizes[other] <= sizes[name]
                )
            }
            fastest = min(ran.values())
            repeats = min(max(math.ceil(_ENOUGH_S / max(fastest, 1e-9)), _REPEATS[0]), _REPEATS[1])
            timed = time_interleaved(hopeful, warmup=0, repeats=repeats, device=kernel.device)
        return samples | {name: list(timing.samples_s) for name, timing in timed.items()}

    @staticmethod
    def _once(call: Callable[[], object], kernel: Kernel) -> float:
        timing = time_interleaved({"": call}, warmup=0, repeats=1, device=kernel.device)[""]
        return timing.samples_s[0]

    @staticmethod
    def _call(
        name: str, kernel: Kernel, b: int, buffers: list[torch.Tensor], workspace: torch.Tensor
    ) -> Callable[[], object]:
        first, second, out = buffers
        accumulates = kernel.kind == "backward_filter"
        pieces = max(1, len(first) // b)
        turn = 0
        if name == backends.NATIVE and b == len(first):
            return lambda: native(kernel, first, second, like=out)  # as it runs where left to torch

        def call() -> None:
            nonlocal turn
            piece = slice(turn % pieces * b, turn % pieces * b + b)
            turn += 1
            if accumulates:
                backends.run(name, kernel, first[piece], second[piece], out, workspace)
            else:
                backends.run(name, kernel, first[piece], second, out[piece], workspace)

        return call

    def compare(self, kernel: Kernel, batch: int, parts: Sequence[tuple[int, str]]) -> Trial:
        """Time a division and the framework's own convolution in turns, as a step runs them.

        Unlike `candidates`, the output is allocated anew in each call, as in a training step, on
        both sides; and all parts run after each other.
        """
        key = Key(f"{Key.of(kernel, 'torch').text} {Key.of(kernel, _last_backend(parts)).text}")
        names = (f"division {list(parts)}", f"native beside {list(parts)}")
        known = self.cache.times(key, batch)
        if all(name in known for name in names):
            self.counts.cached += 2
        else:
            self.counts.measured += 2
            known = self._compare(kernel, batch, parts, names)
            self.cache.store_times(key, batch, known)
        return Trial(tuple(known[names[0]]), tuple(known[names[1]]))

    def _compare(
        self, kernel: Kernel, batch: int, parts: Sequence[tuple[int, str]], names: tuple[str, str]
    ) -> dict[str, list[float]]:
        first, second, out = kernel.tensors(batch)
        needs = [backends.given_bytes(name, kernel, b) for b, name in set(parts)]
        workspace = torch.zeros(max(needs), dtype=torch.uint8, device=kernel.device)
        whole = list(parts) == [(batch, backends.NATIVE)]
        calls: dict[str, Callable[[], object]] = {
            names[0]: lambda: (
                native(kernel, first, second, like=out)
                if whole
                else backends.run_division(
                    parts, kernel, first, second, torch.empty_like(out), workspace
                )
            ),
            names[1]: lambda: native(kernel, first, second, like=out),
        }
        with precision(kernel), _undisturbed(kernel):
            timed = time_interleaved(calls, warmup=1, repeats=_ROUNDS, device=kernel.device)
        return {name: list(timing.samples_s) for name, timing in timed.items()}

    def overhead_s(self, kernel: Kernel, training: bool) -> float:
        """Return what a call of a tuned layer costs more than one of torch's, in seconds."""
        pixel = replace(kernel, kind="forward", conv=Convolution(1, 1, 1, 1, (1, 1)))
        key, name = Key.of(pixel, "torch"), f"call overhead, training {training}"
        known = self.cache.times(key, 1)
        if name in known:
            self.counts.cached += 1
        else:
            self.counts.measured += 1
            with _undisturbed(kernel):
                known = {name: call_overhead(kernel.device, training)}
            self.cache.store_times(key, 1, known)
        return max(0.0, statistics.median(known[name]))


@contextmanager
def _undisturbed(kernel: Kernel) -> Iterator[None]:
    """Measure as if the caller had set nothing: no autocast, inference or anomaly mode."""
    kind = torch.device(kernel.device).type
    with (
        torch.inference_mode(False),
        torch.autocast(kind, enabled=False),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield


def _last_backend(parts: Sequence[tuple[int, str]]) -> str:
    # Of the backends in a division torch is one version, another library at most one more.
    return sorted({name.partition(":")[0] for _, name in parts}, key=lambda n: n != "torch")[-1]
