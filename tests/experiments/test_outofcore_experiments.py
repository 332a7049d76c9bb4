"""What the experiments of out-of-core training run, on toys."""

import gc
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from repro.experiments import load_paper
from repro.experiments.design import Outcome
from repro.experiments.outofcore import child, experiments, measuring, settings
from repro.experiments.outofcore.fitting import ALLOCATORS, GIB, largest_budget, serve
from repro.experiments.outofcore.modelled import Rates, limit_bytes, trace_at
from repro.measure import accelerator, machine
from repro.measure.accelerator import HostMemoryError
from repro.records import RecordStore

PAPER = load_paper("outofcore")
_TOY = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [12, 12]}
_MEASURED = _TOY | {
    "role": settings.RESNET,
    "warmup": 3,
    "repeats": 2,
    "threads": 1,
    "base_batch": 8,
    "limit_between": [8, 16],
}
_BASELINE = _TOY | {"role": settings.RESNET, "batches": [4, 8], "images_per_s": [40.0, 60.0]}
_SIMULATED = _TOY | {
    "role": settings.RESNET,
    "limit_between": [8, 16],
    "bandwidth": 5e7,
    "baseline": _BASELINE,
    "tune": True,
    "lms": True,
    "map_s": 1e-4,
}
_ANALYSED = {key: value for key, value in _SIMULATED.items() if key not in ("tune", "lms")}
TOYS = {
    "in core": ("measured", _MEASURED | {"mode": "in_core", "batch": 8}),
    "schedule": ("measured", _MEASURED | {"mode": "schedule", "batch": 32}),
    "chunks": ("measured", _MEASURED | {"mode": "schedule_va", "batch": 32}),
    "paced": ("measured", _MEASURED | {"mode": "schedule", "batch": 32, "link_share": 0.5}),
    "checkpointing": ("measured", _MEASURED | {"mode": "checkpointing", "batch": 8}),
    "reach": ("reach", _TOY | {"role": settings.RESNET, "limit_between": [8, 16], "lms": True}),
    "simulated": ("simulated", _SIMULATED | {"batch": 32}),
    "simulated in core": ("simulated", _SIMULATED | {"batch": 8}),
    "link": ("link", _ANALYSED | {"batch": 32, "rates": [5e5, 1e6], "shares": [1.0, 0.8]}),
    "packed": (
        "packed",
        _ANALYSED
        | {"batch": 32, "chunk_mib": 2**-10, "largest_chunk": 1000, "least_chunk_mib": 2**-11},
    ),
    "by schedule": (
        "by_schedule",
        {k: v for k, v in _MEASURED.items() if k != "role"}
        | {"schedule": "paper", "batch": 32, "link_bytes_per_s": 2**26},
    ),
    "physical": ("physical", _TOY | {"batch": 32, "limit_between": [8, 16], "chunk_mib": 2**-8}),
    "half": ("half", _SIMULATED | {"batch": 32, "precision": "bfloat16"}),
    "half reach": (
        "half_reach",
        _TOY | {"precision": "float16", "limit_between": [8, 16], "lms": False},
    ),
    "half measured": (
        "half_measured",
        _MEASURED | {"mode": "schedule", "batch": 32, "precision": "bfloat16"},
    ),
    "chunk sizes": (
        "chunk_sizes",
        _ANALYSED | {"batch": 32, "chunks_mib": [2**-10, 2**-8], "map_s": 1e-4},
    ),
}


@dataclass
class Toys:
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    threads_after: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module", autouse=True)
def memory_is_not_kept():
    with pytest.MonkeyPatch.context() as patch:
        # It would hold for the whole process, and so for all tests that follow.
        patch.setattr(machine, "keep_freed_memory", lambda: None)
        yield


@pytest.fixture(scope="module")
def toys():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    made = Toys()
    for name, (experiment, config) in TOYS.items():
        made.outcomes[name] = PAPER.experiments[experiment].function(config, 0, None, "cpu")
        made.threads_after[name] = torch.get_num_threads()
    yield made
    torch.set_num_threads(before)


class TestEveryRun:
    def test_every_experiment_is_here(self):
        assert {experiment for experiment, _ in TOYS.values()} == set(PAPER.experiments)

    @pytest.mark.parametrize("name", TOYS)
    def test_the_number_of_threads_is_put_back(self, toys, name):
        assert toys.threads_after[name] == 2

    @pytest.mark.parametrize("name", TOYS)
    def test_metrics_and_timings_can_be_written(self, toys, name, tmp_path, make_record):
        outcome = toys.outcomes[name]
        timings = {
            k: {"samples_s": list(t.samples_s), "warmup": t.warmup}
            for k, t in outcome.timings.items()
        }
        store = RecordStore(tmp_path)
        record = make_record(
            "x",
            paper="outofcore",
            config=TOYS[name][1],
            key="k",
            metrics=outcome.metrics,
            timings=timings,
        )
        store.write(record)
        (read,) = store.load("outofcore")
        assert read.metrics == outcome.metrics
        assert read.timings == timings


class TestLimit:
    @pytest.mark.slow
    def test_half_way_between_two_needs(self):
        needs = [trace_at(_TOY, batch).peak_bytes for batch in (8, 16)]
        assert limit_bytes(_MEASURED) == sum(needs) // 2
        assert needs[0] < limit_bytes(_MEASURED) < needs[1]

    def test_as_given(self):
        assert limit_bytes(_TOY | {"limit_gib": 16}) == 16 * GIB


class TestMeasured:
    def test_in_core(self, toys):
        outcome = toys.outcomes["in core"]
        assert set(outcome.timings) == {"iteration", "reference"}
        assert all(len(timing.samples_s) == 2 for timing in outcome.timings.values())
        assert outcome.metrics["held_bytes"] <= outcome.metrics["limit_bytes"]
        # A trace counts the mini-batch, too, which the limit takes for host memory.
        batch = 8 * (3 * 12 * 12 * 4 + 8)
        peak = trace_at(_TOY, 8).peak_bytes
        assert peak - batch == pytest.approx(outcome.metrics["held_bytes"], rel=0.02)

    def test_what_does_not_fit_runs_out_of_memory(self):
        with pytest.raises(torch.OutOfMemoryError, match="simulated limit"):
            experiments.measured(_MEASURED | {"mode": "in_core", "batch": 32}, 0, None, "cpu")
        with pytest.raises(torch.OutOfMemoryError, match="no budget can be served"):
            experiments.measured(_MEASURED | {"mode": "schedule_va", "batch": 4000}, 0, None, "cpu")

    @pytest.mark.parametrize("name", ["schedule", "chunks"])
    def test_within_a_budget(self, toys, name):
        metrics = toys.outcomes[name].metrics
        limit = metrics["limit_bytes"]
        assert metrics["held_bytes"] <= metrics["budget_bytes"] <= limit
        assert metrics["held_bytes"] <= metrics["reserved_bytes"] <= limit
        assert metrics["bytes_moved"] > 0
        assert metrics["iterations"] == 5 + 3 + 2  # to settle, to warm up, timed
        assert metrics["replayed"] >= 2  # all that are timed
        assert set(toys.outcomes[name].timings) == {"iteration", "reference"}

    def test_on_a_link_it_is_slower(self, toys):
        paced = toys.outcomes["paced"]
        metrics, samples = paced.metrics, paced.timings["iteration"].samples_s
        assert min(samples) >= metrics["bytes_moved"] / 2 / metrics["link_bytes_per_s"]

    @pytest.mark.slow
    def test_a_plan_that_runs_otherwise_than_it_was_fitted_gets_a_smaller_budget(self, monkeypatch):
        config = _MEASURED | {"mode": "schedule", "batch": 32}
        refused = []

        def once(plan, make):
            if not refused:
                refused.append(plan.budget_bytes)
                return None
            return serve(plan, make)

        monkeypatch.setattr(measuring, "serve", once)
        metrics = experiments.measured(config, 0, None, "cpu").metrics
        smallest = trace_at(_TOY, 32).smallest_budget
        assert metrics["budget_bytes"] == max(smallest, int(0.9 * refused[0])) < refused[0]

    def test_checkpointing_holds_less(self, toys):
        plain, recomputed = (toys.outcomes[name].metrics for name in ("in core", "checkpointing"))
        assert recomputed["held_bytes"] < plain["held_bytes"]


class TestSimulated:
    def test_what_fits_takes_the_published_time(self, toys):
        rows = toys.outcomes["simulated in core"].metrics["rows"]
        assert 8 / rows["in_core"]["time_s"] == pytest.approx(60.0)
        assert rows["schedule"]["time_s"] == pytest.approx(rows["in_core"]["time_s"])
        assert rows["schedule"]["bytes_moved"] == 0

    def test_what_does_not_fit_waits_for_copies(self, toys):
        metrics = toys.outcomes["simulated"].metrics
        rows = metrics["rows"]
        assert "in_core" not in rows
        trace = trace_at(_TOY, 32)
        assert metrics["peak_bytes"] == trace.peak_bytes > metrics["limit_bytes"]
        assert metrics["functions"] == len(trace.functions)
        alone = Rates.fit(_BASELINE, [4, 8], [40.0, 60.0]).times(trace).sum()
        for name in ("schedule", "schedule_va"):
            row = rows[name]
            assert row["held_bytes"] <= row["budget_bytes"] <= metrics["limit_bytes"]
            assert row["held_bytes"] <= row["reserved_bytes"] <= metrics["limit_bytes"]
            assert row["unmapped_s"] == pytest.approx(alone + row["stall_s"])
            assert row["unmapped_s"] >= metrics["bound_s"] * (1 - 1e-9)
            # Each direction alone takes its bytes' time; both at once halve it at best.
            assert row["time_s"] >= row["bytes_moved"] / 2 / 5e7 * (1 - 1e-9)

    def test_mapping_costs_time_where_there_are_chunks(self, toys):
        rows = toys.outcomes["simulated"].metrics["rows"]
        alone, chunks = rows["schedule"], rows["schedule_va"]
        assert alone["time_s"] == alone["unmapped_s"] and not alone["map_operations"]
        more = chunks["time_s"] - chunks["unmapped_s"]
        assert 0 < more <= 1e-4 * chunks["map_operations"] * (1 + 1e-9)

    def test_the_plan_that_is_taken_is_no_slower_than_the_plain_window(self, toys):
        limit = toys.outcomes["simulated"].metrics["limit_bytes"]
        trace = trace_at(_TOY, 32)
        times = Rates.fit(_BASELINE, [4, 8], [40.0, 60.0]).times(trace)
        rows = toys.outcomes["simulated"].metrics["rows"]
        for name, allocator in ALLOCATORS.items():
            make = partial(allocator, limit)
            plain = largest_budget(trace, limit, make)
            assert rows[name]["reserved_bytes"] <= limit
            map_s = 1e-4 if name == "schedule_va" else 0.0
            theirs = experiments.modelled_row(plain, times, 5e7, make, map_s)
            assert rows[name]["time_s"] <= theirs["time_s"] * (1 + 1e-9)

    def test_the_papers_own_schedule_is_there_beside_ours(self, toys):
        rows = toys.outcomes["simulated"].metrics["rows"]
        assert rows["paper"]["scheduler"] == "paper"
        assert rows["paper"]["bytes_moved"] >= rows["schedule"]["bytes_moved"]
        chunks = rows["paper_va"]
        assert chunks["scheduler"] == "paper" and chunks["map_operations"]
        assert chunks["time_s"] > chunks["unmapped_s"]

    def test_lms_has_its_own_budget(self, toys):
        rows = toys.outcomes["simulated"].metrics["rows"]
        if "lms" in rows:
            assert (
                rows["lms"]["reserved_bytes"] <= toys.outcomes["simulated"].metrics["limit_bytes"]
            )


class TestAnalysed:
    def test_a_faster_link_and_fewer_bytes_take_less_time(self, toys):
        rows = toys.outcomes["link"].metrics["rows"]
        found = {(row["share"], row["rate"]): row for row in rows}
        assert len(found) == 4
        for row in rows:
            assert row["bound_s"] <= row["time_s"] * (1 + 1e-9)
            assert toys.outcomes["link"].metrics["compute_s"] <= row["bound_s"] * (1 + 1e-9)
        for key in ("bound_s", "time_s"):
            assert found[1.0, 1e6][key] < found[1.0, 5e5][key]
            assert found[0.8, 5e5][key] < found[1.0, 5e5][key]

    def test_larger_chunks_lose_more_and_are_mapped_less(self, toys):
        small, large = toys.outcomes["chunk sizes"].metrics["rows"].values()
        assert small["internal_bytes"] < large["internal_bytes"]
        assert small["map_operations"] > large["map_operations"] > 0

    def test_fitted_chunks_map_less_than_the_papers(self, toys):
        metrics, whole = (toys.outcomes[name].metrics for name in ("packed", "simulated"))
        own, fitted = metrics["rows"]["packed_va"], metrics["rows"]["packed_fitted"]
        assert own["chunk_bytes"] == 2**10 < fitted["chunk_bytes"] <= 1000 * 2**10
        assert fitted["chunk_bytes"] % 2**9 == 0
        assert fitted["map_operations"] < own["map_operations"]
        assert whole["bound_s"] * (1 - 1e-9) <= fitted["unmapped_s"] <= fitted["time_s"]
        assert fitted["time_s"] < own["time_s"] == own["time_by_bytes_s"]
        assert fitted["time_s"] < fitted["time_by_bytes_s"]
        for row in (own, fitted):
            assert row["held_bytes"] <= row["reserved_bytes"] <= metrics["limit_bytes"]


class TestReach:
    def test_each_way_trains_larger_than_the_one_before(self, toys):
        metrics = toys.outcomes["reach"].metrics
        assert 8 <= metrics["in_core"] < 16
        assert metrics["in_core"] < metrics["schedule"] <= metrics["schedule_va"]

    def test_the_next_batch_size_does_not_fit(self, toys):
        metrics = toys.outcomes["reach"].metrics
        limit = metrics["limit_bytes"]
        for name, allocator in ALLOCATORS.items():
            make = partial(allocator, limit)
            for more, fits in ((0, True), (max(1, metrics[name] // 32), False)):
                trace = trace_at(_TOY, metrics[name] + more)
                assert (largest_budget(trace, limit, make) is not None) is fits


class TestChild:
    """On a GPU each measurement has a process of its own; the same on the CPU."""

    @pytest.mark.thorough
    def test_it_returns_what_it_measured(self):
        outcome = child.measure_in_child(_MEASURED | {"mode": "schedule", "batch": 32}, "cpu")
        assert len(outcome.timings["iteration"].samples_s) == 2
        assert outcome.timings["iteration"].warmup == 3
        assert outcome.metrics["bytes_moved"] > 0
        assert outcome.peak_bytes == outcome.metrics["held_bytes"]

    @pytest.mark.thorough
    def test_out_of_memory_is_an_error_here(self):
        with pytest.raises(torch.OutOfMemoryError, match="simulated limit"):
            child.measure_in_child(_MEASURED | {"mode": "in_core", "batch": 32}, "cpu")

    @pytest.mark.exhaustive
    def test_another_error_is_told(self):
        with pytest.raises(RuntimeError, match=r"(?s)the measuring process failed: .*nonsense"):
            child.measure_in_child(
                _MEASURED | {"mode": "in_core", "batch": 8, "model": {"name": "nonsense"}}, "cpu"
            )

    def test_a_gpu_is_measured_in_a_child(self, monkeypatch):
        asked = []
        monkeypatch.setattr(
            experiments, "measure_in_child", lambda config, device: asked.append((config, device))
        )
        experiments.measured(_MEASURED | {"mode": "in_core", "batch": 8}, 0, None, "cuda")
        assert [device for _, device in asked] == ["cuda"]


@pytest.mark.gpu
class TestAccelerator:
    """The same on an accelerator: its own allocator, under a limit that is really set."""

    @pytest.fixture(autouse=True)
    def nothing_is_held(self, device):
        """Free what other tests left: cuBLAS keeps a workspace for each stream that it ran on."""
        gc.collect()
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        accelerator.empty_cache(device)

    @pytest.mark.parametrize(
        "mode", ["in_core", "schedule", "checkpointing", "save_on_cpu", "offload"]
    )
    def test_what_the_allocator_takes_is_within_the_limit(self, device, mode):
        outcome = measuring.measure(_MEASURED | {"mode": mode, "batch": 32}, str(device))
        metrics = outcome.metrics
        assert 0 < metrics["held_bytes"] <= metrics["reserved_bytes"] <= metrics["limit_bytes"]
        assert outcome.peak_bytes == metrics["reserved_bytes"]
        assert set(outcome.timings) == {"iteration"}
        if mode == "schedule":
            assert metrics["held_bytes"] <= metrics["budget_bytes"]
            assert metrics["budget_bytes"] <= limit_bytes(_MEASURED)
            assert metrics["bytes_moved"] > 0 and metrics["replayed"] >= 2
            assert metrics["host_bytes"] > 0
        assert accelerator.limit_bytes(device) == accelerator.total_bytes(device)  # put back

    def test_chunks_are_simulated_where_they_are_not_cudas(self, device):
        if device.type == "cuda":
            pytest.skip("CUDA has them, in a process of its own")
        outcome = experiments.measured(
            _MEASURED | {"mode": "schedule_va", "batch": 32}, 0, None, str(device)
        )
        metrics = outcome.metrics
        assert metrics["held_bytes"] <= metrics["reserved_bytes"] <= metrics["limit_bytes"]
        assert metrics["bytes_moved"] > 0
        with pytest.raises(ValueError, match="expandable segments are CUDA's"):
            experiments.measured(_MEASURED | {"mode": "expandable_segments"}, 0, None, str(device))

    def test_what_does_not_fit_runs_out_of_memory(self, device):
        for mode in ("in_core", "schedule"):
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                measuring.measure(_MEASURED | {"mode": mode, "batch": 1 << 13}, str(device))

    def test_a_lack_of_the_host_is_no_lack_of_the_device(self, device, monkeypatch):
        """It says which memory was short, and tries no smaller budgets, which would need more."""
        tried = []

        def short(*given):
            tried.append(given)
            raise HostMemoryError("the host cannot provide 5 bytes to pin: out of memory")

        monkeypatch.setattr(accelerator, "empty_pinned", short)
        with pytest.raises(HostMemoryError):
            measuring.measure(_MEASURED | {"mode": "schedule", "batch": 32}, str(device))
        assert len(tried) == 1
