"""`doctor`: what it finds, what it makes of a fault and of what is missing, and how it looks."""

import math
from dataclasses import replace
from functools import partial

import pytest

import repro.adaptive
import repro.dualbatch
import repro.mbs
import repro.microconv
from repro import paths
from repro.experiments import doctor
from repro.experiments.doctor import TESTS, SelfTest
from repro.measure import accelerator
from repro.outofcore.host import IN, HostStore
from repro.outofcore.native import ChunkedMemory


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(accelerator, "present", lambda: None)


@pytest.fixture(scope="module")
def findings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "present", lambda: None)
        return doctor.examine("cpu")


def test_each_self_test_passes_on_this_cpu(findings):
    for one in findings["selftests"]:
        assert one["status"] == "ok" and one["difference"] <= one["tolerance"] <= 1e-3, one


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TESTS)), ids=[test.text for test in TESTS])
def test_each_self_test_finds_a_planted_fault(monkeypatch, number):
    copied, counters, tune = HostStore.copy, ChunkedMemory.counters, repro.microconv.tune

    def corrupt(store, direction, place, address):
        if direction == IN:
            store.view(place).add_(1)
        copied(store, direction, place, address)

    def wrong(model, *arguments, **options):
        report = tune(model, *arguments, **options)
        model[0].register_forward_hook(lambda layer, inputs, outputs: 1.01 * outputs)
        return report

    streamer, workers = repro.mbs.MicroBatchStreamer, repro.dualbatch.train_dual_batch
    clipped = partial(repro.adaptive.DataParallel, clip_grad_norm=1e-3)
    faults = (
        (repro.mbs, "MicroBatchStreamer", partial(streamer, normalization="paper")),
        (repro.dualbatch, "train_dual_batch", partial(workers, merge="delta")),
        (repro.adaptive, "DataParallel", clipped),
        (HostStore, "copy", corrupt),
        (ChunkedMemory, "counters", lambda m: replace(counters(m), peak_reserved_bytes=2**30)),
        (repro.microconv, "tune", wrong),
    )
    monkeypatch.setattr(*faults[number])
    checked = doctor.self_test(TESTS[number], "cpu")
    assert checked["status"] == "failed" and checked["why"], checked


def test_an_error_is_a_result_and_nan_fails():
    def fail(device):
        raise errors.pop()

    errors = [ImportError("libfoo.so"), RuntimeError("the kernel\nis not there")]
    found = [doctor.self_test(SelfTest("mbs", "text", 0.0, fail), "cpu") for _ in range(2)]
    found.append(doctor.self_test(SelfTest("mbs", "text", 1.0, lambda device: math.nan), "cpu"))
    assert [(one["status"], one["why"].partition(", ")[0]) for one in found] == [
        ("failed", "RuntimeError: the kernel"), ("failed", "ImportError: libfoo.so"),
        ("failed", "differs by nan"),
    ]  # fmt: skip
    assert {one["difference"] for one in found} == {None}


class TestReport:
    def test_a_failure_is_not_trusted(self, findings):
        bad = dict(findings["selftests"][0], status="failed", difference=None, why="ValueError: no")
        broken = findings | {"selftests": [bad, *findings["selftests"][1:]], "failed": 1}
        broken["to_do"] = [{"what": what, "do": do} for what, do in doctor._to_do(broken, "cpu")]
        text = doctor.text(broken)
        assert "ValueError: no" in text and "Do not trust" in text and "5 of 6" in text

    def test_a_broken_driver_is_told_and_all_else_goes_on(self, monkeypatch):
        def broken(*arguments):
            raise RuntimeError("driver shutting down")

        monkeypatch.setattr(doctor, "TESTS", ())
        for name in ("device_facts", "data_found"):
            monkeypatch.setattr(doctor, name, broken)
        findings = doctor.examine("cpu")
        assert len(findings["problems"]) == 2 and doctor.broken(findings)
        assert doctor.text(findings).count("driver shutting down") == 2

    def test_what_is_missing(self, monkeypatch, tmp_path):
        """No compiler, datasets, nor notebook packages."""
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.delenv("REPRO_DATA", raising=False)
        monkeypatch.setattr(paths, "ROOT", tmp_path)
        monkeypatch.setitem(doctor._OPTIONAL, "no_such_module", "sparkle")
        monkeypatch.setattr(doctor, "TESTS", (TESTS[4],))
        findings = doctor.examine("cpu")
        assert findings["selftests"][0]["status"] == "not run" and not doctor.broken(findings)
        advice = {one["what"]: one["do"] for one in findings["to_do"]}
        for what, do in {
            "no C++ compiler": "apt-get install g++",
            "datasets not here: cifar10": "python -m repro data",
            "no_such_module": "pip install", "no accelerator": "quick",
        }.items():  # fmt: skip
            assert any(what in one and do in advice[one] for one in advice), (what, advice)
        assert not list(tmp_path.iterdir())  # nothing is left behind
