"""A name that moved to `query`; gone when all papers are moved."""

from repro.experiments.query import of_processes

__all__ = ["of_processes"]
