"""What a machine is, as `doctor` tells it: software, device, memory, disk, links, datasets."""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from repro import datasets, paths
from repro.measure import accelerator, describe_device, memory_state
from repro.measure.files import cache_folder
from repro.records import RecordError, check_writable, commit_state, library_versions

GIB = 2**30
_COPIED_BYTES = 256 * 2**20
_REPEATS = 5
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
# What a module is for, and the extra that brings it.
_OPTIONAL = {
    "jupyterlab": ("notebooks", "notebooks"),
    "papermill": ("executing notebooks", "notebooks"),
    "ray": ("--set engine=ray", "cluster"),
}

Facts = dict[str, Any]


def software() -> Facts:
    """Return versions, what torch was built for, the compiler, and which extras are missing."""
    commit, dirty = commit_state()
    built = next(
        (f"{name} {v}" for name in ("cuda", "hip") if (v := getattr(torch.version, name, None))),
        "CPU only",
    )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": library_versions(),
        "torch_built_for": built,
        "compiler": _compiler(),
        "commit": commit,
        "dirty": dirty,
        "missing_modules": [
            {"module": name, "for": use, "extra": extra}
            for name, (use, extra) in _OPTIONAL.items()
            if importlib.util.find_spec(name) is None
        ],
    }


def _compiler() -> str | None:
    """Return the first line of the C++ compiler's version, None where there is none."""
    given = os.environ.get("CXX")
    for name in [(shlex.split(given) or [given])[0]] if given else ["c++", "g++"]:
        path = shutil.which(name)
        if path is None:
            continue
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
            return next(iter(done.stdout.splitlines()), path)
    return None


def host() -> Facts:
    """Return the host's cores and memory; what is available minds a container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "processor": describe_device("cpu")["name"],
        "memory_bytes": describe_device("cpu")["memory_bytes"],
        "available_bytes": memory_state("cpu").limit_bytes,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        # There is a GPU's driver, whatever torch sees.
        "nvidia_driver": any(path.exists() for path in _NVIDIA),
        "accelerator": accelerator.present(),
    }


def device_facts(device: str) -> Facts:
    """Return what a record keeps of a device, and how many bytes of it are free."""
    facts = {"device": device} | describe_device(device)
    if accelerator.is_accelerator(device):
        facts["free_bytes"] = accelerator.free_and_total_bytes(device)[0]
    return facts


def links(device: str) -> list[Facts]:
    """Measure the bytes per second that are copied to a device and back, or within a CPU's memory.

    Best of 5 copies of 256 MiB, or of less where there is less memory.
    """
    free = memory_state("cpu").limit_bytes
    if accelerator.is_accelerator(device):
        free = min(free, accelerator.free_and_total_bytes(device)[0])
    nbytes = max(2**20, min(_COPIED_BYTES, free // 16))
    on_host = torch.zeros(nbytes, dtype=torch.uint8)
    if not accelerator.is_accelerator(device):
        copied = torch.zeros_like(on_host)
        return [_link("memory copy", nbytes, device, lambda: copied.copy_(on_host))]
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pinned = accelerator.empty_pinned(nbytes, device, torch.uint8)
    pinned.zero_()
    measured = []
    for kind, memory in (("pinned", pinned), ("pageable", on_host)):
        for way, target, source in (
            ("to the device", on_device, memory),
            ("from the device", memory, on_device),
        ):
            copy = _copying(target, source, kind == "pinned")
            measured.append(_link(f"{kind} memory {way}", nbytes, device, copy))
    del pinned
    accelerator.empty_pinned_cache(device)
    return measured


def _copying(target: torch.Tensor, source: torch.Tensor, queued: bool) -> Callable[[], Any]:
    return lambda: target.copy_(source, non_blocking=queued)


def _link(name: str, nbytes: int, device: str, copy: Callable[[], Any]) -> Facts:
    times = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        accelerator.synchronize(device)
        start = time.perf_counter()
        copy()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return {"copy": name, "bytes": nbytes, "bytes_per_s": nbytes / max(min(times[1:]), 1e-9)}


def disk(root: str | None) -> list[Facts]:
    """Return of the folders of results, caches and data what is free, and why one is unusable."""
    places = {
        "results": paths.results_dir() / "local",
        "caches": cache_folder(),
        "data": paths.data_roots(root)[0],
    }
    facts = []
    for name, folder in places.items():
        problem, free = None, None
        try:
            nearest = next(p for p in (folder, *folder.parents) if p.exists())
            free = shutil.disk_usage(nearest).free
            if name != "data":  # which is read only, but by a download
                check_writable(nearest, name, "name another folder")
        except (RecordError, OSError) as error:
            problem = str(error)
        facts.append({"for": name, "folder": str(folder), "free_bytes": free, "problem": problem})
    return facts


def data_found(root: str | None) -> Facts:
    """Return the datasets that can be loaded, by name, and those that are not there."""
    present = datasets.available(root)
    if (times := datasets.find_times(root)) is not None:
        present[datasets.TIMES] = f"at {times}"
    known = (*datasets.NAMES, datasets.TIMES)
    return {
        "found": present,
        "missing": [name for name in known if name not in present],
        "searched": [str(folder) for folder in paths.data_roots(root)],
    }
