"""This machine, whether each method agrees with torch on it, and which runs fit.

The findings are JSON values (`examine`), which `text` lays out for a terminal.
"""

import importlib.util
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from repro import datasets, terminal
from repro.experiments import arguments, self_tests
from repro.measure import accelerator, describe_device, memory_state
from repro.measure.host import cores
from repro.records import commit_state, library_versions

GIB = 2**30
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
_OPTIONAL = {"jupyterlab": "notebooks", "papermill": "notebooks", "ray": "cluster"}  # extras
# The memory of the papers' cards, to which runs of profile `gpu` are held; others set no limit.
LARGEST_GIB = {"mbs": 24.0, "dualbatch": 24.0, "outofcore": 16.0}

Facts = dict[str, Any]


def examine(
    device: str, root: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Facts:
    """Find out all about this machine, as JSON values; less than two minutes on two free cores."""
    start, problems = time.perf_counter(), []
    facts: Facts = {"software": software(), "host": host(), "selftests": []}
    for name, find, otherwise in (
        ("device", lambda: device_facts(device), {"device": device, "name": "unknown"}),
        ("data", lambda: data_found(root), {"found": {}, "missing": []}),
    ):
        try:
            facts[name] = find()
        except Exception as error:  # of a device or driver; all else is still reported
            facts[name] = otherwise
            problems.append({"part": name, "why": self_tests.first_line(error)})
    for test in self_tests.TESTS:
        tell(f"self-test of {test.paper}: {test.text}")
        facts["selftests"].append(self_tests.run(test, device))
    facts["failed"] = sum(one["status"] == "failed" for one in facts["selftests"])
    free = facts["device"].get("free_bytes")  # of an accelerator; `quick` holds less than 1 GiB
    facts["largest"] = [
        {"paper": paper, "largest run of profile gpu": f"{gib:g} GiB", "fits": gib <= free / GIB}
        for paper, gib in (LARGEST_GIB.items() if free else ())
    ]
    facts["problems"] = problems
    facts["to_do"] = [{"what": what, "do": do} for what, do in _to_do(facts, device)]
    facts["seconds"] = time.perf_counter() - start
    return facts


def broken(facts: Facts) -> bool:
    """Return whether a self-test failed, or something could not even be found out."""
    return bool(facts["failed"] or facts["problems"])


def software() -> Facts:
    """Return versions, torch's build, and which extras are missing."""
    commit, dirty = commit_state()
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip")}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": library_versions(),
        "torch_built_for": next((f"{name} {v}" for name, v in built.items() if v), "CPU only"),
        "commit": commit,
        "dirty": dirty,
        "missing_modules": [name for name in _OPTIONAL if importlib.util.find_spec(name) is None],
    }


def host() -> Facts:
    """Return the host's cores and memory; the available part minds a container's limit."""
    described = describe_device("cpu")
    return {
        "cores": cores(),
        "processor": described["name"],
        "memory_bytes": described["memory_bytes"],
        "available_bytes": memory_state("cpu").limit_bytes,
        # There is a GPU's driver, even where torch sees no GPU.
        "nvidia_driver": any(path.exists() for path in _NVIDIA),
        "accelerator": accelerator.present(),
    }


def device_facts(device: str) -> Facts:
    """Return the facts of a device that a record keeps, and an accelerator's free bytes."""
    facts = {"device": device} | describe_device(device)
    if accelerator.is_accelerator(device):
        facts["free_bytes"] = accelerator.free_and_total_bytes(device)[0]
    return facts


def data_found(root: str | None) -> Facts:
    """Return the datasets that can be loaded, by name, and those that are not there."""
    present = arguments.data_at_hand(root)
    known = (*datasets.NAMES, datasets.TIMES)
    return {"found": present, "missing": [name for name in known if name not in present]}


def _to_do(facts: Facts, device: str) -> Iterator[tuple[str, str]]:
    """Yield each thing missing or broken, and a command or an action for it."""
    host, software = facts["host"], facts["software"]
    for one in facts["selftests"]:
        if one["status"] == "failed":
            what = f"self-test of {one['paper']} failed: {one['text']}: {one['why']}"
            yield what, f"python -m pytest tests/{one['paper']} in a checkout shows where"
        elif one["status"] == "not run":  # which only the allocator is, for lack of a compiler
            yield one["why"], "apt-get install g++, or set $CXX"
    for one in facts["problems"]:
        yield f"{one['part']}: {one['why']}", "mend that, then run doctor again"
    if kind := host["accelerator"]:
        if device == "cpu":
            yield f"a {kind} device is here, and was not looked at", f"doctor --device {kind}"
    elif host["nvidia_driver"]:
        do = (
            f"torch is built for {software['torch_built_for']}; pytorch.org/get-started, nvidia-smi"
        )
        yield "an NVIDIA driver is here, and torch finds no device", do
    else:
        yield "no accelerator: gpu and paper would take days", "use --profile quick here"
    if missing := facts["data"]["missing"]:
        yield f"datasets not here: {', '.join(missing)}", "python -m repro data; see data/README.md"
    for name in software["missing_modules"]:
        do = f"make setup, or pip install '.[{_OPTIONAL[name]}]' in a checkout"
        yield f"not installed: {name}", do
    for one in facts["largest"]:
        if not one["fits"]:
            do = "it ends as out of memory, which is recorded; the others run"
            yield f"{one['paper']}: its largest run needs more than is free", do


def text(facts: Facts) -> str:
    """Lay findings out for a terminal."""
    tests = facts["selftests"]
    tables = (
        [{"": name, "this machine": value} for name, value in _machine(facts)],
        [
            {"result": one["status"], "method": one["paper"], "compared": one["text"]}
            | {"difference": one["difference"], "allowed": one["tolerance"]}
            for one in tests
        ],
        [one | {"fits": "yes" if one["fits"] else "no"} for one in facts["largest"]],
        [{"what": one["what"], "what to do": one["do"]} for one in facts["to_do"]],
    )
    passed = sum(one["status"] == "ok" for one in tests)
    last = "Next: make reproduce-all, or python -m repro run all."
    if broken(facts):
        last = "Do not trust what this machine computes before the failures are mended."
    verdict = f"{passed} of {len(tests)} self-tests passed, in {facts['seconds']:.0f} s. {last}"
    return "\n\n".join([*(terminal.table(rows) for rows in tables if rows), verdict])


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    for part in ("software", "host", "device"):
        for key, value in facts[part].items():
            name = f"{part} {key.removesuffix('_bytes').replace('_', ' ')}"
            if isinstance(value, dict):
                value = ", ".join(f"{library} {version}" for library, version in value.items())
            elif key.endswith("_bytes"):
                value = f"{value / GIB:.3g} GiB"
            if value and not isinstance(value, list):
                yield name, str(value)
    yield "datasets", ", ".join(facts["data"]["found"]) or "none"
