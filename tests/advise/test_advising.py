"""All methods beside each other, and the lines that use each."""

import json
from typing import Any

import pytest
import torch
from commands import command_line
from torch import Tensor, nn
from torch.nn import functional

from repro.advise import METHODS, PAIRS, AdviceError, advise, snippet
from repro.advise.advising import _ranked
from repro.advise.asking import parse_memory, parse_sides
from repro.advise.predicting import Prediction

MEMORY, BATCH = 300_000, 24


class Block(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Block(8) for _ in range(3)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2 * BATCH, 3, 8, 8, generator=generator)
    return images, torch.randint(4, (2 * BATCH,), generator=generator)


class Loader:
    """Mini-batches whose size can change, as a loader of the user's has them."""

    def __init__(self) -> None:
        self.batch_size = BATCH

    def set_batch_size(self, size: int) -> None:
        self.batch_size = size

    def __iter__(self) -> Any:
        return zip(*(tensor.split(self.batch_size) for tensor in data()), strict=True)


def told(device: str, methods: Any = (*METHODS, *PAIRS)) -> Any:
    example = tuple(tensor[:4] for tensor in data())
    return advise(
        network(), BATCH, MEMORY, device=device, probe_seconds=0, example=example, methods=methods
    )


@pytest.fixture(scope="module")
def advices() -> dict[str, Any]:
    return {device: told(device) for device in ("cpu", "H100")}


def run(code: str, folder: Any) -> dict[str, Tensor]:
    """Run a method's lines in a loop of one's own; return the weights."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = data()
    loader = Loader()

    def train_one_epoch() -> float:
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses.append(functional.cross_entropy(model(inputs), targets))
            losses[-1].backward()
            optimizer.step()
        return float(torch.stack(losses).detach().mean())

    given = {
        "torch": torch, "model": model, "optimizer": optimizer, "loader": loader,
        "loss_fn": functional.cross_entropy, "device": "cpu", "swap_folder": folder,
        "epochs": 2, "train_one_epoch": train_one_epoch, "make_model": network,
        "images": images, "labels": labels,
    }  # fmt: skip
    exec(code, given)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *PAIRS])
def test_the_lines_of_each_method_run(method, advices, tmp_path, monkeypatch):
    """What changes nothing in the mathematics ends with the weights of plain training."""
    monkeypatch.setenv("REPRO_MICROCONV_POLICY", "undivided")  # which measures least
    code = advices["cpu"].code(method)
    lines = [line for line in code.splitlines() if not line.startswith("from ")]
    assert 3 < len(lines) <= 8
    found = run(code, tmp_path)
    plain = run(advices["cpu"].code("undivided"), tmp_path)
    same = all(torch.allclose(found[name], value, atol=1e-6) for name, value in plain.items())
    before = network().state_dict()
    assert not all(torch.equal(found[name], value) for name, value in before.items())
    if method not in ("theta", "dualbatch"):
        assert same


@pytest.mark.slow
def test_ranked_by_what_fits_and_then_by_time(advices):
    for advice in advices.values():
        rows = advice.rows
        assert [row.method for row in rows] and {r.method for r in rows} == {*METHODS, *PAIRS}
        fits = [row.fits for row in rows]
        assert fits == sorted(fits, reverse=True) and True in fits and False in fits
        others = [r.method in ("theta", "dualbatch") for r in rows if r.fits]
        assert others == sorted(others)
        times = [
            row.slowdown
            for row in rows
            if row.fits and row.slowdown is not None and row.method not in ("theta", "dualbatch")
        ]
        assert times == pytest.approx(sorted(times), rel=1e-9)
        assert advice.best is rows[0] and advice["mbs"].fits and not advice["undivided"].fits
    assert not advices["H100"]["outofcore_file"].fits
    assert snippet(advices["H100"]["outofcore_file"]) == ""


@pytest.mark.parametrize("batch", [7, 16, 31])
@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_what_fits_and_is_no_slower_undivided_is_left_undivided(batch, device):
    example = tuple(tensor[:4] for tensor in data())
    found = advise(network(), batch, 1 << 40, device=device, probe_seconds=0, example=example)
    assert found.best.method == "undivided"
    order = [row.method for row in found.rows if row.slowdown == pytest.approx(1, rel=1e-9)]
    assert order == [method for method in METHODS if method in order]


def test_ties_by_rounding_go_to_the_plainest():
    def row(method: str, slowdown: float | None, fits: bool = True) -> Prediction:
        return Prediction(method, 1, fits, 1, slowdown, None, slowdown)

    rows = [
        row("mbs", 1 - 1e-16), row("microconv", None), row("checkpointing", 0.97),
        row("undivided", 1.0), row("theta", 0.5), row("accumulation", 1 - 2e-16),
        row("outofcore", 0.1, False),
    ]  # fmt: skip
    assert [r.method for r in _ranked(rows)] == [
        "checkpointing", "undivided", "mbs", "accumulation", "microconv", "theta", "outofcore"
    ]  # fmt: skip


def test_what_changes_is_told_where_it_does():
    """BatchNorm is the model's matter: without it a division changes nothing."""
    assert "BatchNorm" not in told("H100", ["mbs"]).changes("mbs")
    normalised = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2)
    )
    normalised(torch.randn(2, 3, 8, 8))
    found = advise(normalised, 8, 10**7, device="H100", image=8, methods=["mbs", "checkpointing"])
    assert "normalises by its micro-batch" in found.changes("mbs")
    assert "nothing is known" in found["checkpointing"].reason or found["checkpointing"].reason


def test_too_little_memory_is_told_and_code_keeps_its_block():
    example = tuple(tensor[:4] for tensor in data())
    options = {"device": "H100", "example": example, "methods": (*METHODS, *PAIRS)}
    nothing = advise(network(), BATCH, 1, **options)
    assert json.dumps(nothing.to_json()) and nothing.text()
    assert not any(row.fits for row in nothing.rows if row.method in PAIRS)
    peak = next(r.peak_bytes for r in nothing.rows if r.method == "undivided")
    tight = advise(network(), BATCH, int(0.9 * peak), **options)
    (row,) = (r for r in tight.rows if r.method == "mbs_in_outofcore")
    assert row.fits and "OutOfCore(" in tight.code("mbs_in_outofcore")


def test_as_text_and_as_json(advices):
    advice = advices["H100"]
    text = advice.text()
    assert "Micro-Batch Streaming" in text and "ESTIMATED" in text and "optimizer.step()" in text
    found = json.loads(json.dumps(advice.to_json()))
    assert [row["method"] for row in found["methods"]] == [row.method for row in advice.rows]
    first = found["methods"][0]
    assert first["fits"] and first["code"] and first["slowdown"] >= first["bound"]


def test_a_device_that_is_here_is_measured():
    found = advise(
        network(), 8, 10**9, probe_seconds=0.3, example=data(), methods=["undivided", "mbs"]
    )
    assert "measured on this CPU" in found.grounds and "2" in found.grounds
    assert found["undivided"].seconds > 0 and found["undivided"].slowdown == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"device": "toaster"}, "'toaster' is not known"),
        ({"device": "meta"}, "computes nothing"),
        ({"methods": ["magic"]}, "methods has 'magic'"),
        ({"probe_seconds": float("nan")}, "probe_seconds is nan"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'"),
    ],
)
def test_refused_before_anything_is_recorded(given, message):
    asked = {"step_or_model": network(), "batch": 4, "memory_bytes": 10**6, "image": 8, **given}
    with pytest.raises(AdviceError, match=message):
        advise(**asked)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16GiB", 2**34), ("1.5 MiB", 3 * 2**19), ("800MB", 8 * 10**8), ("7", 7), ("2gib", 2**31)],
)
def test_memory(text, nbytes):
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "16 G i B", "0", "0.1", "1e9", "16PiB"])
def test_what_is_no_memory(text):
    with pytest.raises(AdviceError, match="give bytes with a unit"):
        parse_memory(text)


@pytest.mark.slow
def test_from_the_command_line(monkeypatch, capsys):
    run_command = command_line(monkeypatch, capsys)
    given = ["--model", "resnet20", "--batch", "512", "--memory", "300MiB", "--device", "cuda"]
    code, out, err = run_command("advise", *given, "--image", "32", "--json")
    assert code == 0 and not err
    found = json.loads(out)
    fits = {row["method"]: row["fits"] for row in found["methods"]}
    assert found["batch"] == 512 and fits["mbs"] and not fits["undivided"]
    assert {row["method"] for row in found["methods"]} == set(METHODS)
    for wrong, message in (
        (["--model", "resnet2"], "choose one of"),
        (["--memory", "much"], "such as 16GiB"),
        (["--image", "x"], "as 224"),
        (["--method", "none"], "choose undivided"),
        (["--batch", "0"], "batch is 0"),
        (["--device", "toaster"], "H100"),
    ):
        code, out, err = run_command("advise", *given, *wrong)
        assert code == 2 and not out and message in err and err.count("\n") == 1


def test_sides():
    assert parse_sides(None) is None and parse_sides("224") == (224, 224)
    assert parse_sides("512x1024") == (512, 1024)
    for text in ("0", "12x", "a", "-3", "1.5"):
        with pytest.raises(AdviceError, match="give pixels"):
            parse_sides(text)
