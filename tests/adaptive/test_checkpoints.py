import math

import numpy as np
import pytest
import torch
from torch import nn

from repro import adaptive


def test_round_trip(tmp_path):
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    state = {"model": model.state_dict(), "texts": ["θ", None, True, 3, (1.5, -math.inf)]}
    path = tmp_path / "new" / "folder" / "last.pt"
    adaptive.save_checkpoint(path, state)
    loaded = adaptive.load_checkpoint(str(path))
    assert loaded.keys() == state.keys() and loaded["texts"] == state["texts"]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded["model"][name], value)
        assert loaded["model"][name].stride() == value.stride()
    assert list(path.parent.iterdir()) == [path]


def test_controllers_of_numpys_numbers(tmp_path):
    one, two, rate = np.int64(8), np.int32(64), np.float32(0.1)
    given = {"warmup": np.int64(2), "warmup_from": rate / 2, "decay_at": [np.int64(3)]}
    given["growth"] = np.int64(3)
    for kind, own in ((adaptive.ThetaController, "interval"), (adaptive.ScheduledBatch, "every")):
        options = given | {own: one}
        controller, model = kind(one, two, rate, **options), nn.Linear(2, 2)
        controller.observe(np.float32(2.0), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        adaptive.set_lr(optimizer, controller.setting.lr)
        state = {"controller": controller.state_dict(), "optimizer": optimizer.state_dict()}
        adaptive.save_checkpoint(tmp_path / "a.pt", state)
        other = kind(one, two, rate, **options)
        other.load_state_dict(adaptive.load_checkpoint(tmp_path / "a.pt")["controller"])
        assert other.setting == controller.setting


def test_damage_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    adaptive.save_checkpoint(path, {"number": 1, "weights": torch.ones(1000)})
    whole = path.read_bytes()
    places = (0, 31, 32, len(whole) // 2, len(whole) - 1)
    flipped = [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in places]
    plain = whole[32:]  # as torch saves it
    for damaged in [b"", whole[:20], whole[:32], whole[:-1], whole + b"\0", plain, *flipped]:
        path.write_bytes(damaged)
        told = r"a\.pt is damaged, or no checkpoint of repro.*remove it to start anew, or give"
        with pytest.raises(adaptive.CheckpointError, match=told):
            adaptive.load_checkpoint(path)
    path.write_bytes(whole)
    assert adaptive.load_checkpoint(path)["number"] == 1
    with pytest.raises(FileNotFoundError):
        adaptive.load_checkpoint(tmp_path / "none.pt")
