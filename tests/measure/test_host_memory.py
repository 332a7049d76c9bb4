"""The host's memory, by files made up for the purpose, and what is refused to be pinned."""

import os

import pytest
import torch

from repro.measure import accelerator, host
from repro.measure.accelerator import HostMemoryError, check_pinnable, pinned_bytes

GIB = 2**30
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make files of the system: a host with `available` bytes, and control groups by folder."""

    def make(available, groups, own="0::/\n"):
        lines = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n"
        (tmp_path / "meminfo").write_text(lines)
        (tmp_path / "own").write_text(own)
        for name, files in groups.items():
            folder = tmp_path / "groups" / name
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(str(text))

    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    return make


def v2(limit, used, **more):
    return {"memory.max": limit, "memory.current": used, **more}


def v1(limit, used):
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}


CACHED = {"memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n"}


@pytest.mark.parametrize(
    ("own", "groups", "available", "whole"),
    [
        ("0::/\n", {"": v2("max\n", 3 * GIB)}, 50 * GIB, PHYSICAL),
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB, **CACHED)}, 2 * GIB, min(4 * GIB, PHYSICAL)),
        ("0::/\n", {"": v2(GIB, 2 * GIB)}, 0, GIB),  # over its limit
        ("0::/\n", {"memory": v1(3 * GIB, GIB)}, 2 * GIB, min(3 * GIB, PHYSICAL)),
        ("0::/\n", {"memory": v1(2**63 - 4096, GIB)}, 50 * GIB, PHYSICAL),
        # A group and those around it
        *(
            (own, {f"{root}slice/job": v(5 * GIB, 0), f"{root}slice": v(4 * GIB, GIB)}, 3 * GIB,
             min(4 * GIB, PHYSICAL))
            for own, root, v in (
                ("0::/slice/job\n", "", v2), ("4:memory:/slice/job\n0::/\n", "memory/", v1)
            )
        ),
    ],
)  # fmt: skip
def test_what_is_available_within_limits(machine, own, groups, available, whole):
    machine(50 * GIB, groups, own)
    assert host.available_bytes() == available and host.memory_bytes() == whole
    assert host.pinnable_bytes() == max(0, available - min(4 * GIB, whole // 16))


def test_a_system_without_such_files_and_a_large_one(machine, monkeypatch):
    assert host.available_bytes() == host.memory_bytes() == PHYSICAL
    machine(5 * GIB, {})
    monkeypatch.setattr(host, "memory_bytes", lambda: 2048 * GIB)
    assert host.pinnable_bytes() == GIB


def test_too_much_to_pin_is_refused_by_name_and_little_asks_nothing(monkeypatch):
    monkeypatch.setattr(accelerator, "pinnable_bytes", lambda: GIB)
    check_pinnable(GIB)
    told = r"the host cannot provide 2,147,483,648 bytes to pin: 1,073,741,824 .* smaller batch"
    with pytest.raises(HostMemoryError, match=told):
        check_pinnable(pinned_bytes(GIB + 1))
    monkeypatch.setattr(accelerator, "pinnable_bytes", lambda: pytest.fail("asked"))
    check_pinnable(2**20)
    accelerator.empty_pinned(2**30, "cpu", torch.uint8)  # which is not pinned
