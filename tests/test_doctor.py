"""`doctor`: what it finds, what it makes of a fault, of what is missing, and how it looks."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from repro import __main__ as cli
from repro import paths
from repro.adaptive import StartingPoint
from repro.experiments import PAPERS, doctor, estimates, selftests, surroundings
from repro.experiments.adaptive import selftest as of_adaptive
from repro.experiments.dualbatch import selftest as of_dualbatch
from repro.experiments.mbs import selftest as of_mbs
from repro.experiments.microconv import selftest as of_microconv
from repro.experiments.outofcore import selftest as of_outofcore
from repro.experiments.selftests import NotHere, SelfTest
from repro.measure import accelerator
from repro.measure.precision import rounds_to_tf32
from repro.microconv import tune
from repro.outofcore.host import HostStore
from repro.outofcore.native import ChunkedMemory
from repro.records import RecordStore

TESTS = [(paper, test) for paper in PAPERS for test in selftests.tests_of(paper)]
REFERENCE = Path(__file__).parents[1] / "results"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copy little, time few steps, and read reference records anew."""
    monkeypatch.setattr(surroundings, "_COPIED_BYTES", 2**20)
    monkeypatch.setattr(estimates, "_ENOUGH_S", 0.0)
    monkeypatch.setattr(accelerator, "present", lambda: None)
    estimates.forget()
    yield
    estimates.forget()


@pytest.fixture(scope="module")
def findings():
    """What is found on this CPU with the reference records of the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_RESULTS", str(REFERENCE))
        patch.setattr(surroundings, "_COPIED_BYTES", 2**20)
        patch.setattr(estimates, "_ENOUGH_S", 0.0)
        estimates.forget()
        return doctor.examine("cpu")


@pytest.fixture
def only(monkeypatch):
    """Leave one paper with the self-tests that are given."""

    def leave(*tests: SelfTest) -> None:
        kept = {"mbs": tests}
        monkeypatch.setattr(selftests, "tests_of", lambda paper: kept.get(paper, ()))

    return leave


def lines_of(text: str) -> list[str]:
    """Return the lines that no folder of this machine makes longer."""
    return [line for line in text.splitlines() if " in " not in line[:14]]


class TestSelfTests:
    @pytest.mark.parametrize(("paper", "test"), TESTS, ids=lambda one: getattr(one, "text", one))
    def test_each_passes_on_this_cpu(self, findings, paper, test):
        (one,) = [o for o in findings["selftests"] if (o["paper"], o["text"]) == (paper, test.text)]
        assert one["status"] == "ok" and one["difference"] <= one["tolerance"] <= 1e-3

    @pytest.mark.slow
    @pytest.mark.parametrize(("paper", "test"), TESTS, ids=lambda one: getattr(one, "text", one))
    def test_each_finds_a_planted_fault(self, monkeypatch, paper, test):
        distance, read = StartingPoint.distance, HostStore.read
        counters = ChunkedMemory.counters

        def corrupt(store, place, address):
            store.view(place).add_(1)
            read(store, place, address)

        faults = {
            of_mbs.gradients: (
                of_mbs, "MicroBatchStreamer",
                partial(of_mbs.MicroBatchStreamer, normalization="paper"),
            ),
            of_dualbatch.training: (
                of_dualbatch, "train_dual_batch",
                partial(of_dualbatch.train_dual_batch, merge="delta"),
            ),
            of_adaptive.steps: (
                of_adaptive, "DataParallel", partial(of_adaptive.DataParallel, clip_grad_norm=1e-3)
            ),
            of_adaptive.theta: (StartingPoint, "distance", lambda *a: 1.01 * distance(*a)),
            of_outofcore.bits: (HostStore, "read", corrupt),
            of_outofcore.allocator: (
                ChunkedMemory, "counters",
                lambda memory: replace(counters(memory), peak_reserved_bytes=2**30),
            ),
            of_microconv.divided: (of_microconv, "tune", wrong_convolution),
            of_microconv.fastest: (of_microconv, "tune", wrong_convolution),
        }  # fmt: skip
        monkeypatch.setattr(*faults[test.run])
        checked = selftests.run_one(paper, test, "cpu")
        assert checked.status == "failed" and checked.why, checked

    def test_a_crash_is_named_and_the_others_run(self, only):
        def crash(device):
            raise RuntimeError("the kernel\nis not there")

        nan = SelfTest("nan", 1.0, lambda device: math.nan)
        absent = SelfTest("absent", 1.0, lambda device: (_ for _ in ()).throw(NotHere("no g++")))
        only(SelfTest("crash", 0.0, crash), nan, absent, SelfTest("fine", 0.0, lambda device: 0.0))
        crashed, differs, left, fine = selftests.run_all("cpu")
        assert (crashed.status, crashed.why) == ("failed", "RuntimeError: the kernel")
        assert (differs.status, differs.difference) == ("failed", None)
        assert (left.status, left.why) == ("not run", "no g++")
        assert fine.status == "ok"

    def test_a_paper_whose_code_does_not_load_is_named(self, monkeypatch):
        def broken(paper):
            if paper == "mbs":
                raise ImportError("libfoo.so: cannot open shared object file")
            return (SelfTest("fine", 0.0, lambda device: 0.0),)

        monkeypatch.setattr(selftests, "tests_of", broken)
        first, *others = selftests.run_all("cpu")
        assert (first.paper, first.status) == ("mbs", "failed") and "libfoo" in first.why
        assert [one.status for one in others] == ["ok"] * (len(PAPERS) - 1)

    def test_random_numbers_and_tf32_are_put_back(self, only):
        before = torch.get_rng_state(), torch.backends.cudnn.conv.fp32_precision
        only(SelfTest("fine", 0.0, lambda device: float(rounds_to_tf32("conv"))))
        assert selftests.run_all("cpu")[0].status == "ok"
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.backends.cudnn.conv.fp32_precision == before[1]

    @pytest.mark.parametrize("kind", [torch.backends.cuda.matmul, torch.backends.cudnn.conv])
    def test_however_tf32_was_set(self, only, kind):
        only(SelfTest("fine", 0.0, lambda device: 0.0))
        before = kind.fp32_precision
        try:
            for name in ("tf32", "ieee"):
                kind.fp32_precision = name
                assert selftests.run_all("cpu")[0].status == "ok"
                assert kind.fp32_precision == name
        finally:
            kind.fp32_precision = before

    def test_differences(self):
        ones = torch.ones(3)
        difference = selftests.relative_difference
        assert difference([ones], [ones]) == 0 and difference([], []) == 0
        assert difference([2 * ones, ones], [2 * ones, 2 * ones]) == 0.5
        for wrong in ([], [torch.ones(4)], [ones, ones], [ones * math.nan], [ones / 0]):
            assert difference(wrong, [ones]) == math.inf


def wrong_convolution(model, *arguments, **options):
    """Tune, and then compute something else."""
    report = tune(model, *arguments, **options)
    model[0].register_forward_hook(lambda layer, inputs, outputs: 1.01 * outputs)
    return report


class TestReport:
    def test_it_fits_a_terminal_and_names_everything(self, findings):
        text = doctor.text(findings)
        assert max(map(len, lines_of(text))) <= 100
        for word in ("Python", "torch", "compiler", "cores", "host memory", "memory copy", "GB/s",
                     "datasets", "digits", "Self-tests", "no committed rate", *PAPERS):  # fmt: skip
            assert word in text
        assert "All 8 self-tests passed" in text and not doctor.broken(findings)

    def test_findings_are_json(self, findings):
        assert json.loads(json.dumps(findings, allow_nan=False)) == findings

    def test_a_failure_is_said_and_not_trusted(self, findings):
        bad = dict(findings["selftests"][0], status="failed", difference=None, why="ValueError: no")
        broken = findings | {"selftests": [bad, *findings["selftests"][1:]], "failed": 1}
        text = doctor.text(broken | {"to_do": list(doctor._to_do(broken))})
        assert "failed  mbs" in text and "ValueError: no" in text
        assert "7 of 8" in text and "Do not trust" in text and doctor.broken(broken)

    def test_what_cannot_be_found_out_is_told_and_all_else_goes_on(self, monkeypatch, only):
        def broken(*arguments):
            raise RuntimeError("driver shutting down")

        only()
        for name in ("links", "device_facts", "data_found"):
            monkeypatch.setattr(surroundings, name, broken)
        findings = doctor.examine("cpu")
        assert len(findings["problems"]) == 3 and doctor.broken(findings)
        assert doctor.text(findings).count("driver shutting down") == 3

    @pytest.mark.parametrize(
        ("seconds", "said"),
        [(0, "1 s"), (89, "89 s"), (400, "7 min"), (7200, "2.0 h"), (2e5, "2.3 days")],
    )
    def test_times(self, seconds, said):
        assert doctor.duration(seconds) == said


class TestWhatIsMissing:
    def test_nothing_but_python_and_torch(self, monkeypatch, tmp_path, only):
        """No compiler, records, datasets, notebook packages, nor a folder to write to."""
        (tmp_path / "file").write_text("none", encoding="utf-8")
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv("REPRO_RESULTS", str(tmp_path / "file" / "results"))
        monkeypatch.delenv("REPRO_DATA", raising=False)
        monkeypatch.setattr(paths, "ROOT", tmp_path)
        monkeypatch.setitem(surroundings._OPTIONAL, "no_such_module", ("sparkles", "sparkle"))
        only(SelfTest("allocator", 0.0, of_outofcore.allocator))
        findings = doctor.examine("cpu")
        advice = {one["what"]: one["do"] for one in findings["to_do"]}
        text = doctor.text(findings)
        assert findings["selftests"][0]["status"] == "not run" and not doctor.broken(findings)
        assert "no-such-compiler" in text and findings["software"]["compiler"] is None
        assert {one["seconds"] for one in findings["estimates"]} == {None}
        assert findings["pace"]["what"].startswith("not measured")
        for what, do in {
            "no C++ compiler": "g++", "results cannot be written": "REPRO_RESULTS",
            "datasets not here: cifar10": "python -m repro data",
            "no_such_module": "pip install", "no accelerator": "quick",
        }.items():  # fmt: skip
            assert any(what in one and do in advice[one] for one in advice), (what, advice)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is left behind

    def test_a_driver_without_a_torch_for_it(self, findings):
        seen = findings | {"host": findings["host"] | {"nvidia_driver": True, "accelerator": None}}
        (entry,) = [one for one in doctor._to_do(seen) if "NVIDIA" in one["what"]]
        assert "built for CUDA" in entry["do"] or "nvidia-smi" in entry["do"]


class TestEstimates:
    def test_the_seconds_of_the_records_times_the_pace(self, monkeypatch):
        monkeypatch.setenv("REPRO_RESULTS", str(REFERENCE))
        pace = estimates.Pace(2.0, "made up")
        listed = estimates.estimate_all("cpu", 0, 2**40, pace, None)
        quick = {e.paper: e for e in listed if e.profile == "quick"}
        for paper in ("outofcore", "microconv"):  # which need no dataset
            folder = REFERENCE / "reference" / "cpu-2-cores" / "quick"
            records = RecordStore(folder).load(paper)
            seconds = sum(map(estimates.seconds_of, records))
            assert quick[paper].known == quick[paper].runs == len(records)
            assert quick[paper].seconds == pytest.approx(2 * seconds)
        peak = max(r.peak_bytes for r in RecordStore(folder).load("outofcore") if r.peak_bytes)
        assert quick["outofcore"].host_bytes == peak and quick["outofcore"].fits
        tight = estimates.estimate_all("cpu", 0, peak - 1, pace, None)
        assert [e.fits for e in tight if (e.paper, e.profile) == ("outofcore", "quick")] == [False]

    def test_no_rate_is_made_up_for_another_kind_of_device(self, monkeypatch):
        monkeypatch.setenv("REPRO_RESULTS", str(REFERENCE))
        pace = estimates.measure_pace("tpu:0")
        assert pace.ratio == 1 and "no reference record of a tpu" in pace.what
        for one in estimates.estimate_all("tpu:0", 2**30, 2**30, pace, None):
            assert one.seconds is None and "no committed rate" in one.source

    def test_what_is_swapped_to_the_host(self, monkeypatch):
        """ResNet-50 at 1440 alone leaves 100 GiB, on a device of 16."""
        monkeypatch.setenv("REPRO_RESULTS", str(REFERENCE))
        device, host = of_outofcore.needs("gpu")
        assert device == 16 * 2**30 and host >= 100 * 2**30
        assert of_outofcore.needs("quick") == (None, None)

    def test_the_pace_is_that_of_a_records_step(self, monkeypatch):
        monkeypatch.setenv("REPRO_RESULTS", str(REFERENCE))
        seen = []

        def thrice(step, record, device):
            seen.append(record)
            step()
            return 3 * sorted(record.timings["iteration"]["samples_s"])[1]

        monkeypatch.setattr(estimates, "_median_s", thrice)
        pace = estimates.measure_pace("cpu")
        assert 2 < pace.ratio < 4 and "cpu-2-cores" in pace.what
        assert seen[0].config["mode"] == "in_core"


class TestCommand:
    @pytest.fixture
    def run(self, monkeypatch, capsys):
        def run(*arguments: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["python -m repro", "doctor", *arguments])
            with pytest.raises(SystemExit) as caught:
                cli.main()
            out, err = capsys.readouterr()
            return caught.value.code or 0, out, err

        return run

    def test_text_json_and_exit_codes(self, run, monkeypatch, findings):
        monkeypatch.setattr(doctor, "examine", lambda device, root, tell: findings)
        code, out, err = run("--device", "cpu")
        assert (code, err) == (0, "") and out.strip() == doctor.text(findings)
        code, out, _ = run("--json")
        assert code == 0 and json.loads(out)["device"]["type"] == "cpu"
        monkeypatch.setattr(doctor, "examine", lambda device, root, tell: findings | {"failed": 2})
        assert run("--json")[0] == 1
