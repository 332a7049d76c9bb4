"""The outcome of `tune`, layer by layer."""

import math
from dataclasses import dataclass, field

from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Trial
from repro.microconv.optimize import Division

MIB = 2**20


class WorkspaceLimitError(ValueError):
    """Kernels cannot be held to a limit: `least_bytes` would do; `kernels` have their own least."""

    def __init__(self, limit_bytes: int, mode: str, kernels: dict[str, int], least: int) -> None:
        self.least_bytes, self.kernels = least, kernels
        largest = sorted(kernels, key=lambda name: -kernels[name])
        needs = ", ".join(f"{name} needs {kernels[name]}" for name in largest[:6])
        each = "for each kernel" if mode == "WR" else "in all"
        super().__init__(
            f"{len(kernels)} kernels cannot be held to {limit_bytes} bytes of workspace {each}, "
            f"such as: {needs} bytes; the smallest limit that would do is {least} bytes: give "
            f"that, or strict=False to leave torch's own convolution without a limit"
        )


@dataclass(frozen=True)
class KernelReport:
    """The outcome for one kernel of one layer; times are medians in seconds."""

    layer: str  # its name in the model
    kernel: Kernel
    batch: int  # the mini-batch size
    division: Division | None  # that runs; None if the kernel is left to torch
    time_s: float  # of the division, or of torch's own convolution, allocating its result
    native_s: float  # of torch's own convolution, in turns with the division
    native_bytes: int  # measured, that torch's own convolution allocates internally
    error: float  # the largest stated one of its algorithms; see `stated_error`
    needed: bool = False  # whether torch's own would exceed the limit: it runs even if slower

    @property
    def workspace_bytes(self) -> int:
        """Temporary bytes of the kernel in its current form."""
        return self.division.workspace_bytes if self.division else self.native_bytes


@dataclass
class TuningReport:
    """The outcome of `tune`; as text, a table of layers, unchanged layers, time and memory."""

    mode: str  # WR or WD
    policy: str  # for the micro-batch sizes
    limit_bytes: int  # workspace limit, of each kernel (WR) or of all (WD)
    strict: bool = True  # whether the limit applies to torch's own convolutions, too
    # Times of the whole model, tuned and untuned; None if nothing is tuned or no gain was required.
    model: Trial | None = None
    untied: list[str] = field(default_factory=list)  # layers that do not make the model faster
    kernels: list[KernelReport] = field(default_factory=list)  # in the order of first use
    skipped: dict[str, str] = field(default_factory=dict)  # by unchanged layer, the reason
    unavailable: list[str] = field(default_factory=list)  # a line for each such backend
    allocated_bytes: int = 0  # workspace that the model holds now
    measured: int = 0  # number of measured times
    cached: int = 0  # number of times from the cache

    @property
    def time_s(self) -> float:
        """Seconds of all kernels in their current form."""
        return math.fsum(entry.time_s for entry in self.kernels)

    @property
    def native_s(self) -> float:
        """Seconds of all kernels by torch's own convolutions."""
        return math.fsum(entry.native_s for entry in self.kernels)

    @property
    def workspace_bytes(self) -> int:
        """Largest temporary bytes of a kernel (WR), or their sum over all kernels (WD)."""
        needs = [entry.workspace_bytes for entry in self.kernels]
        return max(needs, default=0) if self.mode == "WR" else sum(needs)

    def __str__(self) -> str:
        lines = [f"{'layer, kernel':40} {'ms':>9} {'torch ms':>9} {'MiB':>8}  runs as"]
        for e in self.kernels:
            times = f"{1e3 * e.time_s:9.2f} {1e3 * e.native_s:9.2f}"
            runs_as = e.division or "torch's own"
            form = f"{e.workspace_bytes / MIB:8.2f}  {runs_as}"
            lines.append(f"{f'{e.layer} {e.kernel.kind}':40} {times} {form}")
        each = "for each kernel" if self.mode == "WR" else "in all"
        lines += [
            f"convolutions: {1e3 * self.time_s:.2f} ms, torch's own {1e3 * self.native_s:.2f} ms",
            f"{self.mode}, policy {self.policy}, limit {self.limit_bytes / MIB:g} MiB {each}; "
            f"{self.allocated_bytes / MIB:.2f} MiB of workspace held for divided kernels",
            f"{self.measured} times measured, {self.cached} from the cache",
        ]
        if self.model is not None:
            tuned_s, untuned_s = self.model.medians_s
            lines.append(
                f"the whole model, measured: {1e3 * tuned_s:.2f} ms, untuned {1e3 * untuned_s:.2f} "
                f"ms ({1 / self.model.ratio:.2f}×, {len(self.model.native_s)} rounds in turns)"
            )
        if (needed := sum(entry.needed for entry in self.kernels)) and self.strict:
            lines.append(f"{needed} kernels run divided to keep to the limit, whatever that takes")
        if self.workspace_bytes > self.limit_bytes:
            most = f"{self.workspace_bytes / MIB:.2f} MiB {each}"
            lines.append(f"NOT held to the limit: torch's own convolutions take up to {most}")
        lines += [f"left as it is: {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"not available: {problem}" for problem in self.unavailable]
        return "\n".join(lines)
