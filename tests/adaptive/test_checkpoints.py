import contextlib
import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from repro.adaptive import CheckpointError, ThetaController, load_checkpoint, save_checkpoint


def state_of(number):
    return {"number": number, "weights": torch.full((1000,), float(number))}


def test_round_trip(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten())
    optimizer = torch.optim.Adam(model.parameters())
    controller = ThetaController(8, 64, 0.1)
    controller.observe(2.0, model.parameters())
    model(torch.ones(1, 2, 3, 3)).sum().backward()
    optimizer.step()
    controller.observe(1.0, model.parameters())
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "controller": controller.state_dict(),
        "texts": ["θ", None, True, 3, (1.5, -math.inf)],
        "random": torch.get_rng_state(),
    }
    path = tmp_path / "new" / "folder" / "last.pt"
    save_checkpoint(path, state)
    loaded = load_checkpoint(str(path))
    assert loaded.keys() == state.keys() and loaded["texts"] == state["texts"]
    assert torch.equal(loaded["random"], state["random"])
    for name, value in model.state_dict().items():
        assert torch.equal(loaded["model"][name], value)
        assert loaded["model"][name].stride() == value.stride()
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(loaded["optimizer"])
    for p in model.parameters():
        assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    other = ThetaController(8, 64, 0.1)
    other.load_state_dict(loaded["controller"])
    assert other.setting == controller.setting
    assert list(path.parent.iterdir()) == [path]


def test_damage_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, state_of(1))
    whole = path.read_bytes()
    flipped = [
        whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :]
        for byte in (0, 31, 32, len(whole) // 2, len(whole) - 1)
    ]
    for damaged in [b"", whole[:20], whole[:32], whole[:-1], whole + b"\0", whole[32:], *flipped]:
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.pt is damaged, or no checkpoint of repro"):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["number"] == 1
    assert issubclass(CheckpointError, ValueError)


def test_a_plain_file_of_torch_and_none_are_refused(tmp_path):
    torch.save(state_of(1), tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match=r"remove it to start anew, or give another path"):
        load_checkpoint(tmp_path / "plain.pt")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    save_checkpoint(path, state_of(1))

    def full(descriptor):
        assert load_checkpoint(path)["number"] == 1
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            save_checkpoint(path, state_of(2))
    assert load_checkpoint(path)["number"] == 1
    with pytest.raises((TypeError, AttributeError, RuntimeError)):  # cannot be written at all
        save_checkpoint(path, {"thread": threading.Lock()})
    assert load_checkpoint(path)["number"] == 1
    save_checkpoint(path, state_of(3))
    assert load_checkpoint(path)["number"] == 3


def test_what_could_not_be_read_again_does_not_replace_the_old_one(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, state_of(1))
    with contextlib.suppress(TypeError, ValueError):
        save_checkpoint(path, {"number": 2, "path": Path("a")})  # neither number, text nor tensor
    assert load_checkpoint(path)["number"] in (1, 2)


def write_and_be_killed(path, when):
    """Save, and be killed in the middle of it."""

    def kill(*ignored):
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "written":
        os.fsync = kill
    else:
        os.replace = kill
    save_checkpoint(path, state_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["written", "synced"])
def test_a_process_that_is_killed_leaves_the_old_one(tmp_path, when):
    path = tmp_path / "a.pt"
    save_checkpoint(path, state_of(1))
    context = torch.multiprocessing.get_context("forkserver")
    process = context.Process(target=write_and_be_killed, args=(path, when))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert load_checkpoint(path)["number"] == 1
    save_checkpoint(path, state_of(3))
    assert load_checkpoint(path)["number"] == 3


def test_a_reader_sees_one_or_the_other_and_never_a_part(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, state_of(0))
    seen, failures, over = [], [], threading.Event()

    def read():
        while not over.is_set():
            try:
                state = load_checkpoint(path)
                seen.append(state["number"])
                assert torch.all(state["weights"] == state["number"])
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 60):
        save_checkpoint(path, state_of(number))
    over.set()
    thread.join()
    assert not failures
    assert len(set(seen)) > 1 and seen == sorted(seen)
