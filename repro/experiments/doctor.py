"""What a user runs first: is this machine fit, does every method work on it, what will fit, for how
long, and what to do about what is missing.

The findings are JSON values (`examine`), which `text` lays out for a terminal.
"""

import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from repro.experiments import estimates, selftests, surroundings
from repro.experiments.surroundings import GIB, Facts

WIDTH = 98
_LOW_DISK_BYTES = 2 * GIB
_NO_DATA: Facts = {"found": {}, "missing": [], "searched": []}
_BUSY = 1.5  # processes that want each core, beyond which times say little


def examine(
    device: str, root: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Facts:
    """Find out all about this machine; less than two minutes on two free cores.

    Args:
        device: Its one name, such as ``cpu`` or ``cuda:0``.
        root: Folder searched first for datasets.
        tell: Called with a line before each part that takes seconds.

    Returns:
        JSON values: `software`, `host`, `device`, `links`, `disk`, `data`, `selftests`, `failed`
        (how many of them), `pace`, `estimates`, `problems` (what could not be found out),
        `to_do` (what is missing, and what to do), `seconds`.

    Raises:
        UsageError: `root` or `$REPRO_DATA` is no folder.
    """
    start = time.perf_counter()
    problems: list[dict[str, str]] = []

    def part(name: str, find: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return find()
        except Exception as error:  # of a device or driver; all else is still reported
            problems.append({"part": name, "why": selftests.said(error)})
            return otherwise

    facts: Facts = {
        "software": surroundings.software(),
        "host": surroundings.host(),
        "device": part(
            "the device",
            lambda: surroundings.device_facts(device),
            {"device": device, "type": device.partition(":")[0], "name": "unknown"},
        ),
    }
    tell("copying memory")
    facts["links"] = part("copying memory", lambda: surroundings.links(device), [])
    facts["disk"] = surroundings.disk(root)
    facts["data"] = part("datasets", lambda: surroundings.data_found(root), _NO_DATA)
    checked = selftests.run_all(device, tell)
    facts["selftests"] = [one.to_json() for one in checked]
    facts["failed"] = sum(one.status == "failed" for one in checked)
    tell("timing a training step")
    pace = estimates.measure_pace(device)
    facts["pace"] = {"ratio": pace.ratio, "what": pace.what}
    host_bytes = facts["host"]["available_bytes"]
    device_bytes = facts["device"].get("free_bytes", host_bytes)
    facts["estimates"] = [
        one.to_json()
        for one in estimates.estimate_all(device, device_bytes, host_bytes, pace, root)
    ]
    facts["problems"] = problems
    facts["to_do"] = list(_to_do(facts))
    facts["seconds"] = time.perf_counter() - start
    return facts


def _to_do(facts: Facts) -> Iterator[dict[str, str]]:  # noqa: C901 (a list of things to ask)
    """Yield what is missing or broken, and a command or an action for each."""

    def entry(what: str, do: str) -> dict[str, str]:
        return {"what": what, "do": do}

    device, host, software = facts["device"], facts["host"], facts["software"]
    for one in facts["selftests"]:
        if one["status"] == "failed":
            yield entry(
                f"self-test of {one['paper']} failed: {one['text']}",
                f"python -m pytest tests/{one['paper']} in a checkout shows where",
            )
    for one in facts["problems"]:
        yield entry(f"{one['part']}: {one['why']}", "mend that, then run doctor again")
    if host["nvidia_driver"] and host["accelerator"] is None:
        if software["torch_built_for"] == "CPU only":
            do = "pip install a torch built for CUDA (pytorch.org/get-started says which)"
        else:
            do = "nvidia-smi says what ails the driver; CUDA_VISIBLE_DEVICES may hide the device"
        yield entry("an NVIDIA driver is here, and torch finds no device", do)
    elif host["accelerator"] is None:
        yield entry("no accelerator: gpu and paper would take days", "use --profile quick here")
    elif device["type"] == "cpu":
        kind = host["accelerator"]
        yield entry(f"a {kind} device is here, and was not looked at", f"doctor --device {kind}")
    if software["compiler"] is None:
        yield entry("no C++ compiler: no chunked allocator", "apt-get install g++, or set $CXX")
    for disk in facts["disk"]:
        if disk["problem"]:
            variable = {"results": "REPRO_RESULTS", "caches": "REPRO_CACHE", "data": "REPRO_DATA"}
            do = f"export {variable[disk['for']]}=FOLDER, with one that can be written"
            yield entry(f"{disk['for']} cannot be written to {disk['folder']}", do)
        elif (disk["free_bytes"] or 0) < _LOW_DISK_BYTES:
            yield entry(f"little disk for {disk['for']}", f"free some of {disk['folder']}")
    if facts["data"]["missing"]:
        missing = ", ".join(facts["data"]["missing"])
        yield entry(f"datasets not here: {missing}", "python -m repro data; see data/README.md")
    for extra in dict.fromkeys(one["extra"] for one in software["missing_modules"]):
        names = [one["module"] for one in software["missing_modules"] if one["extra"] == extra]
        yield entry(
            f"not installed: {', '.join(names)}",
            f"make setup, or pip install '.[{extra}]' in a checkout",
        )
    for one in facts["estimates"]:
        if one["fits"] is False:
            yield entry(
                f"{one['paper']} {one['profile']}: its largest runs want more memory than is free",
                "they end as out of memory or failed, which is recorded; the others run",
            )
    load = host["load"]
    if load is not None and load > _BUSY * host["cores"]:
        yield entry(
            f"other processes keep the cores busy (load {load:.1f} on {host['cores']})",
            "measure when they have ended: times of today are too long",
        )


def text(facts: Facts) -> str:
    """Lay findings out for a terminal, within 98 columns where the names of folders allow."""
    parts = [
        _table(list(_machine(facts))),
        _section("Self-tests (relative difference, of what is allowed)", _selftests(facts)),
        _section("What fits, and how long it takes (estimates)", _estimates(facts)),
        _section("What to do", _advice(facts)),
        "\n".join(_wrapped(_verdict(facts), 0)),
    ]
    return "\n\n".join(parts)


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    software, host, device = facts["software"], facts["host"], facts["device"]
    versions = software["versions"]
    yield "Python", f"{software['python']} on {software['system']}"
    built = software["torch_built_for"]
    yield "torch", f"{versions['torch']} (built for {built}), torchvision {versions['torchvision']}"
    if software["commit"]:
        yield "repro", software["commit"][:10] + (" with changes" if software["dirty"] else "")
    yield "compiler", software["compiler"] or "none"
    yield "cores", f"{host['cores']} ({host['processor']}), torch uses {torch.get_num_threads()}"
    memory = (host["available_bytes"], host["memory_bytes"])
    yield "host memory", "{} free of {}".format(*map(gib, memory))
    if device["type"] == "cpu":
        yield "device", "cpu"
    else:
        driver = f", driver {device['driver']}" if device.get("driver") else ""
        yield "device", f"{device['device']}, {device['name']}{driver}"
        if "free_bytes" in device:
            memory = (device["free_bytes"], device["memory_bytes"])
            yield "its memory", "{} free of {}".format(*map(gib, memory))
    for link in facts["links"]:
        yield link["copy"], f"{link['bytes_per_s'] / 1e9:.1f} GB/s"
    for disk in facts["disk"]:
        state = "cannot be written" if disk["problem"] else f"{gib(disk['free_bytes'])} free"
        yield f"{disk['for']} in", f"{disk['folder']}: {state}"
    yield "datasets", ", ".join(facts["data"]["found"]) or "none"


def _selftests(facts: Facts) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for one in facts["selftests"]:
        difference = ""
        if one["status"] == "ok":
            difference = f"{one['difference']:.0e} of {one['tolerance']:.0e}"
            if not one["difference"]:
                difference = "the same"
        rows.append((one["status"], one["paper"], one["text"], difference))
    lines = _aligned(rows)
    for number, one in reversed(list(enumerate(facts["selftests"]))):
        if one["why"]:
            lines[number + 1 : number + 1] = _wrapped(one["why"], 11)
    return lines


def _estimates(facts: Facts) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("paper", "profile", "runs", "time", "memory wanted", "fits", "data")
    ]
    for one in facts["estimates"]:
        seconds = one["seconds"]
        rows.append(
            (
                one["paper"],
                one["profile"],
                str(one["runs"]),
                estimates.NO_RATE if seconds is None else duration(seconds),
                _memory(one),
                {True: "yes", False: "no", None: "?"}[one["fits"]],
                ", ".join(dict.fromkeys(name or "(none)" for name in one["data"].values())) or "–",
            )
        )
    pace = facts["pace"]
    ratio = "" if pace["what"].startswith("not measured") else f", times {pace['ratio']:.2f}"
    texts = dict.fromkeys(one["source"] for one in facts["estimates"] if one["seconds"])
    sources = ", ".join(dict.fromkeys(s.partition(",")[0] for s in texts)) or "no reference record"
    note = (
        f"Time: seconds of {sources}{ratio} ({pace['what']}). Memory: of tensors of the "
        "largest run, by the same records or from its settings; ? is not known before it has run. "
        f"{estimates.NO_RATE}: no reference record of this kind of device under this profile. "
        "(none): that part of the paper is not run without its data."
    )
    return [*_aligned(rows), *_wrapped(note, 2)]


def _memory(one: Facts) -> str:
    device, host = one["device_bytes"], one["host_bytes"]
    if host is None:
        return "?" if device is None else gib(device)
    return f"{gib(host)} host" if device is None else f"{gib(device)} + {gib(host)} host"


def _advice(facts: Facts) -> list[str]:
    lines = []
    for one in facts["to_do"]:
        lines += _wrapped(f"- {one['what']}", 2, "  ")
        lines += _wrapped(f"-> {one['do']}", 4, "   ")
    return lines or ["  nothing is missing"]


def _verdict(facts: Facts) -> str:
    count, ran = len(facts["selftests"]), sum(o["status"] == "ok" for o in facts["selftests"])
    said = (
        f"All {count} self-tests passed" if ran == count else f"{ran} of {count} self-tests passed"
    )
    said = f"{said}, in {facts['seconds']:.0f} s. "
    profile = "quick" if facts["device"]["type"] == "cpu" else "gpu"
    if broken(facts):
        return said + "Do not trust what this machine computes before the failures are mended."
    return said + f"Next: python -m repro run --profile {profile}, or make reproduce-all."


def broken(facts: Facts) -> bool:
    """Return whether a self-test failed, or something could not even be found out."""
    return bool(facts["failed"] or facts["problems"])


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *lines])


def _table(rows: list[tuple[str, str]]) -> str:
    wide = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *others = textwrap.wrap(value, WIDTH - wide - 2, break_long_words=False) or [""]
        lines += [f"{name:<{wide}}  {first}", *(" " * (wide + 2) + more for more in others)]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lay rows out in columns, a line each; a last column that is too wide goes on below itself."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(width + 2 for width in wide[:-1]) + 2
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)]
        first, *others = textwrap.wrap(row[-1], max(20, WIDTH - before)) or [""]
        line = "  ".join(["", *cells[:-1], first]).rstrip()
        lines.append("\n".join([line, *(" " * before + other for other in others)]))
    return lines


def _wrapped(line: str, indent: int, further: str = "") -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=space,
        subsequent_indent=space + further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def gib(count: float) -> str:
    """Return bytes as GiB, or as MiB where they are few."""
    if count >= 20 * GIB:
        return f"{count / GIB:.0f} GiB"
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time in one unit, as coarse as an estimate is."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} days"
