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

    def make(available, own="0::/\n", **groups):
        lines = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n"
        (tmp_path / "meminfo").write_text(lines)
        (tmp_path / "own").write_text(own)
        for name, files in groups.items():
            folder = tmp_path / "groups" / name.replace("_", "/").strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(str(text))

    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    return make


def test_without_a_limit_it_is_what_the_machine_has(machine):
    machine(5 * GIB, _={"memory.max": "max\n", "memory.current": 3 * GIB})
    assert host.available_bytes() == 5 * GIB
    assert host.memory_bytes() == PHYSICAL


def test_a_containers_limit_less_its_use_but_for_cached_files(machine):
    stat = "anon 5\ninactive_file 1073741824\nactive_file 7\n"
    group = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": stat}
    machine(50 * GIB, _=group)
    assert host.available_bytes() == 2 * GIB
    assert host.memory_bytes() == min(4 * GIB, PHYSICAL)


def test_version_1_and_a_limit_that_is_none(machine):
    group = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": GIB}
    machine(50 * GIB, memory=group)
    assert host.available_bytes() == 2 * GIB
    machine(50 * GIB, memory=group | {"memory.limit_in_bytes": 2**63 - 4096})
    assert host.available_bytes() == 50 * GIB


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ("0::/slice/job\n", ("memory.max", "memory.current")),
        ("4:memory:/slice/job\n0::/\n", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_group_and_those_around_it(machine, own, names):
    inner, outer = (dict(zip(names, pair, strict=True)) for pair in ((5 * GIB, 0), (4 * GIB, GIB)))
    root = "memory_" if "memory" in own else ""
    machine(50 * GIB, own, **{f"{root}slice_job": inner, f"{root}slice": outer})
    assert host.available_bytes() == 3 * GIB


def test_what_is_over_its_limit_has_nothing(machine):
    machine(50 * GIB, _={"memory.max": GIB, "memory.current": 2 * GIB})
    assert host.available_bytes() == host.pinnable_bytes() == 0


def test_a_system_without_such_files(machine):
    assert host.available_bytes() == host.memory_bytes() == PHYSICAL


def test_a_margin_is_left(machine, monkeypatch):
    monkeypatch.setattr(host, "memory_bytes", lambda: 8 * GIB)
    machine(5 * GIB)
    assert host.pinnable_bytes() == 5 * GIB - GIB // 2
    monkeypatch.setattr(host, "memory_bytes", lambda: 2048 * GIB)
    assert host.pinnable_bytes() == GIB


def test_too_much_to_pin_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(accelerator, "pinnable_bytes", lambda: GIB)
    check_pinnable(GIB)
    told = r"the host cannot provide 2,147,483,648 bytes to pin: 1,073,741,824 .* smaller batch"
    with pytest.raises(HostMemoryError, match=told):
        check_pinnable(pinned_bytes(GIB + 1))


def test_little_asks_nothing(monkeypatch):
    monkeypatch.setattr(accelerator, "pinnable_bytes", lambda: pytest.fail("asked"))
    check_pinnable(2**20)
    accelerator.empty_pinned(2**30, "cpu", torch.uint8)  # which is not pinned
