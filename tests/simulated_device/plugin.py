"""Tests marked `gpu` on the simulated device, where there is no CUDA device.

The topmost conftest loads it: ``pytest_plugins = ["simulated_device.plugin"]``. Where tests marked
`gpu` were chosen, the device is built and loaded after they are collected, before the first of
them runs; it is there only for them, and a process without them never loads it. Each of them runs
under the race checker, and fails where it finds something. A test reaches its device by the fixture
`device`. What only CUDA has is marked ``@pytest.mark.cuda_only("why")`` beside `gpu`, and skipped.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

import simulated_device

missing = "not loaded, as no test needs it"


def load() -> None:
    """Load the device where that can be done; `missing` says why it was not."""
    global missing
    if torch.cuda.is_available():
        missing = "there is a CUDA device, which the simulated one would hide"
        return
    try:
        simulated_device.load()
        missing = ""
    except simulated_device.NoCompilerError as error:
        missing = str(error)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only(why): needs what only CUDA has")


@pytest.hookimpl(trylast=True)  # after -k and -m have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    if torch.cuda.is_available() or not chosen:
        return
    for item in chosen:
        only = item.get_closest_marker("cuda_only")
        if only:
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA itself: {only.args[0]}"))
    chosen = [item for item in chosen if not item.get_closest_marker("cuda_only")]
    if chosen:
        load()
    if missing:
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device, none simulated: {missing}"))


@pytest.fixture(autouse=True)
def simulated_where_there_is_no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the simulated device be there for a test marked `gpu`, and check what it does."""
    if missing or not request.node.get_closest_marker("gpu"):
        yield
        return
    from simulated_device.checking import checked, present

    with present(), checked():
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The accelerator of a test marked `gpu`, with its index."""
    if not request.node.get_closest_marker("gpu"):
        raise ValueError("the fixture `device` is for tests marked gpu")
    kind = "sim" if not missing else "cuda"
    return torch.device(kind, torch.get_device_module(kind).current_device())


@pytest.fixture
def no_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A block in which the host may not wait for the device; the mode ends with it."""

    @contextmanager
    def block() -> Iterator[None]:
        of = torch.get_device_module(device)
        with warnings.catch_warnings():
            # torch warns once, after the mode is set: as an error it would leave the mode set.
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            try:
                of.set_sync_debug_mode("error")
                yield
            finally:
                of.set_sync_debug_mode("default")

    return block


@pytest.fixture
def sim() -> Iterator[torch.device]:
    """The simulated device, with empty memory; nothing checked."""
    from simulated_device.checking import present

    with present():
        yield torch.device("sim", 0)
