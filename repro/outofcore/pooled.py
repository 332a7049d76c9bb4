"""The chunked allocator with small requests that share chunks."""

from collections.abc import Hashable
from typing import Any

from repro.outofcore.allocator import (
    PAPER_CHUNK_BYTES,
    AllocatorError,
    BestFitAllocator,
    Block,
    ChunkedAllocator,
)

ALIGNMENT = 512  # torch's


class PooledChunkedAllocator(ChunkedAllocator):
    """Chunks of one size as in `ChunkedAllocator`; requests up to a size share them by best fit.

    A network has hundreds of small tensors (the scales of its normalisations, single numbers), and
    a chunk of 40 MiB for each takes more than a GPU has. A chunk is shared while one piece of it is
    in use, and counts as allocated whole; so that internal fragmentation stays below N_max m_c
    (equation 2). `native` does the same.

    Differs from the paper: it has every request take chunks of its own.

    Args:
        chunk_bytes: m_c.
        capacity_bytes: Bytes that the device has for chunks; None for no limit.
        small_bytes: Requests up to it share chunks; None for half a chunk.
    """

    def __init__(
        self,
        chunk_bytes: int = PAPER_CHUNK_BYTES,
        capacity_bytes: int | None = None,
        small_bytes: int | None = None,
    ) -> None:
        super().__init__(chunk_bytes, capacity_bytes)
        self.small_bytes = chunk_bytes // 2 if small_bytes is None else small_bytes
        if not 0 < self.small_bytes <= chunk_bytes:
            raise AllocatorError(
                f"small_bytes is {small_bytes!r}: give whole bytes above 0, up to chunk_bytes="
                f"{chunk_bytes}, or use ChunkedAllocator"
            )
        rounded = -(-self.small_bytes // ALIGNMENT) * ALIGNMENT
        whole = chunk_bytes // ALIGNMENT * ALIGNMENT
        if rounded > whole:
            raise AllocatorError(
                f"chunk_bytes is {chunk_bytes}: small requests are rounded up to multiples of "
                f"{ALIGNMENT}, and one of {self.small_bytes} bytes does not fit: give larger chunks"
            )
        self._pool = BestFitAllocator(
            alignment=ALIGNMENT,
            small_bytes=rounded,
            small_segment_bytes=whole,
            large_bytes=whole,
            large_segment_bytes=whole,
        )
        self._shared: dict[int, tuple[int, ...]] = {}  # the chunk behind each segment of the pool

    @property
    def shared_chunks(self) -> int:
        """Chunks that are shared now."""
        return len(self._shared)

    @property
    def blocks(self) -> dict[Hashable, tuple[int, ...]]:
        """The chunks of each live block, by number; several small ones may have the same."""
        return {name: self._chunks(taken) for name, (taken, _) in self._live.items()}

    def _chunks(self, taken: Any) -> tuple[int, ...]:
        return self._shared[taken.segment] if isinstance(taken, Block) else taken

    def _take(self, nbytes: int) -> tuple[Any, int]:
        if nbytes > self.small_bytes:
            return super()._take(nbytes)
        chunks, allocated = None, 0
        if nbytes > self._pool._free[True].largest:
            chunks, allocated = super()._take(self.chunk_bytes)
        block, _ = self._pool._take(nbytes)
        if chunks is not None:
            self._shared[block.segment] = chunks
        return block, allocated

    def _give(self, taken: Any) -> int:
        if not isinstance(taken, Block):
            return super()._give(taken)
        self._pool._give(taken)
        if not self._pool.is_free(taken.segment, small=True):
            return 0
        self._pool.release_cached()
        return super()._give(self._shared.pop(taken.segment))

    def _largest(self, capacity: int) -> int:
        largest = super()._largest(capacity)
        return largest if largest > 0 else min(self.small_bytes, self._pool._free[True].largest)
