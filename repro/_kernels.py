"""Start kernels whose replies are not missed; needs jupyter_client, part of the notebook extra.

nbclient sends a message to the kernel whenever a widget's output changes, through jupyter_client,
which sends past the event loop. A reply that arrives in that moment then wakes nobody, and the
client waits for it forever. Asking again every second finds it.
"""

from queue import Empty
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from traitlets import Type

POLL_S = 1.0


class PatientChannel(AsyncZMQSocketChannel):
    """A channel that asks its socket again while it waits."""

    async def get_msg(  # type: ignore[override]
        self, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the next message.

        Raises:
            Empty: None came within `timeout` seconds; None waits for ever.
        """
        left = timeout
        while True:
            turn = POLL_S if left is None else min(left, POLL_S)
            try:
                return await super().get_msg(turn)
            except Empty:
                if left is not None:
                    left -= turn
                    if left <= 0:
                        raise


class PatientClient(AsyncKernelClient):
    """A client with patient channels."""

    shell_channel_class = Type(PatientChannel)
    iopub_channel_class = Type(PatientChannel)


class PatientManager(AsyncKernelManager):
    """A kernel manager that makes patient clients."""

    client_class = f"{__name__}.PatientClient"
    client_factory = Type(PatientClient)
