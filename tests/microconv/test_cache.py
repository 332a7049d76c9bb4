import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repro.measure import allocations, timing
from repro.microconv import BenchmarkCache, CacheError, Convolution, Kernel, cache
from repro.microconv.cache import Key, default_path

CONV = Convolution(6, 16, 17, 4, (3, 3))
KERNEL = Kernel("forward", CONV)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "cache.sqlite"


# Keys


@pytest.fixture
def describe(monkeypatch):
    """Set what a device is described as, which is looked up once for each."""
    monkeypatch.setattr(cache, "_device", getattr(cache._device, "__wrapped__", cache._device))

    def set_description(describe):
        monkeypatch.setattr(cache, "describe_device", describe)

    return set_description


class TestKey:
    @pytest.mark.parametrize("backend", ["torch", "nnpack"])
    def test_everything_of_a_kernel_is_in_it(self, backend):
        convs = [
            CONV,
            replace(CONV, in_channels=8),
            replace(CONV, height=17),
            replace(CONV, width=16),
            replace(CONV, out_channels=6),
            replace(CONV, kernel_size=(3, 2)),
            replace(CONV, kernel_size=(2, 3)),
            replace(CONV, stride=(1, 2)),
            replace(CONV, stride=(2, 1)),
            replace(CONV, padding=(0, 1)),
            replace(CONV, padding=(1, 0)),
            replace(CONV, dilation=(1, 2)),
            replace(CONV, dilation=(2, 1)),
            replace(CONV, groups=2),
        ]
        kernels = [Kernel("forward", conv) for conv in convs]
        kernels += [
            Kernel("backward_data", CONV),
            Kernel("backward_filter", CONV),
            *(Kernel("forward", CONV, dtype) for dtype in ("float64", "bfloat16", "float16")),
            Kernel("forward", CONV, layout="nhwc"),
            Kernel("forward", CONV, math="tf32"),
        ]
        keys = {Key.of(kernel, backend).text for kernel in kernels}
        assert len(keys) == len(kernels)

    def test_an_equal_kernel_has_the_same_key(self):
        again = Kernel("forward", Convolution(6, 16, 17, 4, (3, 3)))
        assert Key.of(again, "torch") == Key.of(KERNEL, "torch")
        assert Key.of(KERNEL, "torch") != Key.of(KERNEL, "nnpack")

    @pytest.mark.parametrize("backend", ["torch", "nnpack"])
    def test_threads_and_versions(self, backend, monkeypatch):
        before = Key.of(KERNEL, backend)
        torch.set_num_threads(2)
        try:
            assert Key.of(KERNEL, backend) != before
        finally:
            torch.set_num_threads(1)
        assert Key.of(KERNEL, backend) == before
        monkeypatch.setattr(torch, "__version__", "9.9.9")
        assert Key.of(KERNEL, backend) != before

    @pytest.mark.parametrize("backend", ["torch", "cudnn"])
    def test_version_and_device_on_cuda(self, backend, monkeypatch, describe):
        class Library:
            version = 92800

            def cudnnGetVersion(self):
                return self.version

        library, name, driver = Library(), "H100", "570"
        describe(lambda device: {"name": name, "driver": driver})
        monkeypatch.setattr("repro.microconv.cudnn._load", lambda: (library, None))
        monkeypatch.setattr(torch.backends.cudnn, "version", library.cudnnGetVersion)
        kernel = replace(KERNEL, device="cuda:0")
        before = Key.of(kernel, backend)
        assert Key.of(kernel, backend) == before
        library.version = 92900
        assert Key.of(kernel, backend) != before
        library.version, name = 92800, "H200"
        assert Key.of(kernel, backend) != before
        name, driver = "H100", "580"
        assert Key.of(kernel, backend) != before
        driver = "570"
        assert Key.of(kernel, backend) == before
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        assert Key.of(kernel, backend) != before

    def test_the_processor(self, describe):
        before = Key.of(KERNEL, "torch")
        describe(lambda device: {"name": "another"})
        assert Key.of(KERNEL, "torch") != before

    def test_settings_of_the_process(self, monkeypatch):
        before = Key.of(KERNEL, "torch")
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", False)
            assert Key.of(KERNEL, "torch") != before
        assert Key.of(KERNEL, "torch") == before
        monkeypatch.setattr(cache, "freed_memory_is_kept", lambda: "otherwise")
        assert Key.of(KERNEL, "torch") != before

    def test_our_own_code(self, monkeypatch, tmp_path):
        folder = tmp_path / "microconv"
        shutil.copytree(Path(cache.__file__).parent, folder)
        monkeypatch.setattr(cache, "__file__", str(folder / "cache.py"))
        code = cache._code.__wrapped__
        before = code()
        assert before == cache._code() != ""
        for name in (
            "algorithms",
            "backends",
            "cudnn",
            "kernels",
            "measuring",
            "nnpack",
            "torch_backend",
        ):
            file = folder / f"{name}.py"
            source = file.read_text()
            file.write_text(source + "\n")
            assert code() != before, name
            file.write_text(source)
        assert code() == before
        for module in (allocations, timing):  # of repro.measure
            (tmp_path / "changed.py").write_text("# changed")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "__file__", str(tmp_path / "changed.py"))
                assert code() != before, module
        monkeypatch.setattr(cache, "_code", lambda: "another")
        assert "another" in Key.of(KERNEL, "torch").text

    def test_cuda_without_cudnn(self, monkeypatch):
        monkeypatch.setattr("repro.microconv.cudnn._load", lambda: (None, "cudnn: not there"))
        with pytest.raises(RuntimeError, match="cudnn: not there"):
            Key.of(replace(KERNEL, device="cuda:0"), "cudnn")


# What it keeps


@pytest.mark.parametrize("kind", ["file", "memory"])
class TestKeeping:
    @pytest.fixture
    def store(self, kind, path):
        return BenchmarkCache(path if kind == "file" else None)

    def test_listings(self, store):
        assert store.listing(Key("a"), 4) is None
        store.store_listing(Key("a"), 4, [("torch:fft", 1024), ("torch:native", 2**40)])
        store.store_listing(Key("a"), 8, [])
        assert store.listing(Key("a"), 4) == [("torch:fft", 1024), ("torch:native", 2**40)]
        assert store.listing(Key("a"), 8) == []
        assert store.listing(Key("a"), 2) is None and store.listing(Key("b"), 4) is None
        store.store_listing(Key("a"), 4, [("torch:fft", 1)])
        assert store.listing(Key("a"), 4) == [("torch:fft", 1)]

    def test_times_by_key_micro_batch_and_algorithm(self, store):
        assert store.times(Key("a"), 4) == {} and len(store) == 0
        samples = [0.1, 1e-9, 1 / 3]
        store.store_times(Key("a"), 4, {"torch:fft": samples, "torch:direct": []})
        store.store_times(Key("a"), 4, {"torch:im2col": [2.0]})
        assert store.times(Key("a"), 4) == {
            "torch:fft": samples,
            "torch:direct": [],
            "torch:im2col": [2.0],
        }
        assert store.times(Key("a"), 5) == {} and store.times(Key("b"), 4) == {}
        assert len(store) == 3

    def test_the_first_measurement_stays(self, store):
        store.store_times(Key("a"), 4, {"torch:fft": [1.0]})
        store.store_times(Key("a"), 4, {"torch:fft": [2.0], "torch:direct": [3.0]})
        assert store.times(Key("a"), 4) == {"torch:fft": [1.0], "torch:direct": [3.0]}

    def test_clear(self, store):
        store.store_times(Key("a"), 4, {"torch:fft": [1.0]})
        store.store_listing(Key("a"), 4, [("torch:fft", 1)])
        store.clear()
        assert len(store) == 0 and store.times(Key("a"), 4) == {}
        assert store.listing(Key("a"), 4) is None
        store.store_times(Key("a"), 4, {"torch:fft": [2.0]})
        assert store.times(Key("a"), 4) == {"torch:fft": [2.0]}

    def test_many_threads(self, store):
        errors = []

        def write(worker):
            try:
                for number in range(20):
                    store.store_times(Key("shared"), number, {"torch:fft": [float(worker)]})
                    store.store_times(Key(f"own {worker}"), number, {"torch:fft": [1.0]})
                    assert len(store.times(Key("shared"), number)["torch:fft"]) == 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store) == 5 * 20


def test_memory_is_each_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = BenchmarkCache(), BenchmarkCache(None)
    first.store_times(Key("a"), 1, {"torch:fft": [1.0]})
    assert (len(first), len(second)) == (1, 0)
    assert first.path is None and list(tmp_path.iterdir()) == []


def test_a_file_outlives_its_cache(path):
    store = BenchmarkCache(str(path))
    store.store_times(Key("a"), 4, {"torch:fft": [0.25]})
    store.store_listing(Key("a"), 4, [("torch:fft", 512)])
    again = BenchmarkCache(path)
    assert again.times(Key("a"), 4) == {"torch:fft": [0.25]}
    assert again.listing(Key("a"), 4) == [("torch:fft", 512)]
    # Both see what the other one writes from now on.
    again.store_times(Key("a"), 8, {"torch:fft": [0.5]})
    assert store.times(Key("a"), 8) == {"torch:fft": [0.5]}
    again.clear()
    assert len(store) == 0


def test_the_default_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "own"))
    assert default_path() == tmp_path / "own" / "microconv.sqlite"
    monkeypatch.setenv("REPRO_CACHE", "~/own")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / "own" / "microconv.sqlite"
    monkeypatch.delenv("REPRO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == tmp_path / ".cache" / "repro" / "microconv.sqlite"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_path() == tmp_path / "xdg" / "repro" / "microconv.sqlite"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_path() == tmp_path / ".cache" / "repro" / "microconv.sqlite"


@pytest.mark.parametrize("row", ["{", '"x"', "3", "null", "[[1, 2, 3]]", '[["x"]]', b"\xff"])
def test_a_damaged_row(path, row):
    store = BenchmarkCache(path)
    store.store_times(Key("a"), 4, {"torch:fft": [0.25]})
    store.store_listing(Key("a"), 4, [("torch:fft", 512)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE times_1 SET samples_s = ?", (row,))
        connection.execute("UPDATE listings_1 SET algorithms = ?", (row,))
    for ask in (store.times, store.listing):
        with pytest.raises(CacheError, match=r"cannot be used.*delete this one"):
            ask(Key("a"), 4)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheError, match="It is a pipe"):
        BenchmarkCache(tmp_path / "pipe")


def test_a_home_folder_in_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    BenchmarkCache("~/here.sqlite")
    assert (tmp_path / "here.sqlite").is_file()


# Several processes at once

# One process imports torch, and forks the others before it uses it.
WRITERS = """
import os, sys
from repro.microconv.cache import BenchmarkCache, Key
path, workers, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def write(worker):
    store = BenchmarkCache(path)  # all of them make the file at once
    for number in range(count):
        store.store_listing(Key("shared"), number, [("torch:fft", number)])
        store.store_times(Key("shared"), number, {"torch:fft": [float(worker)]})
        store.store_times(Key(f"own {worker}"), number, {"torch:fft": [1.0], "torch:direct": []})
        assert len(store.times(Key("shared"), number)["torch:fft"]) == 1

gate, go = os.pipe()
children = []
for worker in range(workers):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(gate, 1)  # until all are there
        try:
            write(worker)
        except BaseException as error:
            sys.stderr.write(f"{worker}: {error!r}")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(go)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
"""


@pytest.mark.thorough
@needs_fork
def test_several_processes_write_into_one_file(path):
    workers, count = 4, 25
    command = [sys.executable, "-W", "ignore", "-c", WRITERS, str(path), str(workers), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout) == ("", f"{[0] * workers}\n")
    store = BenchmarkCache(path)
    assert len(store) == count + workers * count * 2
    for number in range(count):
        ((winner,),) = store.times(Key("shared"), number).values()
        assert winner in (0.0, 1.0, 2.0, 3.0)
        assert store.listing(Key("shared"), number) == [("torch:fft", number)]
        for worker in range(workers):
            assert len(store.times(Key(f"own {worker}"), number)) == 2


@needs_fork
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_cache_survives_a_fork(path):
    store = BenchmarkCache(path)
    store.store_times(Key("a"), 1, {"torch:fft": [1.0]})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if store.times(Key("a"), 1) == {"torch:fft": [1.0]}:
                store.store_times(Key("a"), 2, {"torch:fft": [2.0]})
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.times(Key("a"), 2) == {"torch:fft": [2.0]}


# Files that do not do


def assert_says_what_to_do(error, path):
    message = str(error)
    assert isinstance(error, ValueError)
    assert message.startswith(f"the benchmark cache {path} cannot be used: ")
    assert message.endswith("or give cache=None to keep the results in memory")


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(CacheError) as caught:
        BenchmarkCache(path)
    assert_says_what_to_do(caught.value, path)
    assert path.read_text() == "not a database " * 100  # not overwritten


def test_a_file_that_was_damaged_later(path):
    store = BenchmarkCache(path)
    path.write_bytes(b"x" * 4096)
    for call in (
        lambda: store.times(Key("a"), 1),
        lambda: store.store_times(Key("a"), 1, {"torch:fft": [1.0]}),
        lambda: store.listing(Key("a"), 1),
        lambda: store.store_listing(Key("a"), 1, []),
        lambda: len(store),
        store.clear,
    ):
        with pytest.raises(CacheError) as caught:
            call()
        assert_says_what_to_do(caught.value, path)


def test_a_database_of_something_else(tmp_path):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE times_1 (name TEXT)")
    store = None
    with pytest.raises(CacheError):
        store = BenchmarkCache(path)
        store.times(Key("a"), 1)


def test_a_folder_in_the_place_of_the_file(tmp_path):
    with pytest.raises(CacheError) as caught:
        BenchmarkCache(tmp_path)
    assert_says_what_to_do(caught.value, tmp_path)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "cache.sqlite"
    with pytest.raises(CacheError) as caught:
        BenchmarkCache(path)
    assert_says_what_to_do(caught.value, path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody may fill")
def test_a_folder_that_cannot_be_written():
    for path in ("/proc/repro/cache.sqlite", "/proc/self/cache.sqlite"):
        with pytest.raises(CacheError) as caught:
            BenchmarkCache(path)
        assert_says_what_to_do(caught.value, path)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user"
)
def test_permissions(tmp_path):
    path = tmp_path / "cache.sqlite"
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CacheError) as caught:
            BenchmarkCache(path)
    finally:
        tmp_path.chmod(0o700)
    assert_says_what_to_do(caught.value, path)
    BenchmarkCache(path)
    path.chmod(0o400)
    with pytest.raises(CacheError):
        BenchmarkCache(path).store_times(Key("a"), 1, {"torch:fft": [1.0]})
