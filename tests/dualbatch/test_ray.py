"""The engine with real processes. Each run takes seconds, for its processes import torch."""

import ipaddress
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainings
from trainings import Centre, interrupt, make_data, make_plan, same, train

ray = pytest.importorskip("ray")

from repro.dualbatch import CheckpointError, ClusterError, Commit, cluster  # noqa: E402
from repro.dualbatch.cluster import connected  # noqa: E402
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
def started():
    """A cluster for all tests of this module; the engine uses a connection that is there."""
    # Its processes do not have this folder on their path.
    ray.cloudpickle.register_pickle_by_value(trainings)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    before = dict(os.environ)
    with ExitStack() as stack:
        stack.enter_context(connected(None, {"CPU": 16, "GPU": 0}, 0))  # in name
        yield
    # The run's token does not stay behind.
    now, old = ({k: e[k] for k in e if "AUTH" in k} for e in (os.environ, before))
    assert now == old
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.unregister_pickle_by_value(trainings)


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
    assert times == sorted(times) and math.isnan(result.history[-1].virtual_time_s)
    assert result.history[-1].wall_time_s >= times[-1] > 0
    return result


def bias(model):
    return {"sum": float(model[6].bias.detach().sum())}


def follow(result, **options):
    return train(make_plan(1, 1), follow=result.log, **options)


# A training whose cluster dies as a whole after its first epoch.
KILL_ALL = """
    import os, sys, time
    sys.path.insert(0, {folder!r})
    import psutil, ray, torch, trainings
    from repro.dualbatch import cluster

    torch.set_num_threads(1)
    ray.cloudpickle.register_pickle_by_value(trainings)
    cluster.CHECK_S = 2.0  # for a quicker test; 5 else

    def kill(entry):
        # All processes of this driver's own cluster, and no others'.
        for process in psutil.Process().children(recursive=True) if entry.epoch == 1 else ():
            process.kill()

    def data(share):
        images, labels = trainings.make_data()
        for index in share.indices.split(share.batch_size):
            time.sleep(0.05)
            yield images[index], labels[index]

    try:
        plan = trainings.make_plan(1, 1)
        trainings.train(plan, engine="ray", data=data, on_epoch=kill, count=40)
    except cluster.ClusterError as error:
        print("ClusterError", error)
    sys.stdout.flush()
    os._exit(0)
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


class TestWithoutACluster:
    def test_no_cluster_at_the_address(self):
        with pytest.raises(ClusterError, match=r"no Ray cluster at address '127.0.0.1:9'; start"):
            train(engine="ray", plan=make_plan(1, 1), address="127.0.0.1:9")

    @pytest.mark.parametrize("error", [Exception("timed out\nat last"), SystemExit(1)])
    @pytest.mark.parametrize("address", [None, "auto"])
    def test_ray_fails_as_it_will(self, error, address, monkeypatch):
        starts = []

        def init(*arguments, **options):
            starts.append(arguments)
            if len(starts) < 3:
                raise error

        monkeypatch.setattr(ray, "init", init)
        message = "Ray does not start .*tried twice" if address is None else "no Ray cluster at"
        with pytest.raises(ClusterError, match=rf"{message}") as caught:
            train(engine="ray", plan=make_plan(1, 1), address=address)
        assert f"({type(error).__name__}: " in str(caught.value)
        assert not ray.is_initialized() and len(starts) == (2 if address is None else 1)
        starts.pop()
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
        if address is None:  # a start that fails once is repeated
            with connected(None, {"CPU": 1, "GPU": 0}, 0):
                assert len(starts) == 3

    def test_a_node_that_answers_late_is_waited_for(self, monkeypatch):
        late = [RuntimeError("not registered"), RuntimeError("not registered")]

        def get_node(*given):
            if late:
                raise late.pop()

        monkeypatch.setattr(ray._private.services, "get_node", get_node)
        monkeypatch.setattr(ray, "init", lambda **_: ray._private.services.get_node("at", "node"))
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
        with connected(None, {"CPU": 1, "GPU": 0}, 0):
            assert not late


def test_tensors_of_all_types_cross_as_they_are(started):
    numbers = torch.arange(24.0).reshape(2, 3, 2, 2)
    types = torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool
    sent = {str(dtype): numbers.to(dtype) for dtype in types}
    sent |= {"none": numbers[:0], "number": numbers[1, 2, 1, 1], "view": numbers[:, 1:, ::2]}
    sent |= {"channels last": numbers.to(memory_format=torch.channels_last)}
    found = ray.get(ray.put(cluster._on_host({"inside": sent})))["inside"]
    for name, tensor in sent.items():
        got = found[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert got.tolist() == tensor.tolist(), name
        got.zero_()  # it may be written to
    assert found["channels last"].is_contiguous(memory_format=torch.channels_last)


class Holder:
    """Takes room on the cluster."""

    def there(self):
        return True


class OwnError(Exception):
    """Of a function."""


class WordyError(Exception):
    def __init__(self, path):
        super().__init__(f"no file {path}")


FOREIGN = {"reworded": lambda: WordyError("file.bin"), "plain": lambda: OwnError("file.bin", 7)}


class TestFailures:
    def test_an_interrupted_worker(self, started):
        def data(share):
            raise KeyboardInterrupt

        with pytest.raises(ClusterError, match=r"worker [01] was interrupted; run again with"):
            train(make_plan(1, 1), engine="ray", data=data)

    @pytest.mark.parametrize("name", FOREIGN)
    def test_an_exception_that_does_not_cross_processes(self, name, started):
        made = FOREIGN[name]()

        def data(share):
            raise FOREIGN[name]()

        kind, crosses = type(made), name == "plain"
        message = "file.bin" if crosses else rf"worker [01]: \S*{kind.__name__}: .* cannot be sent"
        with pytest.raises(kind if crosses else ClusterError, match=message) as caught:
            train(make_plan(1, 1), engine="ray", data=data)
        assert str(made) in str(caught.value)

    def test_what_a_loss_keeps_elsewhere(self, started):
        with pytest.raises(CheckpointError, match=r"replaced, and loss_fn.count changed as the tr"):
            train(make_plan(1, 1), engine="ray", loss_fn=Centre(elsewhere=True))

    def test_what_changes_in_the_driver_alone(self, started):
        scale = [1.0]

        def loss_fn(outputs, targets):
            return torch.nn.functional.cross_entropy(outputs, targets) * scale[0]

        with pytest.raises(CheckpointError, match=r"loss_fn.scale\[0\] changed in this process"):
            given = {"loss_fn": loss_fn, "on_epoch": lambda entry: scale.__setitem__(0, 2.0)}
            train(make_plan(1, 1), engine="ray", **given)

    def test_a_worker_that_dies_too_often(self, started, monkeypatch):
        monkeypatch.setattr(cluster, "RESTARTS", 0)
        options = {"data": lambda share: os.kill(os.getpid(), signal.SIGKILL)}
        with pytest.raises(ClusterError, match=r"a worker has died too often, or .*\(\w+Error"):
            train(make_plan(1, 1), engine="ray", **options)
        assert ray.is_initialized()


def open_ports():
    """Addresses at which this process and its descendants listen for other machines."""
    import psutil

    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            for connection in process.net_connections("tcp"):
                host = ipaddress.ip_address(connection.laddr.ip or "::")
                host = getattr(host, "ipv4_mapped", None) or host
                if connection.status == psutil.CONN_LISTEN and not host.is_loopback:
                    found.add(f"{host} port {connection.laddr.port}")
    return found


class TestStrangers:
    def test_only_this_machine_and_only_with_the_token(self, started):
        assert open_ports() == set()
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
            assert [one for one in open_ports() if one == f"0.0.0.0 port {port}"]
        with socket.create_server(("127.0.0.1", 0)):
            assert open_ports() == set()
        if socket.has_dualstack_ipv6():
            options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            with socket.create_server(("::ffff:127.0.0.1", 0), **options):
                assert open_ports() == set()


class TestRuns:
    def test_goes_on_from_a_checkpoint_and_is_followed_to_the_bit(self, started, tmp_path):
        path, ended = tmp_path / "training.pt", []
        interrupt(path, 2, plan=make_plan(1, 1), evaluate=bias)  # on the local engine
        server = load_checkpoint(path)["server"]
        assert server["pulls"]  # shares that were in work, and are done again
        result = run(checkpoint=path, on_epoch=ended.append, evaluate=bias)
        assert repr(result.log[:4]) == repr([Commit(**entry) for entry in server["log"]])
        assert ended == result.history[2:]
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

    def test_bsp_is_the_local_engines(self, started):
        options = {"sync": "bsp", "loss_fn": Centre()}
        whole, result = train(make_plan(1, 1), **options), run(**options)
        assert same(result.state, whole.state)
        ours, theirs = ([(c.pulled, c.staleness) for c in one.log] for one in (result, whole))
        assert ours == theirs
        losses = [entry.train_loss for entry in whole.history]
        assert [entry.train_loss for entry in result.history] == pytest.approx(losses)

    def test_a_worker_that_dies_is_replaced(self, started, tmp_path):
        mark = tmp_path / "killed"

        def data(share):
            if share.batch_size < 10 and len(seen) == 2 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(share.seed)
            for index in share.indices.split(share.batch_size):
                time.sleep(0.03)  # so that the other worker goes on meanwhile
                yield IMAGES[index], LABELS[index]

        seen = []  # each process has its own
        result = run(data=data, count=6)
        assert mark.exists() and same(follow(result, count=6).state, result.state)

    def test_a_small_cluster(self, started):
        with pytest.raises(ClusterError, match=r"the workers need 18 CPU, the cluster has 16; add"):
            train(make_plan(1, 1), engine="ray", cpus_per_worker=9)

    def test_a_cluster_without_room(self, started, monkeypatch):
        monkeypatch.setattr(cluster, "PLACE_S", 5.0)
        holder = ray.remote(Holder).options(num_cpus=15).remote()
        ray.get(holder.there.remote())
        try:
            with pytest.raises(ClusterError, match=r"no machine has had 1 CPU.* 5 s for worker"):
                train(make_plan(1, 1), engine="ray")
        finally:
            ray.kill(holder)

    def test_a_worker_that_dies_and_finds_no_room(self, started, monkeypatch, tmp_path):
        kind, mark = ray.remote(Holder), tmp_path / "to be killed"
        holders = [kind.options(num_cpus=14).remote()]
        ray.get(holders[0].there.remote())

        def take_room(entry):
            if entry.epoch == 1:
                monkeypatch.setattr(cluster, "PLACE_S", 5.0)
                holders.append(kind.options(num_cpus=1).remote())  # waits for what ends
                time.sleep(1)
                mark.touch()

        def data(share):
            with suppress(FileNotFoundError):
                mark.unlink()  # by one worker
                os.kill(os.getpid(), signal.SIGKILL)
            for index in share.indices.split(share.batch_size):
                time.sleep(0.03)
                yield IMAGES[index], LABELS[index]

        try:
            with pytest.raises(ClusterError, match=r"no machine has had 1 CPU.* worker [01];"):
                train(make_plan(1, 1), engine="ray", data=data, on_epoch=take_room, count=40)
        finally:
            for holder in holders:
                ray.kill(holder)


def test_a_cluster_that_dies_as_a_whole(tmp_path):
    home = tmp_path / "home"
    home.touch()  # a home folder in which nobody can write, not even root
    script = textwrap.dedent(KILL_ALL.format(folder=str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 5,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(home)},
    )
    assert done.stdout.startswith("ClusterError"), done.stdout + done.stderr[-3000:]
    assert "run again with the same checkpoint=... to go on" in done.stdout
