"""Kill every writer of the package while it writes: what is lost, torn or left behind.

Each writer writes again and again in a process of its own, which SIGKILL ends at a random moment.
Then whatever stands must be whole, and be the last or the last but one that was written; and after
the next ordinary use of the same place, a day later, no temporary file may be left. A table says
for each writer how many kills there were, how many left something behind until then, how many after
it, and how many tore or lost something. The last two must be 0, or the exit code is 1.

Run from the repository root: ``python -m benchmarks.kills [--kills 200] [--seed 0]``. It takes a
minute, and another for the notebooks, whose kernels start slowly and which get a tenth of the kills
of the others (none where papermill is not installed).
"""

import argparse
import importlib.util
import json
import os
import random
import signal
import stat
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from repro import notebooks
from repro.datasets import archives
from repro.datasets.image_data import Split
from repro.experiments import showing
from repro.measure import load_checkpoint, save_checkpoint
from repro.microconv.cache import BenchmarkCache
from repro.outofcore import native
from repro.records import Record, RecordStore

CURVE = [k / 3 for k in range(4000)]  # a record of some 100 kB
ELEMENTS = 100_000


@dataclass(frozen=True)
class Writer:
    """One of the package's writers.

    Attributes:
        write: Writes number n into a folder.
        check: Raises AssertionError unless what is in the folder is whole; returns the largest
            number that it finds, None where that cannot be known.
        longest_s: Within which a kill comes, at a random moment after the first write.
        share: Of the kills that the others get.
    """

    write: Callable[[Path, int], None]
    check: Callable[[Path], int | None]
    longest_s: float = 0.05
    share: float = 1.0


def record(number: int) -> Record:
    """Return a record whose seed and metrics say its number."""
    fields: dict[str, Any] = {
        "config": {},
        "timings": {},
        "device": {"name": "a CPU", "type": "cpu", "slug": "cpu"},
        "versions": {"torch": "2", "python": "3"},
    }
    times = dict.fromkeys(("started", "finished"), "2026-01-01T00:00:00+00:00")
    return Record(
        key=f"key{number % 7}",
        paper="mbs",
        experiment="train",
        version=1,
        seed=number,
        status="ok",
        metrics={"curve": CURVE, "number": number},
        peak_bytes=None,
        dataset=None,
        commit=None,
        dirty=None,
        command="",
        **fields,
        **times,
    )


def write_record(folder: Path, number: int) -> None:
    """Write another record than before."""
    RecordStore(folder).write(record(number))


def write_packed(folder: Path, number: int) -> None:
    """Fold another record into the packed ones."""
    write_record(folder, number)
    RecordStore(folder).pack("mbs")


def check_records(folder: Path) -> int | None:
    """All records are whole."""
    records = RecordStore(folder).load("mbs")
    for one in records:
        assert one == replace(record(one.seed), schema=one.schema)
    return max((one.seed for one in records), default=None)


def decoded(number: int) -> archives.Decoded:
    """Return a set whose pixels say its number."""
    images = torch.full((ELEMENTS // 300, 3, 10, 10), number % 256, dtype=torch.uint8)
    return archives.Decoded(("a",), {"train": Split(images), "test": Split(images)})


def write_decoded(folder: Path, number: int) -> None:
    """Keep another set than before."""
    os.environ["REPRO_CACHE"] = str(folder)
    archives.cached(f"set-{number}", lambda: decoded(number))


def check_decoded(folder: Path) -> int | None:
    """All sets are whole: none is decoded again."""
    os.environ["REPRO_CACHE"] = str(folder)
    numbers = [int(path.stem.split("-")[1]) for path in folder.glob("set-*.pt")]
    for number in numbers:
        decoded = archives.cached(f"set-{number}", lambda: archives.Decoded((), {}))
        assert (decoded.splits["train"].images == number % 256).all() and decoded.classes == ("a",)
    for path in folder.glob("set-*.pt"):
        path.unlink()
    return max(numbers, default=None)


def write_checkpoint(folder: Path, number: int) -> None:
    """Save another state than before."""
    save_checkpoint(folder / "run.pt", {"n": number, "x": torch.full((ELEMENTS,), float(number))})


def check_checkpoint(folder: Path) -> int | None:
    """The state is whole."""
    if not (folder / "run.pt").exists():
        return None
    state = load_checkpoint(folder / "run.pt")
    assert (state["x"] == state["n"]).all()
    return int(state["n"])


def write_times(folder: Path, number: int) -> None:
    """Keep another measurement."""
    cache = BenchmarkCache(folder / "microconv.sqlite")
    cache.store_times(str(number), 1, {"gemm": [float(number)] * 500})


def check_times(folder: Path) -> int | None:
    """All measurements are whole, and those before the last are there."""
    cache, number = BenchmarkCache(folder / "microconv.sqlite"), 0
    while times := cache.times(str(number), 1):
        assert times == {"gemm": [float(number)] * 500}
        number += 1
    assert len(cache) == number
    return number - 1 if number else None


def write_library(folder: Path, number: int) -> None:
    """Build anew, by a compiler that takes no time."""
    os.environ["REPRO_CACHE"], os.environ["CXX"] = str(folder), str(folder / "compiler")
    compiler = folder / "compiler"
    if not compiler.exists():
        body = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && seq 30000 > "$2"; shift; done'
        compiler.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        compiler.chmod(stat.S_IRWXU)
    native.build().unlink()


def check_library(folder: Path) -> int | None:
    """What is built is whole; then it is built again."""
    os.environ["REPRO_CACHE"], os.environ["CXX"] = str(folder), str(folder / "compiler")
    expected = "".join(f"{k}\n" for k in range(1, 30_001)).encode()
    library = native.build()
    assert library.read_bytes()[: -native._DIGEST_BYTES] == expected
    library.unlink()
    return None


def write_page(folder: Path, number: int) -> None:
    """Write the report, of no paper."""
    showing.PAPERS = ()  # type: ignore[assignment]
    showing.write_report(output=str(folder / "report.md"))


def check_page(folder: Path) -> int | None:
    """The page is whole; then it is written again."""
    page = folder / "report.md"
    assert not page.exists() or page.read_text(encoding="utf-8").startswith("# Five papers")
    write_page(folder, 0)
    return None


def write_notebook(folder: Path, number: int) -> None:
    """Execute a notebook, and refresh another in place."""
    os.environ["REPRO_RESULTS"] = str(folder / "results")
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "outputs": []}
    cells = [cell | {"metadata": {"tags": ["parameters"]}, "source": "n: int = 0  # which"},
             cell | {"id": "b", "metadata": {}, "source": "print(n)"}]  # fmt: skip
    content = {"cells": cells, "nbformat": 4, "nbformat_minor": 5}
    content["metadata"] = {
        "kernelspec": {"name": "python3", "display_name": "x", "language": "python"}
    }
    path = folder / "01_tiny.ipynb"
    if not path.exists():
        path.write_text(json.dumps(content), encoding="utf-8")
    notebooks.FOLDER = folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jupyter's own
        assert not notebooks.execute(path, {"n": number}).failed
        assert not notebooks.refresh(path).failed


def check_notebook(folder: Path) -> int | None:
    """Both notebooks are whole; then they are executed again."""
    for path in folder.rglob("*.ipynb"):
        if not path.name.startswith(".") and ".tmp" not in str(path):
            json.loads(path.read_text(encoding="utf-8"))
    write_notebook(folder, -1)
    return None


WRITERS: Mapping[str, Writer] = {
    "records": Writer(write_record, check_records),
    "packed records": Writer(write_packed, check_records),
    "decoded sets": Writer(write_decoded, check_decoded),
    "checkpoints": Writer(write_checkpoint, check_checkpoint),
    "benchmark cache": Writer(write_times, check_times),
    "library": Writer(write_library, check_library, longest_s=0.2),
    "report": Writer(write_page, check_page, longest_s=0.2),
    "notebooks": Writer(write_notebook, check_notebook, longest_s=4.0, share=0.1),
}


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files and folders, SQLite's included."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.startswith(".") or path.name.endswith((".tmp", "-journal", "-wal", "-shm"))
    ]


def kill_once(writer: Writer, folder: Path, after_s: float) -> int:
    """Kill a process while it writes; return the last number that it said it had written."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        number = 0
        try:
            while True:
                writer.write(folder, number)
                os.write(write_end, number.to_bytes(8, "big"))
                number += 1
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write_end)
    said = os.read(read_end, 8)
    if not said:
        raise SystemExit("the writer failed before it was killed")
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(read_end, 8):
        said = more
    os.close(read_end)
    return int.from_bytes(said, "big")


def try_writer(name: str, kills: int, chance: random.Random) -> tuple[int, int, int]:
    """Return how many kills left something, left something for good, and tore or lost something."""
    writer, left, stayed, torn = WRITERS[name], 0, 0, 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            last = kill_once(writer, folder, chance.uniform(0, writer.longest_s))
            left += bool(leftovers(folder))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    standing = writer.check(folder)
                if standing is not None:
                    assert standing in (last, last + 1), f"{standing} stands, {last} was written"
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")
                torn += 1
            for path in folder.rglob(".*.tmp"):
                os.utime(path, (0, 0))  # what is younger than a day may be in use
            writer.write(folder, 10**6)  # the next ordinary use
            if remaining := leftovers(folder):
                print(f"{name}: {', '.join(remaining)} stayed")
                stayed += 1
    return left, stayed, torn


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WRITERS, help="one writer alone")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    torch.set_num_threads(1)  # processes are forked
    names = [options.only] if options.only else list(WRITERS)
    if importlib.util.find_spec("papermill") is None:
        names = [name for name in names if name != "notebooks"]
    each = options.kills / sum(WRITERS[name].share for name in names)
    print(f"{'writer':<18}{'kills':>6}{'left until next use':>21}{'for good':>10}{'torn':>6}")
    faults = 0
    for name in names:
        kills = max(1, -int(-each * WRITERS[name].share // 1))
        left, stayed, torn = try_writer(name, kills, chance)
        print(f"{name:<18}{kills:>6}{left:>21}{stayed:>10}{torn:>6}", flush=True)
        faults += stayed + torn
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
