"""Ray for one machine: only on its loopback interface, with a token that only the run knows.

By default Ray listens on all interfaces, and uses one token for all clusters of a user, in a file
of the home folder that others on the machine may read.
"""

import contextlib
import ipaddress
import os
import secrets
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Make Ray require a new token inside a ``with`` block."""
    names = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
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
    # Ray reads mode and token once per process. The mode is reset first: while it requires a token,
    # Ray's ending threads look for one.
    import ray._raylet

    raylet: Any = ray._raylet
    with contextlib.suppress(AttributeError):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def start(ray: Any, **options: Any) -> None:
    """Start a cluster on this machine, and warn of ports that listen on other interfaces."""
    from ray._private import ray_constants

    before = open_ports()
    # Ray takes 127.0.0.1 where it has no clusters; `ray.init` would replace it as an argument.
    with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False, create=True):
        ray.init(address="local", include_dashboard=False, **options)
    if exposed := sorted(open_ports() - before):
        warnings.warn(
            f"Ray {ray.__version__} listens on more than this machine's loopback interface, though "
            f"it asks for a token: {', '.join(exposed)}; close these ports to others, or take "
            "engine='local'",
            RuntimeWarning,
            stacklevel=2,
        )


def open_ports() -> set[str]:
    """Addresses at which this process and its descendants listen for other machines."""
    import psutil  # of the cluster extra

    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended
            for connection in process.net_connections("tcp"):
                host = ipaddress.ip_address(connection.laddr.ip or "::")
                host = getattr(host, "ipv4_mapped", None) or host
                if connection.status == psutil.CONN_LISTEN and not host.is_loopback:
                    found.add(f"{host} port {connection.laddr.port}")
    return found
