"""What all tests share: one thread, folders of their own, an accelerator where one is needed."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from invented import make_record

from repro import paths
from repro.records import RecordStore

# Fixtures that take many seconds, and save them for the tests that follow.
SHARED = {"smoke", "toys", "scenarios", "found", "findings", "driver_folder"}

pytest_plugins = ["simulated_device.plugin"]  # an accelerator for the tests marked gpu


def pytest_configure() -> None:
    """Take Ctrl-C, which a shell has its jobs in the background ignore, for children too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # TorchScript tells operators by their id(). Torch frees four that quantisation defines without
    # forgetting their ids: a layer's list at such an address was "a builtin" (torch 2.13).
    register, kept = torch.jit._builtins._register_builtin, []

    def register_and_keep(operator: object, name: str) -> None:
        kept.append(operator)
        register(operator, name)

    torch.jit._builtins._register_builtin = register_and_keep


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take for slow whatever waits for runs that many tests share."""
    for item in items:
        if SHARED & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what imports made out of all further collections: each takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> None:
    # These models gain nothing from a second thread, and lose much where the core is wanted.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def folders_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads the user's datasets, or writes into the checkout's results or data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_RESULTS", str(tmp_path_factory.mktemp("results")))
        patch.setenv("REPRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("REPRO_DATA", raising=False)
        yield


@pytest.fixture
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty results folder for one test."""
    folder = tmp_path / "results"
    monkeypatch.setenv("REPRO_RESULTS", str(folder))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "store")


@pytest.fixture
def reference_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout's reference records, whatever folder other tests write to."""
    monkeypatch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))


@pytest.fixture(scope="module")
def memory_is_not_kept() -> Iterator[None]:
    """No measurement keeps freed memory, which it would for all tests that follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.measure.machine.keep_freed_memory", lambda: None)
        yield


@pytest.fixture(name="make_record")
def make_record_fixture() -> Any:
    return make_record


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of Micro-Batch Streaming's smoke profile, carried out for all tests."""
    from repro.experiments import arguments, load_paper
    from repro.experiments import run as running

    paper, folder = load_paper("mbs"), tmp_path_factory.mktemp("smoke")
    store = RecordStore(folder / "local" / "smoke")
    chosen = arguments.choose_datasets(paper, "smoke")
    runs = arguments.plan(paper, paper.artefacts.values(), "smoke", chosen)
    setting = running.Setting("smoke", "cpu")
    tally = running.execute(paper, runs, setting, store, report=lambda line: None)
    assert tally.failed == 0, [r.error for r in store.load("mbs") if r.status == "failed"]
    assert tally.done == len(runs)
    return folder
