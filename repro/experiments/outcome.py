"""Names that moved to `design`; gone when all papers are moved."""

from repro.experiments.design import (
    RAY_ADDRESS,
    LibraryMissing,
    Outcome,
    UsageError,
    paper_toml,
    reported,
)
from repro.experiments.design import cluster_error as no_record

__all__ = [
    "RAY_ADDRESS",
    "LibraryMissing",
    "Outcome",
    "UsageError",
    "no_record",
    "paper_toml",
    "reported",
]
