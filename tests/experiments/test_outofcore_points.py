"""From records to numbers, by hand, and how they are compared."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from made import FAILED, OUT_OF_MEMORY
from test_outofcore_settings import GPU, REACH, World, results, timing

from repro.experiments.design import Run
from repro.experiments.judge import NotRun
from repro.experiments.outofcore import points, settings
from repro.experiments.outofcore.points import Point
from repro.experiments.outofcore.settings import (
    IN_CORE,
    MEASURED,
    MODES,
    RESNET,
    SCHEDULE,
    SIMULATED,
)
from repro.experiments.query import Results


def only(of: Mapping[tuple[str, int], Mapping[str, Any]], profile: str = "quick") -> Results:
    """Return Table 1's results, measured: given a way to train and a batch size."""

    def make(run: Run, seed: int) -> Mapping[str, Any] | None:
        return of.get((run.config.get("mode", ""), run.config.get("batch", 0)))

    return results("table1", make, profile)


class TestPoints:
    def test_simulated_by_hand(self):
        def rows(**of):
            return {"metrics": {"limit_bytes": 16, "peak_bytes": 11, "rows": of}}

        swapped = {"reserved_bytes": 13, "budget_bytes": 14, "held_bytes": 9, "internal_bytes": 2}
        of = {
            64: rows(
                in_core={"time_s": 0.32, "reserved_bytes": 12},  # 200 images/s
                schedule={"time_s": 0.4, **swapped},
            ),
            256: rows(in_core={"time_s": 2.56, "reserved_bytes": 15}),  # 100 images/s
            512: rows(lms={"time_s": 6.4, **swapped}),
            928: FAILED,
        }
        found = results(
            "table1",
            lambda run, _: of.get(run.config["batch"]) if run.experiment == SIMULATED else None,
        )
        in_core = points.points(found, SIMULATED, RESNET, IN_CORE)
        assert list(in_core) == [64, 256, 512] and in_core[512] is None
        assert in_core[64] == Point(200, 1.0, None, 12, 11)
        assert in_core[256] == Point(100, 0.5, None, 15, 11)
        alone = points.points(found, SIMULATED, RESNET, SCHEDULE)
        assert alone[64] == Point(160, pytest.approx(0.8), 14, 13, 9, 2)
        assert alone[256] is None and alone[512] is None
        lms = points.points(found, SIMULATED, RESNET, "lms")
        assert lms[64] == in_core[64]
        assert lms[256] == in_core[256]  # what fits in core is not swapped
        assert points.in_core_batch(found, SIMULATED, RESNET) == 256
        assert points.in_core_batch(found, MEASURED, RESNET) is None
        assert points.limit_bytes(found, SIMULATED, RESNET) == 16
        assert points.limit_bytes(found, MEASURED, RESNET) is None

    def test_on_a_cpu_the_mean_of_ratios_within_the_rounds(self):
        # By round 32 / 12 of 3, 1 / 2 and 2 / 4.
        swapped = {
            "metrics": {"limit_bytes": 7, "held_bytes": 5, "budget_bytes": 6, "reserved_bytes": 8},
            "timings": {"iteration": timing(1.0, 2.0, 4.0), "reference": timing(3.0, 1.0, 2.0)},
        }
        found = only(
            {("schedule", 32): swapped, ("schedule", 12): OUT_OF_MEMORY, ("schedule", 59): FAILED}
        )
        alone = points.points(found, MEASURED, RESNET, SCHEDULE)
        assert list(alone) == [12, 32] and alone[12] is None
        assert alone[32].images_per_s == 16.0
        assert alone[32].relative == pytest.approx(32 / 12 * (3 / 2 / 2) ** (1 / 3))
        gap = points.slowdown(found, MEASURED, RESNET, alone[32])
        assert math.exp(-gap.mean) == pytest.approx(alone[32].relative)
        assert (alone[32].budget_bytes, alone[32].reserved_bytes) == (6, 8)
        assert alone[32].held_bytes == 5
        assert alone[32].paces == pytest.approx([12 / 32 / 3, 12 / 32 * 2, 12 / 32 * 2])

    def test_on_a_gpu_over_the_largest_in_core(self):
        def timed(*seconds):
            sizes = {"limit_bytes": 9, "held_bytes": 5, "reserved_bytes": 8}
            return {"metrics": sizes, "timings": {"iteration": timing(*seconds)}, "device": GPU}

        of = {
            ("in_core", 128): timed(1.6, 1.6, 0.1),
            ("in_core", 190): timed(3.8, 3.8, 3.8),  # 50 images/s
            ("in_core", 256): OUT_OF_MEMORY,
            ("schedule", 512): timed(16.0, 1.0, 16.0),
        }
        alone = points.points(only(of, "paper"), MEASURED, RESNET, SCHEDULE)
        assert alone[512].relative is None
        assert alone[512].paces == pytest.approx([16 / 512, 1 / 512, 16 / 512])
        gap = points.slowdown(only(of, "paper"), MEASURED, RESNET, alone[512])
        assert math.exp(gap.mean) == pytest.approx(256 ** (1 / 3) / 512 * 50)
        of = {key: value for key, value in of.items() if key[0] != "in_core"}
        with pytest.raises(NotRun, match="nothing fits in core"):
            points.slowdown(only(of, "paper"), MEASURED, RESNET, alone[512])

    def test_a_papers_batch_size_is_one_in_proportion_on_a_cpu(self):
        found = results("table1", World())
        for batch, size in zip((190, 512, 928, 1440), settings.BATCHES["quick"], strict=True):
            assert points.point_at(found, MEASURED, batch, "schedule_va")[0] == size
            assert points.point_at(found, SIMULATED, batch, "schedule_va")[0] == batch
        assert points.point_at(found, MEASURED, 1440, "schedule") == (91, None)
        world = World("paper", reach={("in_core",): 0})
        on_gpu = results("table1", world, "paper")
        assert points.point_at(on_gpu, MEASURED, 928, "schedule")[0] == 928

    @pytest.mark.parametrize(
        "world",
        [
            World(reach={("in_core",): 0}),
            World(status={("schedule_va",): None}),
            World(status={("schedule_va", 59): None}),  # 71 is farther than a tenth
        ],
    )
    def test_without_a_batch_size_nearby_it_is_not_run(self, world):
        with pytest.raises(NotRun, match="no records"):
            points.point_at(results("table1", world), MEASURED, 928, "schedule_va")


class TestComparisons:
    def test_simulated_times_have_no_spread(self):
        found = results("table1", World())
        alone, chunks = (points.points(found, SIMULATED, RESNET, m)[928] for m in MODES[1:])
        gap = points.speed(found, SIMULATED, RESNET, chunks, alone)
        assert (math.exp(gap.mean), gap.error) == (pytest.approx(0.75 / 0.7), 0)
        gap = points.slowdown(found, SIMULATED, RESNET, chunks)
        assert (math.exp(gap.mean), gap.error) == (pytest.approx(1 / 0.75), 0)

    @pytest.mark.parametrize("profile", ["quick", "paper"])
    def test_measured_ones_have_that_of_their_rounds(self, profile):
        found = results("table1", World(profile, noise=0.05), profile)
        size = REACH[profile][RESNET][1]
        alone, chunks = (points.points(found, MEASURED, RESNET, m)[size] for m in MODES[1:])
        own = 0.05 / math.sqrt(3)  # of the mean of four that lie 0.05 above and below in turns
        gap = points.speed(found, MEASURED, RESNET, chunks, alone)
        assert gap.mean == pytest.approx(math.log(0.75 / 0.7))
        assert gap.error == pytest.approx(own * math.sqrt(2))
        gap = points.slowdown(found, MEASURED, RESNET, chunks)
        assert gap.mean == pytest.approx(-math.log(0.75))
        # On a CPU the reference is timed in turns, and does not vary in these records.
        assert gap.error == pytest.approx(own * (1 if profile == "quick" else math.sqrt(2)))

    def test_times_of_two_machines_do_not_compare(self):
        def make(run, seed):
            values = World("paper")(run, seed)
            other = {"device": GPU | {"name": "NVIDIA Y"}} if run.config.get("batch") == 64 else {}
            return values | other

        found = results("table1", make, "paper")
        point = points.points(found, MEASURED, RESNET, SCHEDULE)[928]
        with pytest.raises(NotRun, match="NVIDIA X and NVIDIA Y"):
            points.slowdown(found, MEASURED, RESNET, point)


class TestLarger:
    def over(self, world: World, modes=MODES[:0:-1], paper=1.5):
        return points.larger(results("table1", world, "paper"), RESNET, modes, paper)

    def test_both_ended_or_the_papers_ratio_is_there(self):
        gap = self.over(World("paper"))
        assert math.exp(gap.mean) == pytest.approx(1440 / 928) and gap.error == 0
        assert gap.label == "ResNet-50: 1440 schedule + VA over 928 schedule"

    def test_the_first_might_train_more(self):
        gap = self.over(World("paper"), paper=1.6)  # 1440 is the largest that was tried
        assert (
            math.isnan(gap.error) and gap.note == "1440 is the largest that was tried schedule + VA"
        )
        ended = World("paper", reach={("schedule_va",): 1248})
        assert self.over(ended, paper=1.6).error == 0

    def test_the_second_might_train_more(self):
        tried = {("measured", "schedule", batch): None for batch in (1120, 1248, 1440)}
        gap = self.over(World("paper", status=tried))
        assert math.isnan(gap.error) and "928 is the largest" in gap.note
        below = World("paper", status=tried, reach={("schedule_va",): 512})
        assert self.over(below).error == 0  # whatever the second trains, the first trains less
