"""The command ``parallel`` under torchrun: it trains, is killed, names who, and goes on."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import joined
import pytest
import torch

from repro.adaptive import NoLoopbackError, load_checkpoint, save_checkpoint
from repro.experiments import load_paper
from repro.experiments.adaptive import nodes, scaling, settings, worker
from repro.experiments.query import find_source, results_of
from repro.measure import describe_device

pytestmark = pytest.mark.slow
PLAIN = [sys.executable, "-m"]
TORCHRUN = [*PLAIN, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
# Growing batches, so that K, the rate and θ have to be gone on from as well.
OPTIONS = [
    "repro",
    "parallel",
    "--profile",
    "smoke",
    "--device",
    "cpu",
    "--task",
    "CIFAR",
    "--strategy",
    "theta",
    "--epochs",
    "24",
]
EPOCHS = int(OPTIONS[-1])
LINE = re.compile(
    r"epoch (\d+): batch (\d+) on (\d) process\w*, rate [\d.e-]+, cost [\d.]+, θ -?[\d.e-]+, "
    r"K (?:\d+|–), accuracy [\d.]+, (\d+) updates in [\d.]+ s \(communication [\d.]+, "
    r"blocked [\d.]+\)"
)


def environment():
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    left = {name: value for name, value in os.environ.items() if name != "REPRO_DATA"}
    return left | own


def launched(command, log, variables=None):
    """Start a command in a session of its own; what it says goes to a file."""
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment() | (variables or {}),
            start_new_session=True,
        )


def descendants(pid):
    """Return the processes below one, by the parent that each names in /proc."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def ears(pid):
    """Return the addresses that a process listens on, as /proc has them."""
    sockets, found = set(), []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(link.readlink()))
        for name in ("tcp", "tcp6"):
            for line in (
                Path(f"/proc/{pid}/net/{name}").read_text(encoding="utf-8").splitlines()[1:]
            ):
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.append(fields[1].rpartition(":")[0])
    return found


def process_of_rank(pid, rank):
    for own in descendants(pid):
        with contextlib.suppress(OSError):
            variables = (Path("/proc") / str(own) / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return own
    return None


def until(condition, seconds, process):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        assert process.poll() is None, "ended early"
        time.sleep(0.02)


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command(launcher, checkpoint):
    return [*launcher, *OPTIONS, "--checkpoint", str(checkpoint)]


def train(rank, port, folder, checkpoint, elsewhere):
    """Train in one of two processes that no torchrun started; what it says goes to a file."""
    from repro.experiments.adaptive import parallel

    os.environ |= environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with (Path(folder) / f"{rank}.log").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    if elsewhere and rank == 1:  # whose disk has no checkpoint

        def refuse(path):
            raise AssertionError("rank 1 reads")

        parallel.load_checkpoint = refuse
        parallel.Path = lambda name: Path("/nowhere") / name.lstrip("/")
    parallel.run_parallel(
        *("CIFAR", "theta", "all_to_all", "smoke", "cpu", None, [], 0, EPOCHS),
        str(checkpoint),
        None,
    )


def measure(rank, port, folder):
    """Record steps in one of two processes that no torchrun started."""
    from repro.experiments.adaptive import parallel

    os.environ |= environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    os.environ["REPRO_RESULTS"] = folder
    torch.set_num_threads(1)
    sys.argv = ["repro", "parallel", "--record"]
    written = parallel.record_steps("DIV2K", "all_to_all", "smoke", "cpu")
    torch.save(str(written), Path(folder) / f"{rank}.pt")


def trained(context, folder, checkpoint, elsewhere=False):
    """Train in two processes; return what the first of them said."""
    codes = joined.run(context, train, folder, checkpoint, elsewhere)
    logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], logs
    return logs[0]


@pytest.fixture(scope="module")
def context():
    return joined.forked("repro.experiments.adaptive.parallel", "sklearn.datasets")


@pytest.fixture(scope="module")
def runs(context, tmp_path_factory):
    """An uninterrupted run, one whose rank 1 is killed, and one that goes on from there."""
    folder = tmp_path_factory.mktemp("parallel")
    whole = trained(context, folder, folder / "whole.pt")

    killed = launched(command(TORCHRUN, folder / "cut.pt"), folder / "killed.log")
    try:
        until(lambda: "connected" in (folder / "killed.log").read_text(), 120, killed)
        victim = process_of_rank(killed.pid, 1)
        assert victim is not None and victim != killed.pid
        until(lambda: len(LINE.findall((folder / "killed.log").read_text())) >= 3, 60, killed)
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        code = killed.wait(60)
        took = time.monotonic() - start
    finally:
        stop(killed)
    saved = load_checkpoint(folder / "cut.pt")

    # Killed once more on its way; torchrun itself starts it again.
    restarting = [*PLAIN, "torch.distributed.run", *worker.meeting_in(folder / "store")]
    restarting += ["--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    resumed = launched(
        command(restarting, folder / "cut.pt"), folder / "resumed.log", worker.OWN_STORE
    )
    try:
        until(lambda: "connected" in (folder / "resumed.log").read_text(), 120, resumed)
        first = process_of_rank(resumed.pid, 0)
        listening = [a for own in (resumed.pid, *descendants(resumed.pid)) for a in ears(own)]
        until(lambda: len(LINE.findall((folder / "resumed.log").read_text())) >= 3, 60, resumed)
        os.kill(first, signal.SIGKILL)
        assert resumed.wait(120) == 0, (folder / "resumed.log").read_text()
    finally:
        stop(resumed)
    logs = {name: (folder / f"{name}.log").read_text() for name in ("killed", "resumed")}
    return {
        "logs": logs | {"whole": whole},
        "code": code,
        "took": took,
        "saved": saved,
        "victim": victim,
        "listening": listening,
        "whole": load_checkpoint(folder / "whole.pt"),
        "cut": load_checkpoint(folder / "cut.pt"),
    }


def equal(first, second):
    """Compare nested states bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@pytest.mark.exhaustive
def test_a_line_for_every_epoch_from_one_process(runs):
    found = LINE.findall(runs["logs"]["whole"])
    assert [int(number) for number, *_ in found] == list(range(1, EPOCHS + 1))
    history = runs["whole"]["history"]
    assert [int(size) for _, size, *_ in found] == history["batch_size"]
    assert [int(count) for *_, count in found] == history["updates"]
    assert {processes for _, _, processes, _ in found} == {"2"}
    assert history["batch_size"][-1] > history["batch_size"][0]  # it grew


@pytest.mark.exhaustive
def test_the_loss_of_a_process_ends_the_job_and_names_it(runs):
    assert runs["code"] != 0 and runs["took"] < 60
    log = runs["logs"]["killed"]
    assert re.search(r"rank\s*: 1 ", log) and "SIGKILL" in log
    assert f"pid: {runs['victim']}" in log


@pytest.mark.exhaustive
def test_the_same_command_goes_on(runs):
    after = runs["saved"]["history"]["train_cost"]
    assert 3 <= len(after) < EPOCHS and runs["saved"]["going"]
    log = runs["logs"]["resumed"]
    assert f"going on after epoch {len(after)} from" in log
    numbers = [int(number) for number, *_ in LINE.findall(log)]
    # A line may be missing where the process was killed between checkpoint and line.
    assert (numbers[0], numbers[-1]) == (len(after) + 1, EPOCHS)
    assert numbers == sorted(set(numbers)) and len(numbers) >= EPOCHS - len(after) - 1


@pytest.mark.exhaustive
def test_torchrun_starts_it_again_by_itself(runs):
    assert len(re.findall(r"going on after epoch \d+ from", runs["logs"]["resumed"])) == 2


@pytest.mark.exhaustive
def test_the_first_line_says_where_processes_listen(runs):
    one = "2 processes, connected by gloo over lo"
    told = rf"{one}; torchrun's store listens on every interface, port \d+: keep that port closed"
    assert re.search(
        told, next(line for line in runs["logs"]["killed"].splitlines() if one in line)
    )
    lines = [line for line in runs["logs"]["resumed"].splitlines() if line.startswith(one)]
    assert lines == [one] * 2  # and again after the restart
    # 127.0.0.1, in memory's order, also as an address of IPv6
    assert set(runs["listening"]) == {"0100007F"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["model", "optimizer", "controller", "stop", "diverged", "going"])
def test_it_ends_as_if_never_interrupted(runs, part):
    assert equal(runs["cut"][part], runs["whole"][part])


@pytest.mark.exhaustive
def test_its_history_too(runs):
    timed = ("time_s", "control_s")
    cut, whole = (
        {name: values for name, values in runs[kind]["history"].items() if name not in timed}
        for kind in ("cut", "whole")
    )
    assert cut == whole
    assert len(runs["cut"]["spent"]) == EPOCHS


def in_a_process(*options):
    return subprocess.run(
        [*PLAIN, "repro", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )


@pytest.fixture
def here(capfd, monkeypatch):
    """Run the command line in this process; return its exit code and what it said."""
    from repro.__main__ import main

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["repro", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, *capfd.readouterr()

    return call


SMOKE = ("parallel", "--profile", "smoke", "--device", "cpu")


def test_one_process_needs_no_torchrun(tmp_path, here):
    checkpoint = tmp_path / "one.pt"
    options = (
        *SMOKE,
        "--task",
        "Phantom",
        "--micro-batch",
        "2",
        "--epochs",
        "2",
        "--checkpoint",
        str(checkpoint),
    )
    code, out, said = here(*options)
    assert (code, said) == (0, "")
    lines = out.strip().splitlines()
    assert len(lines) == 2 and all("on 1 process," in line and "psnr" in line for line in lines)
    told = (
        f"going on after epoch 2 from {checkpoint}\nwhich is complete: nothing is left to train\n"
    )
    assert here(*options) == (0, told, "")
    code, _, said = here(*options, "--seed", "1")
    assert code == 2 and said.count("\n") == 1
    assert f"error: {checkpoint} is the checkpoint of another training" in said
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    code, _, said = here(*options)
    assert code == 2 and said.count("\n") == 1 and "is damaged, or no checkpoint" in said


def test_a_training_that_decays_on_saturation(here):
    """What one process knows beside `experiments.train`, all know."""
    options = (*SMOKE, "--task", "Phantom", "--strategy", "decay", "--epochs", "1")
    code, out, said = here(*options)
    assert (code, said) == (0, "") and out.startswith("epoch 1: ")


BAD = {
    "task": (["--task", "MNIST"], "unknown task 'MNIST'; choose CIFAR, DIV2K, Phantom"),
    "strategy": (["--strategy", "mine"], "unknown strategy 'mine'; choose best, linear"),
    "averaging": (["--averaging", "mean"], "unknown averaging 'mean'; choose allreduce"),
    "epochs": (["--epochs", "0"], "--epochs is 0; give 1 to"),
    "micro-batch": (["--micro-batch", "-1"], "--micro-batch is -1; give 1 to"),
    "profile": (["--profile", "tiny"], "unknown profile 'tiny'"),
    "dataset": (["--dataset", "imagenet"], "serves no experiment of adaptive"),
    "data": (["--data", "/nowhere/at/all"], "does not exist"),
    "option": (["--colour", "red"], "No such option"),
}


@pytest.mark.thorough
def test_bad_options_end_a_process_with_one_line():
    ended = in_a_process(*SMOKE, "--task", "MNIST")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("error: unknown task 'MNIST'; choose CIFAR, DIV2K, Phantom")


@pytest.mark.parametrize("kind", BAD)
def test_bad_options(kind, here):
    options, message = BAD[kind]
    code, out, said = here(*SMOKE, *options)
    assert (code, out) == (2, "")
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_negative_seed(here):
    code, _, said = here(*SMOKE, "--epochs", "1", "--seed", "-1")
    assert code == 2 and "seed" in said and said.count("\n") == 1


@pytest.mark.exhaustive
def test_a_worker_that_fails_is_named():
    job = settings.parallel("smoke").config | {"jobs": {"CIFAR": {}}, "seed": 0}
    with pytest.raises(RuntimeError, match=r"(?s)2 processes ended with 1:.*rank\s*: \d") as caught:
        worker.launch(job, 2)
    assert "KeyError" in str(caught.value)


def test_without_loopback_nothing_is_started(monkeypatch):
    def unreachable(*given, **options):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(NoLoopbackError, match=r"Network is unreachable.*bring the loopback inter"):
        worker.launch({}, 2)


@pytest.mark.thorough
def test_a_machine_without_loopback():
    """In a network of its own, whose loopback interface is down."""
    script = "from repro.experiments.adaptive import worker; worker.launch({}, 2)"
    apart = ["unshare", "--map-root-user", "--net"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*apart, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs unshare and the right to a network of one's own")
    ended = subprocess.run(
        [*apart, sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1 and "NoLoopbackError: this machine cannot connect" in ended.stderr


def test_a_launch_ends_at_its_limit_whatever_hangs(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(worker, "GRACE_S", 0.2)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ended after 0.2 s"):
        worker.launch({}, 2, timeout_s=0.2)
    assert time.monotonic() - start < 20


def test_the_measurement_is_of_cpus_whatever_the_device(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "launch", lambda *given: asked.append(given) or {"CIFAR": {}})
    for profile in ("quick", "paper"):
        config = settings.parallel(profile).config
        found = worker.parallel(config, 3, None, "cuda").metrics
        assert asked.pop() == ({**config, "seed": 3}, 2)
        assert found == {"tasks": {"CIFAR": {}}, "device": describe_device("cpu")["name"]}


@pytest.mark.exhaustive
def test_the_first_process_reads_the_checkpoint_for_all(context, runs, tmp_path):
    """The other's folder has none, as another machine's disk."""
    path = tmp_path / "saved.pt"
    # What was written when the process was killed.
    save_checkpoint(path, runs["saved"])
    said = trained(context, tmp_path, path, elsewhere=True)
    done = len(runs["saved"]["history"]["train_cost"])
    assert f"going on after epoch {done} from {path}" in said
    assert equal(load_checkpoint(path)["model"], runs["whole"]["model"])


@pytest.mark.thorough
def test_steps_of_a_job_are_recorded_and_shown(context, tmp_path, monkeypatch):
    written, of_the_other = joined.both(context, measure, tmp_path)
    assert of_the_other == "None" and Path(written).exists()
    monkeypatch.setenv("REPRO_RESULTS", str(tmp_path))
    paper = load_paper("adaptive")
    source = find_source(paper, "smoke", "local")
    results = results_of(paper.artefacts["figure7"], source)
    (record,) = results.recorded
    assert not results.records and not results_of(paper.artefacts["figure1"], source).recorded
    assert record.command == "torchrun --nproc-per-node 2 --nnodes 1 -m repro parallel --record"
    found, config = record.metrics, record.config
    assert (found["processes"], found["machines"], config["processes"]) == (2, 1, 2)
    sizes = [settings.batch("smoke", "DIV2K", n) for n in (16, 32, 64, 128, 256)]
    steps = {(step["averaging"], step["batch"]): step for step in found["steps"]}
    assert set(steps) == {(way, n) for way in ("none", "all_to_all") for n in sizes}
    for (way, _), step in steps.items():
        assert step["processes"] == (1 if way == "none" else 2)
        parts = step["computation_s"] + step["blocked_s"]
        assert parts == pytest.approx(step["total_s"], rel=0.5) and step["blocked_s"] >= 0
        assert (step["communication_s"] > 0) == (way != "none")
        assert len(step["samples_s"]) == config["repeats"]
    assert found["buckets"] > 1 and {n for _, n, _ in found["messages"]["all_to_all"]} == {2}
    row = scaling.table(results, "DIV2K")[0]
    assert row["recorded jobs"].endswith(" on 2")
    assert "RECORDED" in scaling.figure(results, "DIV2K").axes[-1].get_title()


def test_one_process_on_an_accelerator_is_timed_by_its_events(monkeypatch):
    """Its host's clock says nothing: here it stands still, and the device's events do not."""
    config = settings.recorded_job("smoke", "CIFAR", "all_to_all", 1, accelerated=True).config
    config |= {"sizes": config["sizes"][:1], "repeats": 2}
    ticks = iter(range(1000))
    monkeypatch.setattr(nodes, "_timed", lambda device, work: work() or 4.0 * (1 + next(ticks)))
    (step,) = nodes._steps(config, 0, "cpu", ["none"])
    assert step["samples_s"] == [2.0, 3.0]  # seconds of four steps; the first turn is a warm-up


def test_what_a_record_takes_no_notice_of_is_refused(here):
    options = ("--epochs 3", "--checkpoint x.pt", "--dataset digits", "--strategy best", "--seed 3")
    for option in (given.split() for given in options):
        code, out, said = here(*SMOKE, "--record", *option)
        assert (code, out) == (2, "") and said.count("\n") == 1
        assert f"takes no {option[0]}" in said
    code, _, said = here(*SMOKE, "--record", "--task", "MNIST")
    assert code == 2 and "unknown task 'MNIST'" in said
