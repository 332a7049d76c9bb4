"""The engine with real processes. Each run takes seconds, for its processes import torch."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainings
from trainings import make_data, make_plan, same, train

ray = pytest.importorskip("ray")

from repro.dualbatch import CheckpointError, NonFiniteError, own_cluster  # noqa: E402
from repro.dualbatch.cluster import SERVER_NAME, ClusterError, connected  # noqa: E402
from repro.measure import load_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Ray leaves files and sockets of the processes that it started open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
]
LIMIT_S = 300  # a test that takes longer hangs: ten times what a busy machine needs
IMAGES, LABELS = make_data()


@pytest.fixture(autouse=True)
def limit():
    """End a test that hangs, wherever it waits."""

    def stop(*arguments):
        raise TimeoutError(f"the test takes more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster():
    """A cluster for all tests of this module; the engine uses a connection that is there."""
    # Its processes do not have this folder on their path.
    ray.cloudpickle.register_pickle_by_value(trainings)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    before = dict(os.environ)
    with connected(None, {"CPU": 16, "GPU": 0}, 0):  # in name
        yield
    # The run's token does not stay behind.
    assert {k: v for k, v in os.environ.items() if "AUTH" in k} == {
        k: v for k, v in before.items() if "AUTH" in k
    }
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.unregister_pickle_by_value(trainings)


@pytest.fixture
def clean(cluster):
    """Remove the server of a training that failed."""
    yield
    try:
        ray.kill(server())
    except ValueError:
        return


def server():
    return ray.get_actor(SERVER_NAME, namespace=f"repro-{os.getpid()}")


def wait_until_gone():
    """Return once no server is there; Ray takes seconds on a busy machine, `limit` ends it."""
    while True:
        try:
            server()
        except ValueError as error:
            assert "Failed to look up actor" in str(error)
            return
        time.sleep(0.1)


def status():
    return ray.get(server().status.remote())


def slow_data(share):
    """The data, in a tenth of a second or more for each share."""
    for index in share.indices.split(share.batch_size):
        time.sleep(0.03)
        yield IMAGES[index], LABELS[index]


def run(**options):
    """Train on the cluster with one worker of each kind, and look at what every run must keep."""
    given = {"plan": make_plan(1, 1), "engine": "ray"} | options
    result = train(**given)
    plan, count = given["plan"], given.get("count", 4)
    shares = [(worker, iteration) for worker in range(plan.n) for iteration in range(count)]
    assert sorted((c.worker, c.iteration) for c in result.log) == shares
    assert [c.number for c in result.log] == list(range(plan.n * count))
    assert [entry.epoch for entry in result.history] == list(range(1, count + 1))
    times = [c.time_s for c in result.log]
    assert times == sorted(times)
    assert result.engine == "ray" and result.virtual_time_s != result.virtual_time_s
    assert result.wall_time_s == times[-1] > 0
    return result


def follow(result, **options):
    given = {"plan": make_plan(1, 1)} | options
    return train(follow=result.log, **given)


HEAD = """
    import os, sys, time
    sys.path.insert(0, {folder!r})
    import torch, trainings
    from repro.dualbatch.cluster import ClusterError

    torch.set_num_threads(1)
    plan = trainings.make_plan(1, 1)
    start = []
"""
TAIL = """
    except ClusterError as error:
        print("ClusterError", int(time.monotonic() - start[0]), error)
    sys.stdout.flush()
    os._exit(0)
"""
NO_CLUSTER = """
    try:
        start.append(time.monotonic())
        trainings.train(plan, engine="ray", address="127.0.0.1:9")
"""
KILL_ALL = """
    import psutil, ray
    from repro.dualbatch import cluster

    ray.cloudpickle.register_pickle_by_value(trainings)
    cluster.CHECK_S = 2.0  # for a quicker test; 5 else

    def kill(entry):
        # Nothing listens for other machines, and nothing was written to the home folder.
        addresses = [
            (process.name(), connection.laddr.ip.removeprefix("::ffff:"))
            for process in psutil.Process().children(recursive=True)
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN"
        ]
        assert len(addresses) > 5 and {ip for _, ip in addresses} == {"127.0.0.1"}, addresses
        # All processes of this driver's own cluster, and no others'.
        if entry.epoch == 1:
            processes = psutil.Process().children(recursive=True)
            names = [process.name() for process in processes]
            assert "gcs_server" in names and "raylet" in names, names
            assert sum("ray::" in " ".join(process.cmdline()) for process in processes) >= 3
            for process in processes:
                process.kill()
            start.append(time.monotonic())

    def data(share):
        images, labels = trainings.make_data()
        for index in share.indices.split(share.batch_size):
            time.sleep(0.05)
            yield images[index], labels[index]

    try:
        trainings.train(plan, engine="ray", data=data, on_epoch=kill, count=40)
"""


# Asks a cluster with the right token and with a wrong one, both as large as Ray's.
STRANGER = """
    import os, sys
    from ray._raylet import AuthenticationTokenLoader, GcsClient

    for token in (os.environ["RAY_AUTH_TOKEN"], "0" * 64):
        os.environ["RAY_AUTH_TOKEN"] = token
        AuthenticationTokenLoader.instance().reset_cache()
        try:
            print("let in", len(GcsClient(address=sys.argv[1]).get_all_node_info()))
        except Exception as error:
            print(type(error).__name__, error)
"""


def run_script(body, limit_s, **environment):
    """Return what a script of a process of its own prints: error, seconds, message."""
    script = HEAD.format(folder=str(Path(__file__).parent)) + body + TAIL
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    words = done.stdout.split(maxsplit=2)
    assert len(words) == 3, done.stdout + done.stderr[-3000:]
    return words


class TestWithoutACluster:
    def test_no_cluster_at_the_address(self):
        words = run_script(NO_CLUSTER, LIMIT_S - 5)
        assert words[0] == "ClusterError"
        assert words[2].startswith("no Ray cluster at address '127.0.0.1:9' (")

    def test_damaged_checkpoint(self, tmp_path):
        path = tmp_path / "training.pt"
        path.write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match=r"cannot be read"):
            train(engine="ray", checkpoint=path)
        assert path.read_bytes() == b"nonsense"
        assert not ray.is_initialized()

    def test_no_loopback_interface(self, monkeypatch):
        def fail(*arguments):
            raise OSError("Cannot assign requested address")

        monkeypatch.setattr(own_cluster.socket, "create_server", fail)
        with pytest.raises(
            ClusterError, match=r"Ray does not start .*assign.*; it needs the loopb"
        ):
            train(engine="ray", plan=make_plan(1, 1))
        assert not ray.is_initialized()

    @pytest.mark.parametrize(
        "error", [Exception("timed out\nat last"), KeyError("x"), SystemExit(1)]
    )
    @pytest.mark.parametrize("address", [None, "auto"])
    def test_ray_fails_as_it_will(self, error, address, monkeypatch):
        def init(*arguments, **options):
            raise error

        monkeypatch.setattr(ray, "init", init)
        message = "Ray does not start .*second try" if address is None else "no Ray cluster at"
        with pytest.raises(ClusterError, match=rf"{message}") as caught:
            train(engine="ray", plan=make_plan(1, 1), address=address)
        assert f"({type(error).__name__}: " in str(caught.value)
        assert not ray.is_initialized()

    def test_a_model_that_is_shared_is_refused_before(self, monkeypatch):
        model = trainings.make_model()
        with pytest.raises(ValueError, match=r"shares tensors"):
            train(engine="ray", plan=make_plan(1, 1), model_fn=lambda: model)
        assert not ray.is_initialized()

    def test_unknown_option(self):
        with pytest.raises(TypeError, match=r"workers_per_gpu"):
            train(engine="ray", workers_per_gpu=4)


class OwnError(Exception):
    """Of a loss function."""


class KeywordError(Exception):
    def __init__(self, path, *, code):
        super().__init__(f"{path}: {code}")


class WordyError(Exception):
    def __init__(self, path):
        super().__init__(f"no file {path}")


class LockError(Exception):
    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()


class ArgumentlessError(Exception):
    def __init__(self, path, code):
        self.path = path

    def __str__(self):
        return f"of {self.path}"


FOREIGN = {
    "keyword": lambda: KeywordError("file.bin", code=7),
    "made anew with other words": lambda: WordyError("file.bin"),
    "a lock": lambda: LockError("file.bin"),
    "positional": lambda: ArgumentlessError("file.bin", 7),
}


def stepwise(parameters, lr):
    return torch.optim.SGD(parameters, 0.1)


class TestFailures:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_an_exception_that_does_not_cross_processes(self, name, clean):
        made = FOREIGN[name]()

        def data(share):
            raise FOREIGN[name]()

        kind, crosses = type(made), name == "positional"
        message = "file.bin" if crosses else rf"worker [01]: \S*{kind.__name__}: .* cannot be sent"
        with pytest.raises(kind if crosses else ClusterError, match=message) as caught:
            train(make_plan(1, 1), engine="ray", data=data)
        assert str(made) in str(caught.value)
        wait_until_gone()

    def test_a_loss_that_counts_in_an_attribute(self, clean):
        class Counting(torch.nn.CrossEntropyLoss):
            count = 0

            def forward(self, outputs, targets):
                self.count += 1
                return super().forward(outputs, targets) / self.count

        with pytest.raises(CheckpointError, match=r"replaced, and loss_fn.count changed as the tr"):
            train(make_plan(1, 1), engine="ray", loss_fn=Counting())

    def test_a_loss_that_on_epoch_changes(self, clean):
        scale = [1.0]

        def loss_fn(outputs, targets):
            return torch.nn.functional.cross_entropy(outputs, targets) * scale[0]

        with pytest.raises(CheckpointError, match=r"loss_fn.scale\[0\] changed in this process"):
            train(
                make_plan(1, 1),
                engine="ray",
                loss_fn=loss_fn,
                on_epoch=lambda entry: scale.__setitem__(0, 2.0),
            )

    @pytest.mark.exhaustive
    def test_a_worker_that_dies_too_often(self, clean):
        def kill(entry):
            if entry.epoch == 1:
                os.kill(status()["workers"][1], signal.SIGKILL)

        with pytest.raises(ClusterError, match=r"worker 1 died 1 times; the last time: \w+Error: "):
            train(
                make_plan(1, 1),
                engine="ray",
                data=slow_data,
                on_epoch=kill,
                count=6,
                worker_restarts=0,
            )
        assert ray.is_initialized()

    def test_an_exception_of_the_loss_function(self, clean):
        def loss_fn(outputs, targets):
            raise OwnError("of a loss function")

        with pytest.raises(OwnError, match=r"^of a loss function$"):
            train(make_plan(1, 1), engine="ray", loss_fn=loss_fn)
        # failed stay, with the server's name, and no other run starts (ActorAlreadyExistsError).
        wait_until_gone()

    @pytest.mark.exhaustive
    def test_an_exception_of_the_model_function(self, clean):
        driver = os.getpid()

        def model_fn():
            if os.getpid() != driver:
                raise OwnError("of a model function")
            return trainings.make_model()

        with pytest.raises((OwnError, ClusterError), match=r"of a model function"):
            train(make_plan(1, 1), engine="ray", model_fn=model_fn, worker_restarts=0)

    @pytest.mark.exhaustive
    def test_a_loss_that_is_not_finite(self, clean, tmp_path):
        plan, ended, path = make_plan(1, 1), [], tmp_path / "training.pt"
        seen = []  # each process has its own

        def data(share):
            for step, index in enumerate(share.indices.split(share.batch_size), 1):
                images = IMAGES[index].clone()
                if share.batch_size == plan.large_batch and len(seen) == 1 and step == 2:
                    images[:] = float("inf")
                yield images, LABELS[index]
            seen.append(share.seed)

        # The other worker waits at the barrier.
        with pytest.raises(
            NonFiniteError, match=r"the loss is nan \(worker 1, epoch 2, step 2"
        ) as e:
            train(plan, engine="ray", data=data, sync="bsp", on_epoch=ended.append, checkpoint=path)
        assert (e.value.worker, e.value.epoch, e.value.step) == (1, 2, 2)
        # The driver may hear of the failure before it has told of the first epoch.
        assert [entry.epoch for entry in ended] in ([], [1]) and "\n" not in str(e.value)
        wait_until_gone()
        state = load_checkpoint(path)["server"]["state"]
        assert all(tensor.isfinite().all() for tensor in state.values())

    @pytest.mark.exhaustive
    def test_a_share_that_is_not_whole(self, clean):
        def data(share):
            yield from list(slow_data(share))[:-1]

        with pytest.raises(
            ValueError, match=r"data function ends after step \d+ .*epoch 1\), \d+ "
        ):
            train(make_plan(1, 1), engine="ray", data=data)


class TestStrangers:
    def test_only_this_machine_and_only_with_the_token(self, cluster):
        assert own_cluster.open_ports() == set()
        address = ray.get_runtime_context().gcs_address
        assert address.startswith("127.0.0.1:")
        command = [sys.executable, "-c", textwrap.dedent(STRANGER), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S - 5)
        friend, stranger = done.stdout.splitlines()
        assert friend == "let in 1"
        assert stranger.startswith("AuthenticationError") and "missing or incorrect" in stranger

    def test_a_port_for_others_is_seen(self):
        with socket.create_server(("0.0.0.0", 0)) as listening:
            port = listening.getsockname()[1]
            assert [one for one in own_cluster.open_ports() if one == f"0.0.0.0 port {port}"]
        with socket.create_server(("127.0.0.1", 0)):
            assert own_cluster.open_ports() == set()
        if socket.has_dualstack_ipv6():
            options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            with socket.create_server(("::ffff:127.0.0.1", 0), **options):
                assert own_cluster.open_ports() == set()


class TestRuns:
    # then these fail with ActorAlreadyExistsError.
    def test_follows_the_log_to_the_bit(self, cluster, tmp_path):
        ended = []
        path = tmp_path / "training.pt"
        result = run(
            checkpoint=path,
            on_epoch=ended.append,
            evaluate=lambda model: {"sum": float(model[6].bias.detach().sum())},
        )
        assert ended == result.history
        assert result.history[-1].metrics["sum"] == float(result.state["6.bias"].sum())
        followed = follow(result)
        assert same(followed.state, result.state)
        for one, other in zip(followed.log, result.log, strict=True):
            assert replace(one, loss=other.loss) == other
            assert one.loss == pytest.approx(other.loss)
        # The local engine takes up the checkpoint, which is at the end.
        again = train(make_plan(1, 1), checkpoint=path)
        assert same(again.state, result.state)
        # Wall time is measured; NaN differs from itself.
        assert repr(again.history) == repr(result.history)

    def test_bsp_is_the_local_engines_and_goes_on_from_its_checkpoint(self, cluster, tmp_path):
        whole = train(make_plan(1, 1), sync="bsp")
        path = tmp_path / "training.pt"

        def stop(entry):
            if entry.epoch == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            train(make_plan(1, 1), sync="bsp", checkpoint=path, on_epoch=stop)
        result = run(sync="bsp", checkpoint=path)
        assert same(result.state, whole.state)
        assert [(c.pulled, c.staleness) for c in result.log] == [
            (c.pulled, c.staleness) for c in whole.log
        ]
        losses = [entry.train_loss for entry in whole.history]
        assert [entry.train_loss for entry in result.history] == pytest.approx(losses)

    def test_a_loss_with_buffers_and_a_warning(self, cluster):
        class Centre(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("c", torch.zeros(3))

            def forward(self, outputs, targets):
                loss = torch.nn.functional.cross_entropy(outputs - self.c, targets)
                self.c.lerp_(outputs.detach().mean(0), 0.1)
                return loss

        options = {"sync": "bsp", "loss_fn": Centre(), "optimizer_fn": stepwise}
        with pytest.warns(UserWarning, match=r"same learning rate \(0.1\)") as said:
            result = run(**options)
        assert len(said) == 1
        with pytest.warns(UserWarning, match=r"same learning rate \(0.1\)"):
            assert same(train(make_plan(1, 1), **options).state, result.state)

    def test_a_worker_and_a_server_that_die(self, cluster):
        seen = []

        def kill(entry):
            seen.append(status())
            if entry.epoch == 2:
                os.kill(seen[-1]["workers"][0], signal.SIGKILL)
            if entry.epoch == 5:
                os.kill(seen[-1]["pid"], signal.SIGKILL)

        result = run(data=slow_data, on_epoch=kill, count=9)
        # Other processes did the rest. (A new server knows of no worker that has ended already.)
        pids = [{s["workers"][n] for s in seen if n in s["workers"]} for n in (0, 1)]
        assert [len(of_worker) for of_worker in pids] == [2, 1]
        assert seen[0]["pid"] == seen[4]["pid"] != seen[-1]["pid"]
        assert same(follow(result, count=9).state, result.state)

    def test_a_small_cluster(self, cluster):
        with pytest.raises(ClusterError, match=r"the workers need 18 CPU, the cluster has 16; add"):
            train(make_plan(1, 1), engine="ray", cpus_per_worker=9)
        with pytest.raises(ClusterError, match=r"the workers need 0.5 GPU, the cluster has 0;"):
            train(make_plan(1, 1), engine="ray", gpus_per_worker=0.25)


@pytest.mark.exhaustive
def test_a_cluster_that_dies_as_a_whole(tmp_path):
    home = tmp_path / "home"
    home.touch()  # a home folder in which nobody can write, not even root
    error, seconds, message = run_script(KILL_ALL, LIMIT_S - 5, HOME=str(home))
    assert error == "ClusterError" and int(seconds) < LIMIT_S - 5
    assert "run again with the same checkpoint=... to go on" in message
