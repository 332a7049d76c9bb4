"""The benchmark cache: its keys, its file, and other processes and damage."""

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import joined
import pytest
import torch

from repro.microconv import BenchmarkCache, CacheError, Convolution, Kernel, backends, cache
from repro.microconv.cache import default_path, key_of

CONV = Convolution(6, 16, 17, 4, (3, 3))
KERNEL = Kernel("forward", CONV)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "cache.sqlite"


def test_settings_of_the_process_are_in_the_key(monkeypatch):
    before, listed = key_of(KERNEL), []
    torch.set_num_threads(2)
    try:
        assert key_of(KERNEL) != before
    finally:
        torch.set_num_threads(1)
    changed = [
        (torch, "__version__", "9.9.9"),
        (cache, "freed_memory_is_kept", lambda: "otherwise"),
        (cache, "_code", lambda: "another"),
        (torch.backends.mkldnn, "enabled", False),
    ]
    for owner, name, value in changed:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert key_of(KERNEL) != before, name
            listed.append(backends.listing(KERNEL, 2)[0])  # measured anew
    assert listed[-1] != listed[0] and key_of(KERNEL) == before
    monkeypatch.setattr(cache, "_device", lambda device: "another")
    assert key_of(KERNEL) != before


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_is_kept(kind, path):
    store, a, b = BenchmarkCache(path if kind == "file" else None), "a", "b"
    assert store.listing(a, 4) is None and store.times(a, 4) == {} and len(store) == 0
    listed, samples = [("torch:im2col", 1024), ("torch:native", 2**40)], [0.1, 1e-9, 1 / 3]
    store.store_listing(a, 4, listed)
    store.store_listing(a, 8, [])
    assert (store.listing(a, 4), store.listing(a, 8), store.listing(a, 2)) == (listed, [], None)
    assert store.listing(b, 4) is None
    store.store_listing(a, 4, listed[:1])
    assert store.listing(a, 4) == listed[:1]
    store.store_times(a, 4, {"torch:im2col": samples, "torch:direct": []})
    store.store_times(a, 4, {"torch:im2col": [9.0], "torch:implicit": [2.0]})  # the first stays
    expected = {"torch:im2col": samples, "torch:direct": [], "torch:implicit": [2.0]}
    assert store.times(a, 4) == expected and len(store) == 3
    assert store.times(a, 5) == {} and store.times(b, 4) == {}
    other = BenchmarkCache()
    other.store_times(a, 4, {"torch:im2col": [9.0]})
    other.store_listing(b, 4, listed)
    other.take(store)  # what is known stays
    assert other.times(a, 4) == expected | {"torch:im2col": [9.0]}
    assert (other.listing(a, 4), other.listing(b, 4)) == (listed[:1], listed)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(4), [None] * 4, [store] * 4)) == [None] * 4
    assert len(store) == 3 + COUNT + 4 * COUNT * 2


def test_a_file_outlives_its_cache(path, tmp_path, monkeypatch):
    store = BenchmarkCache(str(path))
    store.store_times("a", 4, {"torch:im2col": [0.25]})
    store.store_listing("a", 4, [("torch:im2col", 512)])
    again = BenchmarkCache(path)
    assert again.times("a", 4) == {"torch:im2col": [0.25]}
    assert again.listing("a", 4) == [("torch:im2col", 512)]
    path.unlink()
    store.store_times("b", 4, {})  # begins anew
    assert again.times("a", 4) == {} and again.listing("a", 4) is None
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    BenchmarkCache("~/here.sqlite")
    assert (tmp_path / "home" / "here.sqlite").is_file()
    monkeypatch.setenv("REPRO_CACHE", "~/own")
    assert default_path() == tmp_path / "home" / "own" / "microconv.sqlite"


@pytest.mark.parametrize("row", ["{", '"x"', "3", "null", "[[1, 2, 3]]", '[["x"]]', b"\xff"])
def test_a_damaged_row(path, row):
    store = BenchmarkCache(path)
    store.store_times("a", 4, {"torch:im2col": [0.25]})
    store.store_listing("a", 4, [("torch:im2col", 512)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE times_1 SET samples_s = ?", (row,))
        connection.execute("UPDATE listings_1 SET algorithms = ?", (row,))
    for ask in (store.times, store.listing):
        with pytest.raises(CacheError, match=r"cannot be used.*delete this one"):
            ask("a", 4)


COUNT = 25


def write(worker, _, store):
    store = store if isinstance(store, BenchmarkCache) else BenchmarkCache(store)  # all make it
    for number in range(COUNT):
        store.store_listing("shared", number, [("torch:im2col", number)])
        store.store_times("shared", number, {"torch:im2col": [float(worker)]})
        store.store_times(f"own {worker}", number, {"torch:im2col": [1.0], "torch:direct": []})
        assert len(store.times("shared", number)["torch:im2col"]) == 1


@pytest.mark.slow
def test_several_processes_write_into_one_file(path):
    assert joined.run(joined.forked("repro.microconv"), write, path, count=4) == [0] * 4
    store = BenchmarkCache(path)
    assert len(store) == COUNT + 4 * COUNT * 2
    for number in range(COUNT):
        ((winner,),) = store.times("shared", number).values()
        assert winner in (0.0, 1.0, 2.0, 3.0)
        assert store.listing("shared", number) == [("torch:im2col", number)]
        for worker in range(4):
            assert len(store.times(f"own {worker}", number)) == 2


@pytest.mark.parametrize("kind", ["text", "other", "folder", "pipe"])
def test_files_that_do_not_do(tmp_path, kind):
    path = tmp_path / "there"
    if kind == "text":
        path.write_text("not a database " * 100)
    elif kind == "other":
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE times_1 (name TEXT)")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)  # is not waited for
    message = rf"^the benchmark cache {path} cannot be used: .* keep the results in memory$"
    with pytest.raises(CacheError, match=message):
        BenchmarkCache(path).times("a", 1)
    assert kind != "text" or path.read_text() == "not a database " * 100  # not overwritten
