"""Micro-batch streaming: train with mini-batches larger than the device's memory."""

from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.errors import (
    BatchSizeMismatchError,
    DistributedModelError,
    EmptyBatchError,
    HookError,
    InputGradientError,
    LossCheckError,
    LossReductionError,
    LossShapeError,
    MicroBatchError,
    MicroBatchSizeError,
    MixedSamplesError,
    NondeterministicModelError,
    NonFiniteLossError,
    UnsplittableBatchError,
    UnsupportedLossError,
)
from repro.mbs.sizing import Sizing
from repro.mbs.staging import Span
from repro.mbs.streamer import MicroBatchStreamer
from repro.mbs.weighing import StreamResult, token_counts

__all__ = [
    "BatchSizeMismatchError",
    "DeferredBatchNorm",
    "DistributedModelError",
    "EmptyBatchError",
    "HookError",
    "InputGradientError",
    "LossCheckError",
    "LossReductionError",
    "LossShapeError",
    "MicroBatchError",
    "MicroBatchSizeError",
    "MicroBatchStreamer",
    "MixedSamplesError",
    "NonFiniteLossError",
    "NondeterministicModelError",
    "Sizing",
    "Span",
    "StreamResult",
    "UnsplittableBatchError",
    "UnsupportedLossError",
    "token_counts",
]
