"""Ray for one machine: on its loopback interface alone, with a token that only the run knows.

By itself Ray listens on all interfaces, and its token is one for all clusters of a user, in a file
of the home folder that others on the machine may read.
"""

import contextlib
import importlib
import ipaddress
import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from typing import Any

_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_MODE = "RAY_AUTH_MODE"


def check_loopback() -> None:
    """Raise an OSError where a process cannot reach another one on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Have Ray ask everyone for a token inside a ``with`` block: the user's own, or a new one."""
    before = {name: os.environ.get(name) for name in (_MODE, *_TOKENS)}
    os.environ[_MODE] = "token"
    if not any(before[name] for name in _TOKENS):
        os.environ[_TOKENS[0]] = secrets.token_hex(32)
    _read_environment()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _read_environment()


def _read_environment() -> None:
    # Ray reads mode and token once in a process. The mode goes first: its threads that are still
    # ending look for a token while it asks for one.
    raylet: Any = importlib.import_module("ray._raylet")
    with contextlib.suppress(AttributeError):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def start(ray: Any, **options: Any) -> None:
    """Start a cluster of this machine, and warn of ports that listen on other interfaces.

    Args:
        ray: The module.
        **options: For `ray.init`.
    """
    before = open_ports()
    with _on_loopback():
        ray.init(address="local", include_dashboard=False, **options)
    if found := sorted(open_ports() - before):
        warnings.warn(
            f"Ray {ray.__version__} listens on more than this machine's loopback interface, though "
            f"it asks for a token: {', '.join(found)}; close these ports to others, or take "
            "engine='local'",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray take 127.0.0.1 for its address, as it does on systems where it knows no clusters.

    `ray.init` puts another one in its place where it is given 127.0.0.1.
    """
    from ray._private import ray_constants

    name = "ENABLE_RAY_CLUSTER"
    before = getattr(ray_constants, name, None)
    setattr(ray_constants, name, False)
    try:
        yield
    finally:
        setattr(ray_constants, name, before)


def open_ports() -> set[str]:
    """Return where this process and those below it listen for others than this machine."""
    import psutil  # Ray brings its own

    found = set()
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to see
            connections = getattr(process, "net_connections", None) or process.connections
            for one in connections("tcp"):
                if one.status == psutil.CONN_LISTEN and not _is_loopback(one.laddr.ip):
                    found.add(f"{process.name()} at {one.laddr.ip} port {one.laddr.port}")
    return found


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return bool((getattr(found, "ipv4_mapped", None) or found).is_loopback)
