"""Each wait and record of the stager is needed, and its tests would notice were it gone."""

import pytest
import torch

from repro.mbs import staging
from repro.mbs.staging import Stager
from simulated_device.mutations import Omission, noticed

OMISSIONS = [
    Omission(staging, "slot.copied.synchronize()", within="Stager._stream_queued"),
    Omission(staging, "slot.copied.synchronize()", within="Stager._send"),
    Omission(staging, "self._copy_stream.wait_event(slot.consumed)"),
    Omission(staging, "slot.copied.record(self._copy_stream)"),
    Omission(staging, "compute.wait_event(slot.copied)"),
    Omission(staging, "slot.consumed.record(compute)", within="Stager._hand_out"),
    Omission(staging, "accelerator.record_stream(target, self._copy_stream)"),
    Omission(staging, "slot.consumed.record(compute)", within="Stager._buffers"),
    Omission(staging, "accelerator.synchronize(self._device)"),
]
PIECES = [(0, 1), (1, 3), (3, 4), (4, 7), (7, 8), (8, 12)]  # the ring's buffers grow


def program(device: torch.device):
    """Stream mini-batches from pageable and pinned memory; return what was computed."""
    results = []
    for pinned in (False, True):
        stager = Stager(device, 1, trace=True)
        data = torch.arange(12 * 50, dtype=torch.float32).view(12, 50)
        data = data.pin_memory() if pinned else data
        stager.reset()
        for part in stager.stream(data[a:b] for a, b in PIECES):
            results.append((part * 2).sum())
        data.zero_()  # the caller's memory is its own again
        assert len(stager.spans()) == 2 * len(PIECES)
        taken = stager.stream([torch.ones(9, 50)] * 4)
        next(taken), next(taken)
        taken.close()  # while the third is under way, for which nobody waits
        stager.release()
        results.append(torch.full((9, 50), 7.0, device=device).sum())
    return torch.stack(results).cpu()


@pytest.fixture(scope="module")
def expected():
    sums = [2 * torch.arange(50.0 * a, 50.0 * b).sum() for a, b in PIECES]
    return torch.stack([*sums, torch.tensor(7.0 * 9 * 50)] * 2)


def test_nothing_is_missing(sim, expected):
    assert not noticed(lambda: program(sim), expected)


@pytest.mark.parametrize("omission", OMISSIONS, ids=str)
def test_an_omission_is_noticed(sim, expected, omission):
    assert noticed(lambda: program(sim), expected, omission)
