"""Shares: a worker's part of a shuffled pass over the data, its mini-batches and their images.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 3.3, 4.1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import EpochSetting
from repro.measure.precision import widened

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Share:
    """A part of one shuffled pass over the data, which one worker trains between pull and push.

    Its mini-batches have `batch_size` samples each, and the last one the rest: 25 samples in
    batches of 10 give 10, 10 and 5.
    """

    indices: Tensor  # int64, (d_S,) or (d_L,): its samples, in order
    batch_size: int  # B_S or B_L
    resolution: int | None  # (short) side of the images in pixels; None for their own
    seed: int  # of augmentation and dropout, different for each share of each worker


Data = tuple[Tensor, Tensor] | Callable[[Share], Batches]


def share_of(
    plan: DualBatchPlan, worker: int, iteration: int, setting: EpochSetting, seed: int
) -> Share:
    """A worker's part of the shuffled pass number `iteration` (equation 6).

    The shares of a pass follow each other in one permutation, so that together they have each
    sample once: d = n_L d_L + n_S d_S except for rounding. For that the plans of a pass must have
    the same d_S and d_L. Differs from the authors' code, in which each worker draws from its own
    shuffle.
    """
    kind = plan.kinds[worker]
    start = sum(plan.share_of(other) for other in plan.kinds[:worker])
    drawn = np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(drawn[0] >> np.uint64(1)))
    order = torch.randperm(plan.samples, generator=generator, device="cpu")
    # Rounding up may require a few more samples than the data has.
    places = (start + torch.arange(plan.share_of(kind), device="cpu")) % plan.samples
    own_seed = int(np.random.SeedSequence([seed, iteration, worker]).generate_state(1)[0])
    return Share(order[places], plan.batch_of(kind), setting.resolution, own_seed)


def batches_of(data: Data, share: Share, whose: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches of a share, (B, ...) each; messages of errors name its owner."""
    if callable(data):
        yield from _checked(data(share), share, whose)
        return
    inputs, targets = data
    side = resized(inputs.shape, share.resolution)
    for index in share.indices.to(inputs.device).split(share.batch_size):
        batch = inputs[index]
        if side is not None and side != batch.shape[2]:
            smaller = functional.interpolate(
                widened(batch), (side, side), mode="bilinear", antialias=True, align_corners=False
            )
            batch = smaller.to(batch.dtype)
        yield batch, targets[index]


def _checked(batches: Any, share: Share, whose: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a data function's mini-batches as long as they are the share's."""
    left, step = len(share.indices), 0
    due = f"a share of {left} samples in batches of {share.batch_size} ({whose})"
    for step, batch in enumerate(batches, 1):
        wanted, wrong = min(share.batch_size, left), ""
        if not (len(batch) == 2 and all(isinstance(t, Tensor) and t.dim() for t in batch)):
            wrong = "something else than two tensors with the samples first"
        elif not len(batch[0]) == len(batch[1]) == wanted or not wanted:
            wrong = f"{len(batch[0])} inputs and {len(batch[1])} targets where {wanted} are due"
        elif batch[0].dim() == 4 and share.resolution not in (None, min(batch[0].shape[2:])):
            wrong = f"inputs of shape {tuple(batch[0].shape)} for {share.resolution} pixels"
        if wrong:
            raise ValueError(
                f"the data function gives {wrong} at step {step} of {due}; give pairs of inputs "
                "and targets: those of share.indices, share.batch_size at a time and the rest "
                "last, the short side of images share.resolution (what changes the batch size goes "
                "around the training: a plan for each size)"
            )
        left -= wanted
        yield batch[0], batch[1]
    if left:
        raise ValueError(
            f"the data function ends after step {step} of {due}, {left} samples too early; give "
            "all samples of share.indices"
        )


def resized(shape: Sequence[int], side: int | None) -> int | None:
    """Side of square images (N, C, H, H) at a resolution; they must not be enlarged."""
    if side is None:
        return None
    if len(shape) != 4 or shape[2] != shape[3] or side > shape[2]:
        raise ValueError(
            f"the schedule has resolution {side}, and the inputs are {tuple(shape)}; only square "
            "images (N, C, H, H) are resized, to their own side or less: give lower resolutions or "
            "resolution=None, or as data a function that resizes them itself"
        )
    return side
