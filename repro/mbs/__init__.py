"""Micro-batch streaming: train with mini-batches larger than the device's memory."""

from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.errors import (
    DistributedModelError,
    HookError,
    MicroBatchError,
    MicroBatchSizeError,
    NondeterministicModelError,
    NonFiniteLossError,
)
from repro.mbs.sizing import Sizing
from repro.mbs.staging import Span
from repro.mbs.streamer import MicroBatchStreamer
from repro.mbs.weighing import StreamResult, token_counts
from repro.measure.batches import (
    BatchSizeMismatchError,
    EmptyBatchError,
    InputGradientError,
    UnsplittableBatchError,
)
from repro.measure.loss_parts import (
    LossCheckError,
    LossReductionError,
    LossShapeError,
    MixedSamplesError,
    UnsupportedLossError,
)

__all__ = [
    "BatchSizeMismatchError", "DeferredBatchNorm", "DistributedModelError", "EmptyBatchError",
    "HookError", "InputGradientError", "LossCheckError", "LossReductionError", "LossShapeError",
    "MicroBatchError", "MicroBatchSizeError", "MicroBatchStreamer", "MixedSamplesError",
    "NonFiniteLossError", "NondeterministicModelError", "Sizing", "Span", "StreamResult",
    "UnsplittableBatchError", "UnsupportedLossError", "token_counts",
]  # fmt: skip
