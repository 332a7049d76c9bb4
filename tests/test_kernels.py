import asyncio
from queue import Empty

import pytest

pytest.importorskip("jupyter_client")

from jupyter_client.channels import AsyncZMQSocketChannel

from repro import _kernels
from repro._kernels import PatientChannel, PatientManager


@pytest.fixture
def polls(monkeypatch):
    """Waits of a channel, whose message was there all along but woke nobody: seen by asking."""
    waits = []

    async def get_msg(self, timeout=None):
        waits.append(timeout)
        if len(waits) < 3:
            raise Empty
        return {"found": len(waits)}

    monkeypatch.setattr(AsyncZMQSocketChannel, "get_msg", get_msg)
    return waits


@pytest.fixture
def channel():
    return PatientChannel.__new__(PatientChannel)


def test_a_message_that_woke_nobody_is_found_by_asking_again(polls, channel):
    assert asyncio.run(channel.get_msg()) == {"found": 3}
    assert polls == [_kernels.POLL_S] * 3


def test_a_timeout_is_kept(polls, channel):
    with pytest.raises(Empty):
        asyncio.run(channel.get_msg(timeout=1.5))
    assert polls == [1.0, 0.5]


def test_a_manager_makes_patient_clients():
    client = PatientManager().client()
    assert client.shell_channel_class is PatientChannel
    assert client.iopub_channel_class is PatientChannel
