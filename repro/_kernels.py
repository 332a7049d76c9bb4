"""Kernel clients that miss no reply: needs jupyter_client, a part of the notebook extra.

nbclient bypasses the event loop whenever a widget's output changes; a reply that arrives at that
moment wakes no waiter, and jupyter_client waits forever. Polling every second finds the reply.
"""

import time
from queue import Empty
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from traitlets import Type

POLL_S = 1.0


class PatientChannel(AsyncZMQSocketChannel):
    """A channel that polls its socket while it waits."""

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Return the next message; raise `Empty` after `timeout` seconds, never for None."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await super().get_msg(max(0.0, min(POLL_S, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    raise


class PatientClient(AsyncKernelClient):
    """A client with patient channels."""

    shell_channel_class = Type(PatientChannel)
    iopub_channel_class = Type(PatientChannel)


class PatientManager(AsyncKernelManager):
    """A kernel manager that makes patient clients."""

    client_class = f"{__name__}.PatientClient"
    client_factory = Type(PatientClient)
