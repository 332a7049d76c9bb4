"""μ-cuDNN (Oyama et al.): divide convolutions' batches, so that faster algorithms fit a workspace.

`tune` makes a model's convolutions run divided; `best_division`, `pareto_front`,
`assign_workspaces` and `split_batch` are its optimisers, which accept any measurements.
"""

from repro.microconv.backends import BackendMissingError, stated_error
from repro.microconv.cache import BenchmarkCache, CacheError, CacheWarning
from repro.microconv.cluster import split_batch
from repro.microconv.conv import TunedConv2d
from repro.microconv.kernels import Convolution, Kernel
from repro.microconv.operators import LayerGoneError
from repro.microconv.optimize import (
    POLICIES,
    Candidate,
    Division,
    assign_workspaces,
    best_division,
    micro_batch_sizes,
    pareto_front,
)
from repro.microconv.results import KernelReport, TuningReport, WorkspaceLimitError
from repro.microconv.sampling import NotTunableError
from repro.microconv.tuner import untune
from repro.microconv.tuning import find_kernels, tune

__all__ = [
    "POLICIES", "BackendMissingError", "BenchmarkCache", "CacheError", "CacheWarning", "Candidate",
    "Convolution", "Division", "Kernel", "KernelReport", "LayerGoneError", "NotTunableError",
    "TunedConv2d", "TuningReport", "WorkspaceLimitError", "assign_workspaces", "best_division",
    "find_kernels", "micro_batch_sizes", "pareto_front", "split_batch", "stated_error", "tune",
    "untune",
]  # fmt: skip
