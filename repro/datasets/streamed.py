"""Images that stay encoded on disk, for sets that exceed the memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from repro.datasets.decoding import Item, decode
from repro.datasets.image_data import Size, as_pair
from repro.measure.host import memory_bytes

MEMORY_SHARE = 0.5  # of the machine's, that decoded images may take


class StreamedImages:
    """Images in the place of a uint8 tensor (N, 3, H, W) that would exceed the memory.

    Indexing gives some of them, still encoded; `decoded` gives pixels.

    Args:
        items: Labelled, still encoded.
        size: Side of the squares they are cut to, or (height, width) they are resized to.
    """

    def __init__(self, items: Sequence[Item], size: int | Size) -> None:
        self._items = items
        self._size = size
        self.shape = torch.Size((len(items), 3, *as_pair(size)))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, indices: Tensor) -> "StreamedImages":
        return StreamedImages([self._items[i] for i in indices.tolist()], self._size)

    def decoded(self) -> Tensor:
        """Return all of them as uint8, (N, 3, H, W), decoded by as many threads as there are cores.

        Raises:
            CorruptDatasetError: One cannot be decoded.
        """
        return decode(self._items, self._size).images


def dense(images: Tensor | StreamedImages) -> Tensor:
    """Return images as a tensor, decoded where they are not."""
    return images.decoded() if isinstance(images, StreamedImages) else images


def exceeds_memory(count: int, size: int | Size | None) -> bool:
    """Whether so many colour images of a size take more memory, decoded, than they may."""
    if size is None:
        return False
    height, width = as_pair(size)
    return count * 3 * height * width > MEMORY_SHARE * memory_bytes()
