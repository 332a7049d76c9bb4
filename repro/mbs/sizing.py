"""Choice of the micro-batch size by a linear memory model, adapted as memory changes."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from repro.mbs.errors import MicroBatchError, MicroBatchSizeError
from repro.measure import LinearMemoryModel, accelerator, is_out_of_memory, memory_state

_FIRST_PROBE = 2  # not 1: BatchNorm after a global pooling cannot train on one sample
_PATIENCE = 32  # mini-batches without an out-of-memory error before a halved size is doubled
_HEADROOM = 0.05  # share of the free memory left unused, for fragmentation
# Errors of models and losses that do not accept a number of samples.
_REFUSALS = (AssertionError, IndexError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Sizing:
    """The choice of a micro-batch size; memory is in bytes, and includes the model's."""

    micro_batch_size: int  # of the first mini-batch
    probes: tuple[tuple[int, int], ...]  # (batch size, measured peak) of each
    model: LinearMemoryModel | None  # M(B) = p + B a through the last two probes, if two fit
    limit_bytes: int  # of the peak
    predicted_bytes: float | None = None  # M at the chosen size
    observed_bytes: int | None = None  # peak of the first mini-batch at the chosen size

    @property
    def prediction_error(self) -> float | None:
        """(predicted - observed) / observed, or None before both are known."""
        if self.predicted_bytes is None or not self.observed_bytes:
            return None
        return (self.predicted_bytes - self.observed_bytes) / self.observed_bytes


class AutoSizer:
    """Keeps the largest micro-batch size that fits.

    The linear model M(B) = p + B a is fitted once, to the peaks of a few probes. A training step
    peaks at different moments for small and for large batches (workspace and gradients against
    activations), so that small probes underestimate it. Each probe therefore doubles the batch
    until the model of the last two allows no further doubling; together they cost about as much as
    four micro-batches of the chosen size. Before each mini-batch the largest B is computed anew
    from the free memory. An out-of-memory error halves the size; after several mini-batches without
    another error it doubles again, up to the model's limit.

    Processes that compute together give `least`, the smallest of a number over them. One that runs
    out of memory cannot tell the others, which wait for it: its error is raised.
    """

    def __init__(self, device: torch.device, least: Callable[[int], int] | None = None) -> None:
        self._device, self._least = device, least
        self._model: LinearMemoryModel | None = None
        self._start_bytes = 0
        self._overhead_bytes = 0
        self._cap: int | None = None
        self._successes = 0
        self._ran_out = False
        self.sizing: Sizing | None = None

    def probe(self, num_samples: int, measure: Callable[[int], tuple[int, int, int]]) -> None:
        """Fit the memory model by batches of at most `num_samples`.

        `measure` runs one batch of a size without side effects and returns live bytes before, the
        peak of live bytes and the peak of reserved bytes; where not even one sample fits, its error
        is raised.
        """
        probes: list[tuple[int, int]] = []
        self._model = self._cap = None  # of an earlier probe with fewer samples
        self._overhead_bytes = 0
        size = min(_FIRST_PROBE, num_samples)
        while size <= num_samples:
            peak = self._try(size, measure)
            if peak is None:
                self._ran_out = True
                self._cap = probes[-1][0] if probes else None
                break
            probes.append((size, peak))
            if len(probes) >= 2:
                self._model = LinearMemoryModel.fit(*zip(*probes[-2:], strict=True))
                if self._model.largest_batch(self._limit_bytes()) < 2 * size:
                    break
            size = 3 if size == 2 and num_samples == 3 else 2 * size
        if not probes:
            probes.append((1, measure(1)[1]))  # its out-of-memory error goes to the caller
        if self._model is None:
            self._cap = probes[0][0]
        chosen = self.size_for(num_samples)
        self.sizing = Sizing(chosen, tuple(probes), self._model, self._limit_bytes())

    def observed(self, size: int, peak_bytes: int) -> None:
        """Note the measured and the predicted peak of the first mini-batch, at `size`."""
        if self.sizing is not None:
            self.sizing = replace(
                self.sizing,
                micro_batch_size=size,
                predicted_bytes=self._model.predict(size) if self._model else None,
                observed_bytes=peak_bytes,
            )

    def _try(self, size: int, measure: Callable[[int], tuple[int, int, int]]) -> int | None:
        try:
            self._start_bytes, peak, held = measure(size)
            self._overhead_bytes = max(self._overhead_bytes, held - peak)
            return peak
        except Exception as error:
            if not is_out_of_memory(error):
                if isinstance(error, MicroBatchError) or not isinstance(error, _REFUSALS):
                    raise
                raise MicroBatchSizeError(
                    f"micro_batch_size='auto' begins with small sizes, and {size} samples could "
                    f"not be computed ({type(error).__name__}: {error}); give a whole number, such "
                    f"as a multiple of what the model takes together"
                ) from error
            if self._least is not None:
                raise
        release_memory(self._device)  # outside the except block, which holds the failed tensors
        return None

    def needs_probe(self, num_samples: int) -> bool:
        """Whether there is no memory model yet and `num_samples` allow another probe."""
        if self._model is not None or self._ran_out:
            return False
        return self.sizing is None or num_samples > self.sizing.probes[-1][0]

    def _limit_bytes(self) -> int:
        # Comparable with the probes' peaks, which include `_start_bytes`.
        state = memory_state(self._device)
        headroom = 0.0 if state.simulated else _HEADROOM
        # The limit applies to the allocator's reserved bytes, which exceed the live bytes.
        free = int(state.free_bytes * (1 - headroom))
        if self._least is not None:
            free = self._least(free)
        return self._start_bytes + free - self._overhead_bytes

    def size_for(self, num_samples: int) -> int:
        """Return the micro-batch size for a mini-batch of `num_samples`."""
        fits = num_samples
        if self._model is not None:
            fits = max(1, self._model.largest_batch(self._limit_bytes()))
        if self._cap is not None:
            if self._successes >= _PATIENCE:
                self._cap *= 2
                self._successes = 0
            if self._model is not None and self._cap >= fits:
                self._cap = None
            else:
                fits = self._cap
        return min(fits, num_samples)

    def failed(self, size: int) -> None:
        """Note that `size` ran out of memory."""
        self._cap = max(1, size // 2)
        self._successes = 0
        self._ran_out = True

    def succeeded(self) -> None:
        """Note that a mini-batch succeeded."""
        self._successes += 1


def release_memory(device: torch.device) -> None:
    """Free the memory of a failed try, so that the next size starts unfragmented."""
    # A traceback, which holds its frames' tensors, can be part of a cycle. These objects are young;
    # a full collection can take a quarter of a second.
    gc.collect(1)
    accelerator.empty_cache(device)
