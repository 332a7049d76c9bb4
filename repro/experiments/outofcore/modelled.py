"""Iterations that are not computed: traces at any batch size, and the times of a published GPU.

The paper estimates how far functions lie apart by the bytes of their variables (figure 1); so do
the times here. A function takes a fixed time, and its bytes at a fixed rate.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from repro.experiments.outofcore.building import Config, training_step
from repro.experiments.outofcore.fitting import GIB
from repro.outofcore import Trace, record

_RECORDED = (2, 4)  # batch sizes; one of 1 may take other paths


def trace_at(config: Config, batch: int) -> Trace:
    """The trace of an iteration at a batch size, without computing any.

    Two small ones are recorded under torch's `FakeTensorMode`; bytes are linear in the batch size.
    """
    precision = config.get("precision", "float32")
    small, large = _recorded(json.dumps([config["model"], config["image"], precision]))
    few, more = _RECORDED
    sizes = {
        name: size + (large.sizes[name] - size) * (batch - few) // (more - few)
        for name, size in small.sizes.items()
    }
    return replace(small, sizes=sizes)


def limit_bytes(config: Config) -> int:
    """The memory limit: as given, or the mean of the needs of two batch sizes."""
    if "limit_gib" in config:
        return int(config["limit_gib"] * GIB)
    return sum(trace_at(config, batch).peak_bytes for batch in config["limit_between"]) // 2


@lru_cache(maxsize=8)
def _recorded(described: str) -> tuple[Trace, Trace]:
    model, image, precision = json.loads(described)
    traces = []
    # When variables end shows in the third iteration; their sizes in the second already.
    for batch, warmup in zip(_RECORDED, (2, 1), strict=True):
        with FakeTensorMode():
            config = {"model": model, "image": image, "precision": precision, "batch": batch}
            step = training_step(config, "cpu")
            traces.append(record(step, warmup=warmup, device="meta", in_parts=False))
    small, large = traces
    if small.functions != large.functions or small.kinds != large.kinds:
        raise ValueError(
            f"iterations of {model} at batch sizes of {_RECORDED} differ in more than "
            "sizes: its trace cannot be extended"
        )
    return small, large


@dataclass(frozen=True)
class Rates:
    """The time of an iteration on a device."""

    fixed_s: float  # whatever its batch size, shared out evenly
    bytes_per_s: float  # at which functions read and write their variables beyond that
    most_bytes_per_s: float = float("inf")  # of an iteration, its fixed part included

    @classmethod
    def fit(cls, baseline: Config) -> "Rates":
        """Fit to throughputs that were published for training in core; one alone fixes no line.

        Least squares of seconds = fixed_s + bytes / bytes_per_s. The line is not followed beyond
        the fastest that was published.
        """
        batches = baseline["batches"]
        seconds = [b / rate for b, rate in zip(batches, baseline["images_per_s"], strict=True)]
        touched = [sum(trace_at(baseline, batch).needs_bytes) for batch in batches]
        most = max(nbytes / time for nbytes, time in zip(touched, seconds, strict=True))
        if len(batches) == 1:
            return cls(0.0, most, most)
        slope, fixed = np.polyfit(touched, seconds, 1)
        return cls(float(fixed), float(1 / slope), most)

    def times(self, trace: Trace) -> NDArray[np.float64]:
        """The seconds of each function of a trace, (n,)."""
        touched = np.array(trace.needs_bytes, dtype=np.float64)
        times = touched / self.bytes_per_s + self.fixed_s / len(touched)
        return times * max(1.0, touched.sum() / self.most_bytes_per_s / times.sum())
