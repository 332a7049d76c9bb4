"""Micro-batch streaming: train with mini-batches larger than the device's memory."""

from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.errors import (
    BatchSizeMismatchError,
    EmptyBatchError,
    LossShapeError,
    MicroBatchError,
    MicroBatchSizeError,
    NonFiniteLossError,
    UnsplittableBatchError,
)
from repro.mbs.sizing import Sizing
from repro.mbs.staging import Span
from repro.mbs.streamer import MicroBatchStreamer, StreamResult

__all__ = [
    "BatchSizeMismatchError",
    "DeferredBatchNorm",
    "EmptyBatchError",
    "LossShapeError",
    "MicroBatchError",
    "MicroBatchSizeError",
    "MicroBatchStreamer",
    "NonFiniteLossError",
    "Sizing",
    "Span",
    "StreamResult",
    "UnsplittableBatchError",
]
