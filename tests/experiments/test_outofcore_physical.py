"""What an iteration's requests take of the memory where nothing limits it."""

import pytest
from repro.experiments.outofcore.physical import mapped, physical
from repro.experiments.outofcore.settings import DENSENET, MIB
from repro.experiments.outofcore.settings import physical as run_of

from repro.outofcore.allocator import Event, replay
from repro.outofcore.pooled import PooledChunkedAllocator

CHUNK = 2 * MIB


class TestMapped:
    def test_whole_chunks_are_counted_at_their_most(self):
        # 3 MiB take 2 chunks; 5 take 3, of which 2 are those that were freed; small ones share one.
        events = [Event("a", 3 * MIB), Event("a", None), Event("b", 5 * MIB)]
        assert mapped(events, CHUNK).peak_reserved_bytes == 3 * CHUNK
        small = [Event(number, MIB // 4) for number in range(8)]
        assert mapped([*events, *small], CHUNK).peak_reserved_bytes == 4 * CHUNK

    def test_the_most_in_use_does_not_count_what_was_freed(self):
        counters = mapped([Event("a", CHUNK), Event("a", None), Event("b", CHUNK)], CHUNK)
        assert counters.peak_requested_bytes == counters.peak_reserved_bytes == CHUNK

    @pytest.mark.parametrize("chunk_mib", [2, 6])
    def test_the_simulator_says_the_same(self, chunk_mib):
        names = [number * 7 % 40 for number in range(40)]
        events = [Event(name, (name * 977_777) % (9 * MIB) + 1) for name in names]
        events += [Event(name, None) for name in names[::2]]
        events += [Event(name, (name + 3) * 555_555) for name in names[::2]]
        chunk = chunk_mib * MIB
        report = replay(PooledChunkedAllocator(chunk), events)
        counters = mapped(events, chunk)
        assert counters.peak_reserved_bytes == report.peak_reserved_bytes
        assert counters.peak_requested_bytes == report.peak_requested_bytes


SMALL = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [8, 8]}


class TestExperiment:
    def rows(self, batch, limit_gib):
        config = run_of(DENSENET, batch).config | SMALL
        config |= {"limit_gib": limit_gib, "chunk_mib": 0.125}
        return physical(config, 0, None, "cpu").metrics["rows"]

    def test_a_schedule_uses_no_more_than_the_device_has(self):
        limit = 2 * MIB
        rows = self.rows(256, limit / 2**30)
        assert rows["schedule"]["used_bytes"] <= limit < rows["in_core"]["used_bytes"]
        for row in rows.values():
            assert row["used_bytes"] <= min(row["torch_bytes"], row["chunks_bytes"])
            assert row["chunks_bytes"] % (MIB // 8) == 0
        # Nothing limits the allocators: torch's keeps the holes that it makes.
        assert rows["schedule"]["torch_bytes"] > limit

    def test_where_all_fits_both_are_the_same(self):
        rows = self.rows(4, 1.0)
        assert rows["schedule"] == rows["in_core"]

    def test_where_no_schedule_exists_only_training_in_core_is_told(self):
        assert list(self.rows(64, 1e-6)) == ["in_core"]
