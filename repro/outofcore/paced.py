"""Copies on a CPU at the rate of a link, so that swapping to the same memory costs something."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from repro.outofcore.host import MOVER, HostStore, Place, ThreadMover, _submit


class PacedMover(ThreadMover):
    """Copies as `ThreadMover` does, each direction at a stated rate, one copy after another.

    The threads sleep: what computes is not held up but where it waits for a copy. Faster than the
    memory itself it does not get.

    Args:
        store: Where swapped-out storages lie.
        bytes_per_s: The rate each way.

    Raises:
        ValueError: The rate is not above 0.
    """

    def __init__(self, store: HostStore, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"link_bytes_per_s is {bytes_per_s!r}: give bytes/s above 0, or None")
        super().__init__(store)
        self.bytes_per_s = float(bytes_per_s)
        self._free_at = [0.0, 0.0]  # when each direction's last copy is over
        # One copy after another.
        self._waits = [ThreadPoolExecutor(1, MOVER) for _ in range(2)]

    def start_in(self, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        """Start the copy of a place to a storage of the device."""
        return self._paced(0, super().start_in(storage, place), storage.nbytes())

    def start_out(self, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        """Start the copy of a storage of the device to a place."""
        return self._paced(1, super().start_out(storage, place), storage.nbytes())

    def _paced(self, direction: int, copied: Future[None], nbytes: int) -> Future[None]:
        asked_at = time.perf_counter()

        def wait() -> None:
            copied.result()
            over = max(self._free_at[direction], asked_at) + nbytes / self.bytes_per_s
            self._free_at[direction] = over
            time.sleep(max(0.0, over - time.perf_counter()))

        future = _submit(self._waits[direction], wait)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def close(self) -> None:
        """Wait for all copies, and end."""
        for pool in self._waits:
            pool.shutdown()
        super().close()

    def bandwidth(self) -> tuple[float, float]:
        """Return the stated rate, each way."""
        return self.bytes_per_s, self.bytes_per_s
