"""The experiment that maps chunks for the requests of an iteration, beside torch's allocator."""

from collections.abc import Sequence
from typing import Any

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.outofcore.experiments import Config
from repro.experiments.outofcore.fitting import MIB
from repro.experiments.outofcore.modelled import limit_bytes, trace_at
from repro.outofcore import plan_swaps
from repro.outofcore.allocator import BestFitAllocator, Event, replay
from repro.outofcore.native import ChunkedMemory, Counters
from repro.outofcore.requests import requests

_ITERATIONS = 3  # fragmentation settles in the first


def physical(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Serve an iteration's requests without a limit, and say what that takes of the memory.

    A limit would be filled whatever an allocator loses, as budgets are as large as it allows.
    Nothing is computed. "in_core" swaps nothing; "schedule" holds no more than the device has, in
    bytes of tensors, whatever allocators make of them. Torch's allocator is simulated; chunks are
    those of `ChunkedMemory`, mapped in this machine's memory, of which nothing is written.
    """
    trace, chunk = trace_at(config, config["batch"]), int(config["chunk_mib"] * MIB)
    rows: dict[str, Any] = {}
    for mode, budget in (("in_core", trace.peak_bytes), ("schedule", limit_bytes(config))):
        if budget < trace.smallest_budget:
            continue
        events = requests(plan_swaps(trace, budget), _ITERATIONS)
        torchs, chunks = replay(BestFitAllocator(), events), mapped(events, chunk)
        rows[mode] = {
            "used_bytes": torchs.peak_requested_bytes,
            "torch_bytes": torchs.peak_reserved_bytes,
            "chunks_bytes": chunks.peak_reserved_bytes,
        }
    return Outcome({"peak_bytes": trace.peak_bytes, "rows": rows})


def mapped(events: Sequence[Event], chunk_bytes: int) -> Counters:
    """Return what the real chunked allocator has taken once it has served all requests.

    Its `peak_reserved_bytes` are those of the chunks that it mapped; small requests share chunks.
    """
    addresses: dict[Any, int] = {}
    with ChunkedMemory("posix", chunk_bytes, small_bytes=chunk_bytes // 2) as memory:
        for name, nbytes in events:
            if nbytes is None:
                memory.free(addresses.pop(name))
            else:
                addresses[name] = memory.malloc(nbytes)
        return memory.counters()
