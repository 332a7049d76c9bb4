"""Caches of several machines made one, for `repro.microconv.cached_times`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from repro.experiments.outcome import UsageError
from repro.microconv import BenchmarkCache, CacheError


def merge(into: str, sources: Sequence[str]) -> Iterator[str]:
    """Take over what caches hold, and yield a line about each.

    Raises:
        UsageError: A file is not there, or no cache.
    """
    for source in sources:
        if not Path(source).is_file():
            raise UsageError(f"there is no cache {source}; give a file that `tune` has made")
    try:
        cache = BenchmarkCache(into)
        for source in sources:
            yield f"{source}: {cache.take(BenchmarkCache(source))} times taken over"
    except CacheError as error:
        raise UsageError(str(error)) from error
