"""Measure the candidates of a kernel: step 1 of WR (section III-B), through the cache."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from repro.measure import is_out_of_memory, time_interleaved
from repro.microconv import backends
from repro.microconv.cache import BenchmarkCache, key_of
from repro.microconv.cudnn import UnsupportedError
from repro.microconv.kernels import Kernel, Operands, precision
from repro.microconv.optimize import Candidate
from repro.microconv.torch_backend import native

# An algorithm this many times slower than one that needs no more workspace is timed once.
_HOPELESS = 3.0
_ENOUGH_S = 1.0  # of rounds over all algorithms
_ROUNDS = (5, 9)
_TRIAL_ROUNDS = 5
_MODEL_ROUNDS = 7  # for a whole model; five are enough if they agree

_FORMS = ("divided", "native")  # of a kernel, or of a whole model
Needs = Mapping[int, Mapping[str, int]]  # bytes of workspace, by micro-batch size and name
Samples = dict[str, list[float]]  # seconds, by name of an algorithm


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
    def slower(self) -> int:
        """Number of rounds in which the division was not faster."""
        return sum(a >= b for a, b in zip(self.division_s, self.native_s, strict=True))

    @property
    def pays(self) -> bool:
        """Whether the division was faster in every round, or in all but one of seven or more."""
        return self.slower == 0 or (self.slower == 1 and len(self.native_s) >= _MODEL_ROUNDS)

    @property
    def ratio(self) -> float:
        """Median over the rounds of the division's time over the framework's own."""
        pairs = zip(self.division_s, self.native_s, strict=True)
        return statistics.median(divided / native for divided, native in pairs)


@dataclass(eq=False)
class Bench:
    """Measures kernels with chosen backends, through a cache, on random operands.

    `algorithms`, `max_error` and `devices` as in `tune`; torch's own convolution is always
    measured.
    """

    algorithms: Sequence[str] | None
    cache: BenchmarkCache
    max_error: float | None = None
    devices: Sequence[str] = ()
    measured: int = 0  # number of measured times
    cached: int = 0  # number of times from the cache

    def candidates(
        self, kernel: Kernel, batch: int, sizes: Iterable[int], cap_bytes: int | None = None
    ) -> dict[int, list[Candidate]]:
        """The candidates of a kernel by micro-batch size (step 1 of WR).

        Algorithms that need more workspace than the cap are neither measured nor returned, except
        the framework's own convolution.
        """
        listings = {b: self._listing(kernel, batch, b, cap_bytes) for b in sorted(sizes)}
        key = key_of(kernel)
        known = {b: self.cache.times(key, b) for b in listings}
        missing = {
            b: {name: need for name, need in needs.items() if name not in known[b]}
            for b, needs in listings.items()
        }
        count = sum(map(len, missing.values()))
        self.measured += count
        self.cached += sum(map(len, listings.values())) - count
        for b, measured in self._time_at_once(kernel, batch, missing).items() if count else ():
            self.cache.store_times(key, b, measured)
            known[b] |= measured
        return {
            b: [
                Candidate(name, statistics.median(taken), need)
                for name, need in needs.items()
                if (taken := known[b].get(name))
            ]
            for b, needs in listings.items()
        }

    def least_bytes(self, kernel: Kernel, batch: int, sizes: Iterable[int]) -> int:
        """The smallest workspace of any division into these sizes, torch's own included."""
        known = {
            b: [Candidate(n, 0.0, need) for n, need in self._listing(kernel, batch, b).items()]
            for b in sizes
        }
        return backends.divisions(batch, known)[0].workspace_bytes

    def _listing(
        self, kernel: Kernel, batch: int, b: int, cap_bytes: int | None = None
    ) -> dict[str, int]:
        """The algorithms for micro-batches of `b`, with the bytes of each as a part."""
        listing = {}
        output = math.prod(kernel.shapes(batch)[2]) * kernel.torch_dtype.itemsize
        key = key_of(kernel)
        listed = self.cache.listing(key, b)
        if listed is None:
            # Rounded as it will run: a library's workspace may depend on that.
            with precision(kernel), _undisturbed(kernel.device):
                listed = backends.listing(kernel, b)
            self.cache.store_listing(key, b, listed)
        for name, size in listed:
            need = size if b == batch else size + backends.summing_bytes(kernel)
            if name == backends.NATIVE:  # for a whole mini-batch, it returns the output itself
                need = max(0, size - output) if b == batch else need
            elif not self._allows(name, kernel) or (cap_bytes is not None and need > cap_bytes):
                continue
            listing[name] = need
        return listing

    def _allows(self, name: str, kernel: Kernel) -> bool:
        backend, bare_name = backends.find(name)
        # Both errors are for float32: a coarser type rounds by more with any algorithm.
        exact = self.max_error is None or backend.error(bare_name, kernel) <= self.max_error
        return exact and self.admits(name)

    def admits(self, name: str) -> bool:
        """Whether ``BACKEND:ALGORITHM`` was requested, singly or with its backend."""
        asked = self.algorithms
        return asked is None or name in asked or name.partition(":")[0] in asked

    def _time_at_once(self, kernel: Kernel, batch: int, missing: Needs) -> dict[int, Samples]:
        """Run `_time` with the sizes shared out among the devices, each in its own thread."""
        wanted = {b: needs for b, needs in missing.items() if needs}
        if len(self.devices) < 2:
            return self._time(kernel, batch, wanted)
        shares: dict[str, list[int]] = {device: [] for device in self.devices}
        work = {b: b * len(needs) for b, needs in wanted.items()}
        for b in sorted(work, key=lambda b: -work[b]):
            min(shares.values(), key=lambda share: sum(work[b] for b in share)).append(b)
        # Process-wide settings are set here once, so that the first thread to end keeps them.
        with precision(kernel), _undisturbed(kernel.device), ThreadPoolExecutor() as pool:
            calls = [
                (replace(kernel, device=device), batch, {b: wanted[b] for b in sorted(sizes)})
                for device, sizes in shares.items()
                if sizes
            ]
            parts = pool.map(lambda call: self._time(*call), calls)
            return {b: times for part in parts for b, times in part.items()}

    def _time(self, kernel: Kernel, batch: int, wanted: Needs) -> dict[int, Samples]:
        """Time algorithms of several micro-batch sizes in turns, so that slow spells affect all.

        `wanted` has their workspace by size and name. An algorithm that fails to run gets no
        sample.
        """
        pairs = [(b, name) for b, needs in wanted.items() for name in needs]
        given = max(backends.given_bytes(name, kernel, b) for b, name in pairs)
        samples: dict[int, Samples] = {b: {} for b in wanted}
        with precision(kernel), _undisturbed(kernel.device):
            buffers = kernel.tensors(batch)
            workspace = torch.zeros(given, dtype=torch.uint8, device=kernel.device)
            calls = {(b, n): self._call(n, kernel, b, buffers, workspace) for b, n in pairs}
            for (b, name), call in calls.items():
                try:
                    _once(call, kernel)  # the library loads or compiles its code
                    samples[b][name] = [_once(call, kernel)]
                except UnsupportedError:
                    samples[b][name] = []  # listed but refused: not tried again
                except Exception as error:
                    # Out of device memory: it may run another time. Torch's own must run.
                    if name == backends.NATIVE or not is_out_of_memory(error):
                        raise
            hopeful = {}
            for (b, name), call in calls.items():
                needs, taken = wanted[b], samples[b]
                rivals = [s[0] for n, s in taken.items() if s and needs[n] <= needs[name]]
                if taken.get(name) and taken[name][0] <= _HOPELESS * min(rivals):
                    hopeful[b, name] = call
            if not hopeful:
                return samples
            round_s = sum(samples[b][name][0] for b, name in hopeful)
            rounds = min(max(math.ceil(_ENOUGH_S / max(round_s, 1e-9)), _ROUNDS[0]), _ROUNDS[1])
            timed = time_interleaved(
                {f"{b} {name}": call for (b, name), call in hopeful.items()},
                warmup=0,
                repeats=rounds,
                device=kernel.device,
                queued=True,
            )
        for b, name in hopeful:
            samples[b][name] = list(timed[f"{b} {name}"].samples_s)
        return samples

    @staticmethod
    def _call(
        name: str, kernel: Kernel, b: int, buffers: Operands, workspace: torch.Tensor
    ) -> Callable[[], object]:
        first, second, out = buffers
        if name == backends.NATIVE and b == len(first):
            return lambda: native(kernel, first, second, like=out)  # as if left to torch
        # Pieces in turn, so that a small micro-batch does not stay in the processor's cache.
        starts = itertools.cycle(range(0, max(1, len(first) // b) * b, b))
        return lambda: backends.run(name, kernel, kernel.piece(buffers, next(starts), b), workspace)

    def compare(self, kernel: Kernel, batch: int, parts: Sequence[tuple[int, str]]) -> Trial:
        """Time a division and the framework's own convolution in turns, as in a training step.

        Unlike in `candidates`, both allocate the output anew in each call, and all parts run one
        after the other.
        """

        def measure() -> Samples:
            first, second, out = kernel.tensors(batch)
            needs = [backends.given_bytes(name, kernel, b) for b, name in set(parts)]
            workspace = torch.zeros(max(needs), dtype=torch.uint8, device=kernel.device)

            def own() -> object:
                return native(kernel, first, second, like=out)

            def divided() -> None:
                made = torch.empty_like(out)
                backends.run_division(parts, kernel, first, second, made, workspace)

            whole = list(parts) == [(batch, backends.NATIVE)]
            calls = dict(zip(_FORMS, (own if whole else divided, own), strict=True))
            with precision(kernel):
                timed = time_interleaved(
                    calls, warmup=1, repeats=_TRIAL_ROUNDS, device=kernel.device
                )
            return {name: list(timing.samples_s) for name, timing in timed.items()}

        key = f"{key_of(kernel)} as {list(parts)}"
        known: Mapping[str, list[float]] = self.cache.times(key, 1)
        if known:
            self.cached += len(_FORMS)
        else:
            self.measured += len(_FORMS)
            with _undisturbed(kernel.device):
                known = measure()
            self.cache.store_times(key, 1, known)
        return Trial(*(tuple(known[form]) for form in _FORMS))


def compare_models(
    one: Kernel, forms: tuple[Callable[[], None], Callable[[], None]], step: Callable[[], None]
) -> Trial:
    """Time two forms of a whole model in turns, until one is clearly faster.

    `forms` install the tuned and the untuned form, untimed; `step` runs it. `one` is any kernel of
    the model, for its device. No cache keeps the times: nothing tells two models apart for sure.
    """
    samples: Samples = {name: [] for name in _FORMS}

    def trial() -> Trial:
        return Trial(*map(tuple, samples.values()))

    with _undisturbed(one.device, torch.is_autocast_enabled(torch.device(one.device).type)):
        for turn in range(_MODEL_ROUNDS + 1):
            pairs = list(zip(_FORMS, forms, strict=True))
            for name, form in pairs if turn % 2 else reversed(pairs):
                form()
                seconds = _once(step, one, queued=False)
                if turn:  # the first round, which makes buffers and plans, is not counted
                    samples[name].append(seconds)
            if trial().slower > 1 or (turn >= _TRIAL_ROUNDS and not trial().slower):
                break
    return trial()


def _once(call: Callable[[], object], kernel: Kernel, queued: bool = True) -> float:
    timed = time_interleaved({"": call}, warmup=0, repeats=1, device=kernel.device, queued=queued)
    return timed[""].samples_s[0]


@contextmanager
def _undisturbed(device: str, autocast: bool = False) -> Iterator[None]:
    """Disable the caller's inference and anomaly mode inside, and autocast unless it is kept."""
    with (
        torch.inference_mode(False),
        torch.autocast(torch.device(device).type, enabled=autocast),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield
