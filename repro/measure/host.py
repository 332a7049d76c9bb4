"""Host memory available to this process, within the limit of its container."""

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MARGIN_BYTES = 4 * 2**30  # left to other processes; on a small machine a sixteenth of memory


def cores() -> int:
    """The CPU cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")  # not everywhere
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of this machine, or of the container if that is less."""
    return min([_physical_bytes(), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Memory that can be allocated now; cached files count as free."""
    free = [max(0, limit - used) for limit, used in _limits()]
    kib = _noted(_MEMINFO, "MemAvailable:")
    return min([_physical_bytes() if kib is None else 1024 * kib, *free])


def pinnable_bytes() -> int:
    """Memory that may be pinned now: the available bytes less a margin.

    Pinned memory cannot be swapped out: if too much is taken, the system ends processes.
    """
    return max(0, available_bytes() - min(_MARGIN_BYTES, memory_bytes() // 16))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _noted(file: Path, name: str) -> int | None:
    """The number behind a name in one of the system's files; None if it is not there."""
    try:
        lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return next(int(value) for key, value, *_ in lines if key == name)
    except (OSError, ValueError, StopIteration):
        return None


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, without cached files, of the control groups that hold this process."""
    for folder in _folders():
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                most = int((folder / limit).read_text(encoding="utf-8"))
                taken = int((folder / used).read_text(encoding="utf-8"))
            except (OSError, ValueError):  # the file is missing, or says "max"
                continue
            yield most, max(0, taken - (_noted(folder / "memory.stat", cached) or 0))


def _folders() -> set[Path]:
    """The folders of this process's groups and of their parents."""
    found = {_GROUPS, _GROUPS / "memory"}  # a container sees its own group there
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            own = _GROUPS / controllers / path.lstrip("/")
            found |= {own, *(parent for parent in own.parents if parent.is_relative_to(_GROUPS))}
    return found
