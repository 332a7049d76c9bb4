"""Inputs that cannot be right: each ends with exit code 2 and one line, at once.

The line names what was given, and what is allowed or what to do. Nothing on the disk changes, and
nothing is trained. All run in this process.
"""

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from commands import command_line
from test_notebooks import tiny

from repro import notebooks, paths
from repro.experiments import arguments, load_paper, one_run
from repro.experiments import run as running
from repro.experiments.design import Outcome
from repro.measure import accelerator
from repro.records import CorruptRecordWarning, RecordStore, local_store, read_record

SMOKE = ("--profile", "smoke", "--device", "cpu")
QUICK = ("--profile", "quick", "--device", "cpu")
FIGURE = ("run", "mbs/figure2", *SMOKE)
TABLE = ("run", "mbs/table5", *SMOKE)
HUGE = "9" * 5000
CARRY_OUT = running.carry_out


@dataclass(frozen=True)
class Case:
    """A command line, what its error names, and the environment; ``{root}`` is a folder."""

    arguments: tuple[str, ...]
    named: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def add(arguments: tuple[str, ...], *named: str, **environment: str) -> None:
    values = " ".join(f"{name}={value}" for name, value in environment.items())
    shown = " ".join(a if len(a) < 40 else f"{a[:40]}...{len(a)}" for a in (*arguments, values))
    name = ascii(shown)[1:-1]
    assert name not in CASES, f"{name} is there twice"
    CASES[name] = Case(arguments, named, environment)


# What is given with which option, and what the error says: each kind of mistake once.
for profile in ("fast", "quick,gpu", "\x1b[31msmoke", "\udcff"):
    add(("run", "mbs", "--profile", profile), "unknown profile", "smoke, quick")
for command in ("verify", "show", "status", "report", "pack", "notebooks"):
    add((command, *(["mbs"] if command == "show" else []), "--profile", "fast"), "unknown profile")
add(("run", "mbs", "--profile", "view"), "'view'", "computes none")

# Devices: what is none, and what is not here (the machine is made to have no GPU).
for device in ("tpu", "cpu:7", "cpu ", "cuda", "cuda:99", "cuda:x", "Cuda:0", f"cuda:{HUGE}"):
    add((*FIGURE[:4], "--device", device), "is not available here; allowed are 'cpu'")
add(("notebooks", "--device", "tpu"), "allowed are 'cpu'")
add(("notebooks", "-p", "device=cuda:99"), "allowed are 'cpu'")
add(("doctor", "--device", "tpu"), "allowed are 'cpu'")

for seeds in ("0", "-3", "x", "1.5", "1,1", ",", "1001", "4294967296,", HUGE, "٣"):
    add((*FIGURE, "--seeds", seeds), "give how many (3), or a list", "4294967295")
add(("notebooks", "--seeds", "1,1"), "give how many (3), or a list")
for hours in ("0", "-1", "nan"):
    add((*FIGURE, "--hours", hours), f"--hours is {hours}; give a number above 0")

# Options left empty, as by a variable that a script has not set; options without a value.
OPTIONS = {
    "run mbs/figure2": "profile device data dataset seeds only set address",
    "show mbs/table4": "profile from set",
    "report": "profile from output",
    "notebooks": "parameter profile device data seeds",
}
for words, options in OPTIONS.items():
    for option in options.split():
        add((*words.split(), f"--{option}", ""), f"--{option}", "it is empty; leave it out")
add(("run", "mbs/figure2", "--only"), "--only", "requires an argument", "--help")

# Commands and arguments.
add(("reproduce",), "No such command 'reproduce'", "--help")
add(("\x1b[2J",), "No such command", "--help")
add(("run",), "name what to run", "or all")
add(("show",), "Missing argument", "--help")
add(("status", "mbs"), "unexpected extra argument", "--help")
for command in ("run", "show", "verify", "pack", "list"):
    add((command, "vgg"), "unknown paper 'vgg'", "choose among mbs, dualbatch")
for target in ("MBS", "/table4", "../mbs", ""):
    add(("run", target), "unknown paper", "choose among mbs, dualbatch")
for target in ("mbs/table9", "mbs/Table4", "mbs/table4/x", "mbs//"):
    add(("show", target), f"unknown artefact {target!r}", "mbs/table4")
add(("run", "all", "mbs/tabel4", *SMOKE), "did you mean mbs/table4?")  # beside all, too
add(("show", "mbs/tabel4"), "did you mean mbs/table4?")
add(("show", "table4"), "did you mean mbs/table4 or dualbatch/table4?")
for command in ("list", "verify"):
    add((command, "mbs/table4"), "unknown paper 'mbs/table4'", "show prints an artefact")
for device in ("tpu", "../local"):
    add(("show", "mbs/table4", "--from", device), f"device {device!r}", "choose among local")

# What is run.
for text in ("batch", "=3", "batch="):
    add((*TABLE, "--only", text), "KEY=VALUE")
    add((*TABLE, "--set", text), "KEY=VALUE")
for only in ("mini_batch=17", "mini_batch=16.0", "role=u-net"):
    add((*TABLE, "--only", only), f"no run of the plan has {only}", "choose among")
add((*TABLE, "--only", "mini_batch=16", "--only", "batch=4"), "their keys are")
for command in (("run", "dualbatch/table5", *SMOKE), ("show", "dualbatch/table5")):
    add((*command, "--set", "engine=dask"), "unknown engine", "choose among local, ray")
for change, *named in (
    ("engine=ray", "'engine'", "their keys are"), ("dataset={}", "'dataset'", "their keys are"),
    ("mini_batch=many", "another type than mini_batch="), ("mini_batch=1.5", "another type"),
    ("mini_batch=[8]", "another type"), ("mini_batch=-8", "below 1", "give one such as"),
    ("mini_batch=0", "below 1", "give one such as"),
    *((f"mini_batch={n}", "not finite, or beyond 64 bits") for n in (2**63, HUGE[:999])),
    *((f"optimizer.lr={n}", "not finite, or beyond") for n in ("1e999", "-Infinity", "NaN", 2**70)),
    ("role=VGG", "unknown role", "U-Net"),
):  # fmt: skip
    add((*TABLE, "--set", change), *named)
twice = ("--set", "mini_batch=8", "--set", "mini_batch=16")
add((*TABLE, *twice), "mini_batch is set twice", "give it one value")
add(("show", "mbs/table5", *twice), "mini_batch is set twice")
for profile in ((), ("--profile", "smoke")):  # by default quick
    add(("run", "mbs/table1", "--dry-run", *profile), "add --profile gpu or paper")
DRY = ("run", "mbs/table5", "--profile", "gpu", "--dry-run")
for name, value in (
    *(("device", "cpu"), ("data", "{root}"), ("dataset", "cifar10"), ("address", "auto")),
    *(("workers", "2"), ("hours", "1"), ("seeds", "3")),
):  # fmt: skip
    add((*DRY, f"--{name}", value), f"--dry-run computes nothing, and takes no --{name}")
for option in ("retry-failed", "data-stand-in"):
    add((*DRY, f"--{option}"), f"--dry-run computes nothing, and takes no --{option}")
add((*FIGURE, "--address", "auto"), "no run of the plan", "--set engine=ray")
add(("show", "mbs/table3", "--set", "zzz=1"), "'zzz'", "their keys are")
for name in ("mnist", "cifar10,digits", "\udcff"):
    add((*FIGURE, "--dataset", name), "unknown dataset", "digits")
imagenet = ("run", "all", *SMOKE, "--dataset", "imagenet")
add(imagenet, "'imagenet' serves no experiment", "digits, photos")
add(("run", "mbs", *QUICK, "--dataset", "flowers102"), "flowers102", "$REPRO_DATA", "closed")
add(("data", "CIFAR10"), "unknown dataset", "cifar10")
own = ("run", "dualbatch/table5", "--profile", "paper", "--device", "cpu")
add(own, "cifar100", "--data-stand-in goes on")

# Folders of data. (What lies in {root} is made below.)
for folder in ("missing", "file", "fifo", "loop", "dangling", "file/below", "n" * 300):
    add((*FIGURE, "--data", f"{{root}}/{folder}"), folder)
    add(FIGURE, f"{folder}' of $REPRO_DATA cannot be read", REPRO_DATA=f"{{root}}/{folder}")
add(FIGURE, "~nobody", "of $REPRO_DATA cannot be read", REPRO_DATA="~nobody-of-that-name/data")
for command in (("verify", "mbs"), ("notebooks",), ("doctor",)):
    add((*command, "--data", "{root}/missing"), "missing")

# Files that are to be written, and the folder of results.
for path, *named in (
    ("folder", "is a folder"), ("fifo", "a regular file is expected"), ("file/below.html", "file"),
    ("loop", "symbolic links"), (f"{'n' * 300}/x.html", "nnn"),
):  # fmt: skip
    add(("report", "--output", f"{{root}}/{path}"), *named)
add(("report", "--output", "{root}/new/"), "a folder", "give the path of a file")
add(("report", "--output", "~nobody-of-that-name/x.html"), "home directory", "give another path")
for command in (FIGURE, ("report",), ("notebooks",)):
    add(command, "/proc/none", REPRO_RESULTS="/proc/none/results")
    add(command, "{root}"[:0], REPRO_RESULTS="{root}/file/below")
nowhere = "~nobody-of-that-name/results"
add(("status",), "home directory", "give another path", REPRO_RESULTS=nowhere)

# Notebooks.
for name in ("99_none", "../01_tiny", ""):
    add(("notebooks", name), f"unknown notebook {name!r}", "choose among 01_tiny")
for parameter in ("count", "=3", "count.x=1", "a b=3", "3x=1"):
    add(("notebooks", "-p", parameter), repr(parameter), "NAME=VALUE")
add(("notebooks", "-p", "cuont=3"), "has no parameter", "it has count, data, device")
add(("notebooks", "-p", "count=1", "-p", "count=2"), "count is given twice", "give one of them")
add(("notebooks", "-p", "reference=tpu"), "'tpu'", "choose among")
add(("notebooks", "--profile", "smoke", "-p", "reference=x"), "profile view", "leave it out")
add(("notebooks", "-p", "data={root}/missing"), "missing", "cannot be read")
add(("notebooks", "--refresh", "--seeds", "3"), "--refresh", "leave it out")
for name, value in (("seeds", "3"), ("device", "cpu"), ("data", "{root}")):
    add(("notebooks", f"--{name}", value), f"view computes nothing, and takes no --{name}")

# Figures.
for artefact, out, *named in (
    ("mbs", "x.svg", "whole paper"), ("mbs/table2", "x.svg", "has no figure", "mbs/figure3"),
    ("mbs/figure3", "x.gif", "'x.gif'"), ("mbs/figure3", "x", "'x'", ".svg, .pdf or .png"),
    ("mbs/figure3", "/proc/no/x.svg", "cannot be written", "/proc/no"),
):  # fmt: skip
    add(("figure", artefact, "--out", out), *named)
add(("figure", "mbs/figure3", "--profile", "paper", "--out", "x.svg"), "run mbs/figure3")
add(("figure", "overview", "--out", "x.svg", "--set", "engine=ray"), "takes no --set")
add(("figure", "overview", "--profile", "paper", "--out", "x.svg"), "give another --profile")
for command in (FIGURE, ("notebooks", "--profile", "quick")):
    add((*command, "--data-stand-in"), "--data-stand-in", "leave it out")
for classes in ("99999999999999999999", "4611686018427387904"):
    model = ("--model", "torchvision/resnet18", "--batch", "8", "--memory", "1GiB")
    add(("advise", *model, "--classes", classes), "verflow")

# Datasets that cannot be read.
for content in ("file", "fifo"):
    options = (*QUICK, "--data", f"{{root}}/archives/{content}", "--dataset", "flowers5")
    add(("run", "mbs/table4", *options), "flowers5")


def state_of(folder: Path) -> dict[str, object]:
    """Return all that lies below a folder, with contents and times."""
    state: dict[str, object] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)  # noqa: PTH118 (not every name is text)
            facts = os.lstat(path)
            read = 0 < facts.st_size < 2**20 and Path(path).is_file()
            content = Path(path).read_bytes() if read else b""
            state[path] = (facts.st_mode, facts.st_mtime_ns, content)
    return state


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of things that are no use as a file, folder, dataset or notebook."""
    from invented import make_record

    root = tmp_path_factory.mktemp("place")
    (root / "file").write_text("a file", encoding="utf-8")
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nowhere")
    for content in ("file", "folder", "fifo", "loop"):
        path = root / "archives" / content / "flowers5.tar.xz"
        path.parent.mkdir(parents=True)
        path.symlink_to(root / content)
    tiny(root / "notebooks")
    path = root / "notebooks" / "01_tiny.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for name in ("device", "data", "seeds", "reference"):
        notebook["cells"][0]["source"] += f'\n{name}: str = ""  # of it'
    path.write_text(json.dumps(notebook), encoding="utf-8")
    RecordStore(root / "results" / "local" / "smoke").write(make_record(config={"mini_batch": 16}))
    return root


@pytest.fixture
def run(root, monkeypatch, capsys) -> Iterator[object]:
    """Run a command in this process; return its exit code, stdout and stderr."""

    def train(*arguments):
        raise AssertionError("something was trained")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerator, "present", lambda: None)
    monkeypatch.setattr(running, "carry_out", train)
    monkeypatch.setattr(paths, "ROOT", root / "checkout")  # the user's data is not searched
    monkeypatch.setattr(notebooks, "FOLDER", root / "notebooks")
    monkeypatch.setenv("REPRO_RESULTS", str(root / "results"))
    one_run._load_cached.cache_clear()
    yield command_line(monkeypatch, capsys)
    one_run._load_cached.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bad_input(root, run, monkeypatch, name):
    case = CASES[name]

    def filled(text: str) -> str:
        return text.replace("{root}", str(root))

    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, filled(value))
    before = state_of(root)
    code, out, err = run(*map(filled, case.arguments))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ") and line.isprintable() and len(line) < 2000, line
    for text in case.named:
        assert text in line
    assert state_of(root) == before


# What may be in a record's place, given the text of a good one; see also test_records.
RECORDS = {
    "UTF-16": lambda good: good.decode().encode("utf-16"),
    "another run's": lambda good: changed(good, key="f" * 24),
    "another paper's": lambda good: changed(good, paper="adaptive"),
}
PLACES = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a file of 1 GiB": lambda path: path.touch() or os.truncate(path, 2**30),
}


def changed(good: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(good) | fields).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RECORDS, *PLACES])
def test_what_is_no_record_stops_no_status_and_is_not_overwritten(
    run, results_folder, monkeypatch, make_record, kind
):
    monkeypatch.setenv("REPRO_RESULTS", str(results_folder))  # the fixture `run` has set its own
    paper = load_paper("mbs")
    runs = paper.artefacts["figure2"].runs("smoke", arguments.choose_datasets(paper, "smoke"))
    (step,) = running._steps(paper, runs, running.Setting("smoke", "cpu"), {})
    store = local_store("smoke")
    path = store.write(make_record("timeline", key=step.key, config=step.run.config))
    store.write(make_record(key="other"))
    if kind in RECORDS:
        path.write_bytes(RECORDS[kind](path.read_bytes()))
    else:
        path.unlink()
        PLACES[kind](path)
    before = state_of(results_folder)
    # It is in the way of its own run alone.
    code, out, err = run(*FIGURE)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert str(path) in line and "move it away or delete it, then run again" in line
    assert len(line) < 2000
    if kind != "another run's":  # which is one, of a run that nobody asks for
        with pytest.warns(CorruptRecordWarning, match=path.name):
            code, out, _ = run("status")
        assert code == 0 and "mbs/figure2" in out
    assert state_of(results_folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("moment", ["before the first", "between two", "in the method"])
def test_a_disk_that_fails(run, results_folder, monkeypatch, make_record, trouble, moment):
    """Before a training starts where that can be known; and what stands is never touched."""
    monkeypatch.setenv("REPRO_RESULTS", str(results_folder))
    store = local_store("smoke")
    written = store.write(make_record(key="stands"))
    before = written.read_bytes()
    done: list[str] = []

    def fail(*arguments):
        raise OSError(trouble, os.strerror(trouble))

    def method(config, seed, data, device):
        if moment == "in the method" and done:
            fail()
        if moment == "between two" and done:
            monkeypatch.setattr(os, "fsync", fail)
        done.append("one")
        return Outcome({})

    monkeypatch.setattr("repro.experiments.mbs.training.train", method)
    for name in ("size", "overhead", "timeline"):
        monkeypatch.setattr(f"repro.experiments.mbs.measuring.{name}", method)
    monkeypatch.setattr(running, "carry_out", CARRY_OUT)
    if moment == "before the first":
        monkeypatch.setattr(os, "fsync", fail)
    code, _, err = run("run", "mbs", *SMOKE)
    monkeypatch.undo()
    line = err.splitlines()[-1]
    assert code == 2 and line.startswith("error: ") and os.strerror(trouble) in line
    assert ("stands" in line or "kept" in line) == (moment != "before the first")
    assert len(done) == {"before the first": 0, "between two": 2, "in the method": 1}[moment]
    files = list(results_folder.rglob("*.json"))
    assert not list(results_folder.rglob("*.tmp"))
    assert len(files) == 1 + (moment != "before the first")  # and nothing half-written
    assert written.read_bytes() == before and all(read_record(path) for path in files)
