"""Mini-batches cut, flipped, resized and normalised from a uint8 tensor on one device.

Every augmentation is one operation on the whole batch. A random crop is one `index_select` on a
view of all windows: row s of the view is the window that begins at element s of the tensor, so
that each row is copied as a block. Pixels stay uint8 until the last step, a quarter of the bytes.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from repro.datasets.image_data import Size, as_pair, check_counts, check_size
from repro.measure import accelerator

Batch = tuple[Tensor, Tensor]


class TensorLoader:
    """Iterate over mini-batches of a dataset that lies on a device as one tensor.

    The order and the augmentation of an epoch depend only on `seed` and the number of the epoch,
    not on the batch size, the device or torch's global generator, which stays unchanged. Every
    iteration begins a new epoch. A batch is a separate tensor and stays valid.

    Images are cropped, then flipped, resized and normalised: (pixel / 255 - mean) / std.

    Args:
        images: uint8, (N, C, H, W).
        targets: int64 labels, (N,), or uint8 masks, (N, H, W), which are cropped, flipped and
            resized (nearest) like their images.
        batch_size: Images in a mini-batch.
        seed: Seed of the order and the augmentation, at least 0.
        shuffle: Visit the images in random order.
        crop_size: Side or (height, width) of the crop from the padded image; None for the images'.
        crop: Cut at a random place, or at the centre.
        padding: Zeros added on each side before the crop.
        flip: Mirror left and right with probability one half.
        resolution: Side (of square crops only) or (height, width) of the batches, resized
            bilinearly with antialiasing; None is the size of the crop.
        mean: Mean of every channel, of pixels scaled to [0, 1]; by default that of `images`.
        std: Standard deviation of every channel, likewise.
        device: Device of the data and the batches; by default the device of `images`.

    Raises:
        ValueError: An argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        crop_size: int | Size | None = None,
        crop: Literal["random", "center"] = "random",
        padding: int = 0,
        flip: bool = False,
        resolution: int | Size | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.numel() == 0:
            raise ValueError(
                f"images: {images.dtype} of shape {tuple(images.shape)}; expected uint8 pixels "
                "(N, C, H, W) with no side 0, normalisation happens in the loader"
            )
        labels = targets.dtype == torch.int64 and targets.dim() == 1
        masks = targets.dtype == torch.uint8 and targets.shape[1:] == images.shape[2:]
        if len(targets) != len(images) or not (labels or masks):
            raise ValueError(
                f"targets: {targets.dtype} of shape {tuple(targets.shape)}; expected int64 labels "
                f"(N,) or uint8 masks (N, H, W) for images of shape {tuple(images.shape)}"
            )
        self.masked = masks  # cut and flipped as images of one channel, (N, 1, H, W)
        check_counts(0, seed=seed, padding=padding)
        self.seed, self.padding = int(seed), padding
        self.shuffle, self.flip, self.epoch = shuffle, flip, 0
        height, width = self._image_size = tuple(images.shape[2:])

        if crop not in ("random", "center"):
            raise ValueError(f"crop={crop!r}: expected 'random' or 'center'")
        self.crop = crop
        self.crop_size = as_pair(check_size(crop_size, "crop_size") or (height, width))
        padded = height + 2 * padding, width + 2 * padding
        if self.crop_size[0] > padded[0] or self.crop_size[1] > padded[1]:
            raise ValueError(
                f"crop_size={self.crop_size} does not fit the padded images of {padded[0]}x"
                f"{padded[1]} pixels: give a smaller crop_size or more padding"
            )
        self.set_batch_size(batch_size)
        self.set_resolution(resolution)

        self.device = torch.device(device) if device is not None else images.device
        self._images = images.to(self.device).contiguous()
        self._targets = (targets.unsqueeze(1) if masks else targets).to(self.device).contiguous()
        if mean is None or std is None:
            measured = channel_statistics(self._images)
            mean = measured[0] if mean is None else mean
            std = measured[1] if std is None else std
        self.mean, self.std = (tuple(map(float, values)) for values in (mean, std))
        finite = all(map(math.isfinite, self.mean + self.std))
        if not len(self.mean) == len(self.std) == images.shape[1] or not finite or min(std) <= 0:
            raise ValueError(
                f"mean={self.mean} and std={self.std}: expected a finite number for each of the "
                f"{images.shape[1]} channels, std above 0; constant images have 0, give std="
            )
        # (x / 255 - mean) / std as one product and one sum.
        scale = [1 / (255 * deviation) for deviation in self.std]
        shift = [-m / deviation for m, deviation in zip(self.mean, self.std, strict=True)]
        self._scale, self._shift = (
            torch.tensor(part, device=self.device).view(1, -1, 1, 1) for part in (scale, shift)
        )

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size, at least 1, from the next iteration on."""
        check_counts(batch_size=batch_size)
        self.batch_size = int(batch_size)

    def set_resolution(self, resolution: int | Size | None) -> None:
        """Set the size of the batches from the next iteration on; see `TensorLoader`."""
        size = as_pair(check_size(resolution, "resolution") or self.crop_size)
        height, width = self.crop_size
        if height != width and not isinstance(resolution, tuple | list | None):
            raise ValueError(
                f"resolution={resolution} would squash crops of {height}x{width} pixels to a "
                "square: give a pair (height, width)"
            )
        self.resolution = size

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, at least 0; later iterations count on."""
        check_counts(0, epoch=epoch)
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return -(-len(self._targets) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch.

        Yields float32 images, (B, C, height, width), and int64 labels, (B,), or masks,
        (B, height, width).
        """
        plan = self._plan_epoch(self.epoch)
        self.epoch += 1
        return self._batches(plan, len(self), self.batch_size, self.resolution)

    def _plan_epoch(self, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw order, crop corners (row * width + column) and flips of an epoch, each (N,)."""
        generator, n = generator_of(self.seed, epoch), len(self._targets)
        free = [
            side + 2 * self.padding - cut
            for side, cut in zip(self._image_size, self.crop_size, strict=True)
        ]
        with torch.device("cpu"):  # whatever the caller's default device is
            order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
            if self.crop == "random":
                top, left = (torch.randint(f + 1, (n,), generator=generator) for f in free)
            else:
                top, left = (torch.full((n,), f // 2) for f in free)
            flips = torch.randint(2, (n,), generator=generator) if self.flip else torch.zeros(0)
        corner = top * (self._image_size[1] + 2 * self.padding) + left
        # Pinned: the host does not wait for the epoch before.
        pinned = (accelerator.pinned(part, self.device) for part in (order, corner, flips))
        order, corner, flips = (part.to(self.device, non_blocking=True) for part in pinned)
        return order, corner, flips

    def _batches(
        self, plan: tuple[Tensor, Tensor, Tensor], count: int, batch_size: int, resolution: Size
    ) -> Iterator[Batch]:
        for i in range(count):
            rows = slice(i * batch_size, (i + 1) * batch_size)
            index, corner, flips = (part[rows] for part in plan)
            images = self._cut(self._images, index, corner, flips).to(torch.float32)
            if resolution != self.crop_size:
                images = functional.interpolate(
                    images, resolution, mode="bilinear", antialias=True, align_corners=False
                )
            images.mul_(self._scale).add_(self._shift)
            if not self.masked:
                yield images, self._targets.index_select(0, index)
                continue
            masks = self._cut(self._targets, index, corner, flips)
            if resolution != self.crop_size:
                masks = functional.interpolate(masks, resolution, mode="nearest-exact")
            yield images, masks.squeeze(1).to(torch.int64)

    def _cut(self, tensor: Tensor, index: Tensor, corner: Tensor, flips: Tensor) -> Tensor:
        """Pad, crop and flip rows `index` of a uint8 (N, C, H, W) tensor."""
        if self.padding:
            batch = functional.pad(tensor.index_select(0, index), (self.padding,) * 4)
            index = torch.arange(len(index), device=self.device)
        else:
            batch = tensor
        if tuple(batch.shape[2:]) == self.crop_size:
            batch = batch if self.padding else batch.index_select(0, index)
        else:
            channels, height, width = batch.shape[1:]
            strides = (1, height * width, width, 1)
            sizes = (channels, *self.crop_size)  # of a window: a row for each first element
            last = sum((size - 1) * step for size, step in zip(sizes, strides[1:], strict=True))
            windows = batch.as_strided((batch.numel() - last, *sizes), strides)
            batch = windows.index_select(0, index * batch[0].numel() + corner)
        if self.flip:
            # Row b is image b, row B + b its mirror image. Selecting rows of uint8 is faster than
            # choosing pixel by pixel.
            both = torch.cat((batch, batch.flip(-1)))
            rows = torch.arange(len(index), device=self.device) + flips * len(index)
            batch = both.index_select(0, rows)
        return batch


class Ahead:
    """A loader's mini-batches, `count` of them made ahead by a thread while the device computes.

    They are pairs of tensors in pinned memory of the host, from which an accelerator copies during
    computations. For a CPU the loader's are passed on, unless `always` is set, which is faster
    where they wait for files. During an epoch nothing else may use the loader.
    """

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str, count: int = 2, *,
        always: bool = False,
    ) -> None:  # fmt: skip
        check_counts(count=count)
        self._loader, self._device, self._count = loader, torch.device(device), count
        self._threaded = always or accelerator.is_accelerator(device)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch; raises HostMemoryError if the host has too little memory to pin."""
        return self._made_ahead() if self._threaded else iter(self._loader)

    def _made_ahead(self) -> Iterator[Batch]:
        iterator = iter(self._loader)

        def make() -> Batch | None:
            try:
                batch = next(iterator)
            except StopIteration:
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


def generator_of(*numbers: int) -> torch.Generator:
    """A CPU generator seeded by several numbers, so that every device sees the same epoch."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W) scaled to [0, 1]."""
    # Integer sums of one chunk are exact, and a chunk keeps the wider copy of the pixels small.
    chunk = max(1, (1 << 24) // images[0].numel())
    total = torch.zeros(images.shape[1], dtype=torch.float64, device="cpu")
    squares = torch.zeros_like(total)
    for part in images.split(chunk):
        pixels = part.to(torch.int32)
        total += pixels.sum((0, 2, 3)).cpu()
        squares += pixels.square_().sum((0, 2, 3)).cpu()
    count = images.numel() / images.shape[1] * 255
    mean = total / count
    variance = (squares / (count * 255) - mean.square()).clamp_min(0)
    # Of a constant channel rounding would leave a little, by which the pixels were divided.
    variance[squares * (images.numel() // images.shape[1]) == total.square()] = 0
    return tuple(mean.tolist()), tuple(variance.sqrt().tolist())
