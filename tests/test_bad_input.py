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


# Profiles: of every command that has one.
OF_PROFILES = {
    "run": ("run", "mbs"), "verify": ("verify", "mbs"),
    "show": ("show", "mbs"), "status": ("status",), "report": ("report",), "pack": ("pack",),
    "notebooks": ("notebooks",),
}  # fmt: skip
for command in OF_PROFILES.values():
    for profile in ("fast", "SMOKE", "smoke ", "quick,gpu", "gpü", "\x1b[31msmoke", "\udcff"):
        add((*command, "--profile", profile), "unknown profile", "smoke, quick")
    if command[0] != "notebooks":
        add((*command, "--profile", "view"), "'view'", "computes none")

# Devices: what is none, and what is not here (the machine is made to have no GPU).
DEVICES = (
    "tpu", "cpu:7", "cpu:1", "cpu:-1", "cpu:", "CPU", "cpu ", " cpu", "cpu:0:0", "cpu,cuda", "cuda",
    "cuda:0", "cuda:99", "cuda:", "cuda:x", "cuda:01", "cuda:-1", "Cuda:0", "mps", "xpu:0", "meta",
    "gpu", "0", "\udcff", f"cuda:{HUGE}",
)  # fmt: skip
for device in DEVICES:
    add((*FIGURE[:4], "--device", device), "is not available here; allowed are 'cpu'")
for device in ("cpu:7", "cuda:99", "CPU ", "tpu"):
    add(("notebooks", "--device", device), "allowed are 'cpu'")
    add(("notebooks", "-p", f"device={device}"), "allowed are 'cpu'")
    add(("doctor", "--device", device), "allowed are 'cpu'")

# Seeds.
SEEDS = (
    "0", "-3", "-1,", "x", "1,x", "1.5", "1e3", "1,1", "1,-2", ",", "5,,", ",5", "1;2", "3 4",
    "0x10", "1001", "4294967296,", "18446744073709551616,", "0,18446744073709551617", "9" * 21,
    HUGE, "٣",
)  # fmt: skip
for seeds in SEEDS:
    add((*FIGURE, "--seeds", seeds), "give how many (3), or a list", "4294967295")
for seeds in ("0", "x", "1,1", "18446744073709551616,"):
    add(("notebooks", "--seeds", seeds), "give how many (3), or a list")
    add(("notebooks", "-p", f"seeds={seeds}"), "give how many (3), or a list")

# Options left empty, as by a variable that a script has not set; options without a value.
OPTIONS = {
    "run mbs/figure2": "profile device data dataset seeds only set address",
    "verify mbs": "profile from data",
    "pack": "profile",
    "show mbs/table4": "profile from set",
    "status": "profile",
    "report": "profile from output",
    "notebooks": "parameter profile device data seeds",
    "data": "data",
    "doctor": "device data",
}
for words, options in OPTIONS.items():
    for option in options.split():
        add((*words.split(), f"--{option}", ""), f"--{option}", "it is empty; leave it out")
        add((*words.split(), f"--{option}"), f"--{option}", "requires an argument", "--help")
    add((*words.split(), "--color"), "No such option: --color", "--help")

# Commands and arguments.
add(("reproduce",), "No such command 'reproduce'", "--help")
add(("--version",), "No such option: --version", "--help")
add(("\x1b[2J",), "No such command", "--help")
add(("list", "vgg"), "unknown paper 'vgg'", "mbs, dualbatch")
add(("run",), "name what to run", "or all")
add(("status", "mbs"), "unexpected extra argument", "--help")
add(("doctor", "mbs"), "unexpected extra argument", "--help")
add(("report", "mbs"), "unexpected extra argument", "--help")
add(("show",), "Missing argument", "--help")
add(("show", "mbs/table4", "mbs/table5"), "unexpected extra argument", "--help")
add(("list", "--profile", "smoke"), "No such option", "--help")
for command in (("run",), ("show",), ("verify",), ("pack",)):
    for target in ("vgg", "vgg/table1", "MBS", "mbs ", "/table4", "../mbs", "", "mbs:table4"):
        add((*command, target), "unknown paper", "choose among mbs, dualbatch")
for command in (("run",), ("show",)):
    for target in ("mbs/table9", "mbs/Table4", "mbs/table4/x", "mbs/ table4", "mbs//"):
        add((*command, target), f"unknown artefact {target!r}", "mbs/table4")
for command in (("verify",), ("pack",)):
    add((*command, "mbs/table4"), "unknown paper 'mbs/table4'", "choose among mbs, dualbatch")
add(("run", "mbs/table4", "vgg", *SMOKE), "unknown paper 'vgg'")
for command in (("show", "mbs/table4"), ("report",), ("verify", "mbs")):
    for device in ("tpu", "../local", "Local", "reference", "cpu-2-cores"):
        add((*command, "--from", device), f"no records of device {device!r}", "choose among local")

# What is run.
for only in ("batch", "=3", "batch=", "="):
    add((*TABLE, "--only", only), "KEY=VALUE")
for only in ("mini_batch=17", "mini_batch=-16", "mini_batch=1e1", "mini_batch=16.0", "role=u-net"):
    add((*TABLE, "--only", only), f"no run of the plan has {only}", "choose among")
add((*TABLE, "--only", "batch=4"), "batch=4", "their keys are", "mini_batch")
add((*TABLE, "--only", "mini_batch=16", "--only", "batch=4"), "their keys are")
for change in ("engine", "=ray", "engine=", "="):
    add(("run", "dualbatch/table5", *SMOKE, "--set", change), "KEY=VALUE")
for change in ("engine=dask", "engine=Ray", "engine=local,ray"):
    for command in (("run", "dualbatch/table5", *SMOKE), ("show", "dualbatch/table5")):
        add((*command, "--set", change), "unknown engine", "choose among local, ray")
for change, *named in (
    ("engine=ray", "'engine'", "their keys are"), ("dataset={}", "'dataset'", "their keys are"),
    ("zzz=1", "'zzz'", "their keys are"), ("mini_batch=many", "another type than mini_batch="),
    ("mini_batch=1.5", "another type"), ("mini_batch=true", "another type"),
    ("mini_batch=null", "another type"), ("mini_batch=[8]", "another type"),
    ("mini_batch=NaN", "another type"), ("mini_batch=-8", "below 0", "give one such as"),
    ("mini_batch=0", "leaves nothing", "give one such as"),
    ("mini_batch=18446744073709551616", "beyond 64 bits"),
    (f"mini_batch={'9' * 400}", "beyond 64 bits"), (f"mini_batch={HUGE}", "another type"),
    ("role=VGG", "unknown role", "U-Net"), ("epochs=0", "leaves nothing"),
    ("epochs=-1", "below 0"),
):  # fmt: skip
    add((*TABLE, "--set", change), *named)
add((*TABLE, "--set", "epochs=1", "--set", "epochs=2"), "epochs is set twice")
add(("show", "mbs/table3", "--set", "zzz=1"), "'zzz'", "their keys are")
add(("show", "mbs/table3", "--set", "mini_batch=x"), "another type")
add(("show", "mbs/table3", "--set", "mini_batch"), "KEY=VALUE")
for address in ("auto", "nowhere:1", "\udcff"):
    add((*FIGURE, "--address", address), "no run of the plan uses Ray", "--set engine=ray")
for name in ("mnist", "Digits", "digits ", "cifar10,digits", "\udcff"):
    add((*FIGURE, "--dataset", name), "unknown dataset", "digits")
imagenet = ("run", "all", *SMOKE, "--dataset", "imagenet")
add(imagenet, "'imagenet' serves no experiment", "digits, photos")
add(("run", "mbs", *QUICK, "--dataset", "digits", "--dataset", "flowers5"), "the same task")
add(("run", "mbs", *QUICK, "--dataset", "flowers102"), "flowers102", "$REPRO_DATA", "closed")
for name in ("mnist", "CIFAR10", "", "../cifar10"):
    add(("data", name), "unknown dataset", "cifar10")

# Folders of data. (What lies in {root} is made below.)
for folder in ("missing", "file", "fifo", "loop", "file/below", "dangling"):
    for command in (FIGURE, ("verify", "mbs"), ("notebooks",), ("doctor",)):
        add((*command, "--data", f"{{root}}/{folder}"), folder)

# Files that are to be written.
for path, *named in (
    ("folder", "is a folder"), ("fifo", "a regular file is expected"), ("file/below.html", "file"),
    ("loop", "symbolic links"), ("loop/below.html", "symbolic links"),
    (f"{'n' * 300}/x.html", "nnn"),
):  # fmt: skip
    add(("report", "--output", f"{{root}}/{path}"), *named)
add(("report", "--output", "{root}/new/"), "a folder", "give the path of a file")
for path in ("~nobody-of-that-name/x.html", "~nobody-of-that-name"):
    add(("report", "--output", path), "home directory", "give another path")
add(("report", "--output", "/proc/none/report.html"), "/proc/none")
add(("report", "--output", "/dev/null"), "a regular file is expected")

# The folder of results.
WRITING = {"run": FIGURE, "report": ("report",), "notebooks": ("notebooks",)}
for folder in ("file", "file/below", "loop", "fifo", "dangling/../file/x", "n" * 300):
    for command in WRITING.values():
        add(command, "{root}"[:0], REPRO_RESULTS=f"{{root}}/{folder}")
NAMING = (*WRITING.values(), ("status",), ("show", "mbs/table4"), ("verify", "mbs"), ("pack",))
for command in NAMING:
    add(command, "~", "name another folder", REPRO_RESULTS="~nobody-of-that-name/results")
for command in WRITING.values():
    add(command, "/proc/none", REPRO_RESULTS="/proc/none/results")

# Notebooks.
for name in ("99_none", "../01_tiny", "01_tiny.py", "01_TINY", "", "draft"):
    add(("notebooks", name), f"unknown notebook {name!r}", "choose among 01_tiny")
for parameter in ("count", "=3", "a b=3", "3x=1", "count.x=1", "="):
    add(("notebooks", "-p", parameter), repr(parameter), "NAME=VALUE")
for parameter in ("cuont=3", "Count=3", "größe=1", "__class__=1"):
    add(("notebooks", "-p", parameter), "has no parameter", "it has count, data, device")
for parameter in (
    "count=many", "count=1.5", "count=True", "count=[1]", "count=", "ratio=high", "ratio=True",
    "switch=yes", "switch=1", f"count={'(' * 300}",
):  # fmt: skip
    add(("notebooks", "-p", parameter), f"parameter {parameter.split('=')[0]} is", "give ")
add(("notebooks", "-p", "count=1", "-p", "count=2"), "count is given twice", "give one of them")
add(("notebooks", "-p", "profile=view", "--profile", "smoke"), "profile is given twice")
add(("notebooks", "-p", "profile=fast"), "unknown profile 'fast'")
add(("notebooks", "-p", "reference=tpu"), "'tpu'", "choose among")
add(("notebooks", "-p", "data={root}/missing"), "missing", "does not exist")
for given in (("-p", "count=1"), ("--profile", "quick"), ("--device", "cpu"), ("--seeds", "3")):
    add(("notebooks", "--refresh", *given), "--refresh", "leave it out")

# Figures.
for artefact, out, *named in (
    ("mbs/table9", "x.svg", "'mbs/table9'", "mbs/figure3"), ("mbs", "x.svg", "whole paper"),
    ("mbs/table2", "x.svg", "has no figure", "mbs/figure3"), ("mbs/figure3", "x.gif", "'gif'"),
    ("mbs/figure3", "x", "names no format", "svg, pdf or"),
    ("mbs/figure3", "/proc/no/x.svg", "cannot be written", "/proc/no"),
):  # fmt: skip
    add(("figure", artefact, "--out", out), *named)
add(("figure", "mbs/figure3", "--profile", "paper", "--out", "x.svg"), "run mbs/figure3")

# Datasets that cannot be read, and caches that cannot be written.
for content in ("file", "folder", "fifo", "loop"):
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
    notebook["cells"][0]["source"] += "\nratio: float = 0.5  # of it\nswitch: bool = False  # on"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    store = RecordStore(root / "results" / "local" / "smoke")
    store.write(make_record(config={"mini_batch": 16}))
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
    "empty": lambda good: b"",
    "truncated": lambda good: good[: len(good) // 2],
    "Latin-1": lambda good: good.replace(b'"timeline"', b'"\xe9"'),
    "UTF-16": lambda good: good.decode().encode("utf-16"),
    "a seed of 65 bits": lambda good: changed(good, seed=2**64),
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
    content = json.loads(good) | fields
    return json.dumps({name: v for name, v in content.items() if v is not ...}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RECORDS, *PLACES])
def test_what_is_no_record_stops_no_status_and_is_not_overwritten(
    run, results_folder, monkeypatch, make_record, kind
):
    monkeypatch.setenv("REPRO_RESULTS", str(results_folder))  # the fixture `run` has set its own
    paper = load_paper("mbs")
    runs = paper.artefacts["figure2"].runs("smoke", arguments.choose_datasets(paper, "smoke"))
    (step,) = running._steps(paper, runs, running.Setting("smoke", "cpu"))
    store = local_store("smoke")
    good = make_record("timeline", key=step.key, config=step.run.config)
    path = store.write(good)
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
    assert written.read_bytes() == before
    assert all(read_record(path) for path in files)
