"""Names that moved to `query`; gone when all papers are moved."""

from repro.experiments.query import find_source, of_reference, results_of

__all__ = ["find_source", "of_reference", "results_of"]
