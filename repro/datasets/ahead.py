"""Mini-batches made ahead of the training that takes them, in memory that is copied from fast."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from repro.measure import accelerator

Batch = tuple[torch.Tensor, torch.Tensor]


class Ahead:
    """A loader's mini-batches, the next ones made by a thread while the device computes.

    They lie in pinned memory of the host, from which an accelerator copies beside its
    computations. For a CPU the loader's own are passed on as they come, unless `always` is set. The
    mini-batches and their order are the loader's; it must not be used elsewhere during an epoch.

    Args:
        loader: Iterated once per epoch; its mini-batches are pairs of tensors on the host.
        device: The device that trains.
        count: Mini-batches ready or in the making, besides the one that is taken, at least 1.
        always: Whether a thread makes them for a CPU, too: it pays where they wait for files.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str,
        count: int = 2,
        *,
        always: bool = False,
    ) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; give at least 1")
        self._loader, self._device, self._count = loader, torch.device(device), count
        self._threaded = always or accelerator.is_accelerator(device)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch.

        Raises:
            HostMemoryError: The host has not the memory to pin.
        """
        return self._made_ahead() if self._threaded else iter(self._loader)

    def _made_ahead(self) -> Iterator[Batch]:
        iterator = iter(self._loader)

        def make() -> Batch | None:
            batch = next(iterator, None)
            if batch is None:
                return None
            inputs, targets = (accelerator.pinned(tensor, self._device) for tensor in batch)
            return inputs, targets

        pool = ThreadPoolExecutor(1, "batches")
        try:
            waiting = deque(pool.submit(make) for _ in range(self._count))
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(make))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
