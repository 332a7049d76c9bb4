"""Ray for one machine: on its loopback interface alone, with a token that only the run knows.

By itself Ray listens on all interfaces, and its token is one for all clusters of a user, in a file
of the home folder that others on the machine may read.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
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
    import ray._raylet

    raylet: Any = ray._raylet
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
    if exposed := sorted(open_ports() - before):
        warnings.warn(
            f"Ray {ray.__version__} listens on more than this machine's loopback interface, though "
            f"it asks for a token: {', '.join(exposed)}; close these ports to others, or take "
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
    """Return where this process and those below it listen for others than this machine.

    On systems without Linux's /proc there is nothing to be seen; there Ray keeps to the loopback
    interface by itself.
    """
    listening = {}  # by the socket's number in the system
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            table = Path(f"/proc/self/net/{name}").read_text(encoding="utf-8")
            for fields in map(str.split, table.splitlines()[1:]):
                if fields[3] == "0A" and not (address := _address(fields[1]))[0].is_loopback:
                    listening[f"socket:[{fields[9]}]"] = f"{address[0]} port {address[1]}"
    addresses, pids = set(), [os.getpid()]
    for pid in pids:  # which grows
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text(encoding="utf-8").split())
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    addresses.add(listening.get(str(file.readlink())))
    return {entry for entry in addresses if entry is not None}


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return address and port of an entry of /proc/net/tcp, words in the machine's byte order."""
    host, port = text.split(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address, int(port, 16)
