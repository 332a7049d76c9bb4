"""All methods beside each other, and the lines that use each."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from commands import command_line
from torch import Tensor, nn
from torch.nn import functional

from repro.advise import METHODS, PAIRS, AdviceError, Speed, Workload, advise, snippet
from repro.advise.advising import TITLES, _ranked, parse_memory, parse_sides
from repro.advise.predicting import Prediction

MEMORY, BATCH = 300_000, 24


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)]
    head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *head)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2 * BATCH, 3, 8, 8, generator=generator)
    return images, torch.randint(4, (2 * BATCH,), generator=generator)


class Loader:
    """Mini-batches whose size can change, as a loader of the user's has them."""

    batch_size = BATCH

    def set_batch_size(self, size: int) -> None:
        self.batch_size = size

    def __iter__(self) -> Any:
        return zip(*(tensor.split(self.batch_size) for tensor in data()), strict=True)


@cache
def workload() -> Workload:
    return Workload.of(network(), example=tuple(tensor[:4] for tensor in data()))


def told(device: str, methods: Any = (*METHODS, *PAIRS), batch=BATCH, memory=MEMORY) -> Any:
    return advise(workload(), batch, memory, device=device, methods=methods, probe_seconds=0)


@pytest.fixture(scope="module")
def advices() -> dict[str, Any]:
    return {device: told(device) for device in ("cpu", "H100")}


def run(code: str, folder: Any) -> dict[str, Tensor]:
    """Run a method's lines in a loop of one's own; return the weights."""
    model, loader = network(), Loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = data()

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
    found, before = run(code, tmp_path), network().state_dict()
    assert any(not torch.equal(found[name], value) for name, value in before.items())
    if method not in ("theta", "dualbatch"):
        plain = run(advices["cpu"].code("undivided"), tmp_path)
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in plain.items())


@pytest.mark.slow
def test_ranked_by_what_fits_and_then_by_time(advices):
    for advice in advices.values():
        rows, apart = advice.rows, ("theta", "dualbatch")
        assert {row.method for row in rows} == {*METHODS, *PAIRS}
        fits = [row.fits for row in rows]
        assert fits == sorted(fits, reverse=True) and True in fits and False in fits
        others = [row.method in apart for row in rows if row.fits]
        assert others == sorted(others)
        times = [r.slowdown for r in rows if r.fits and r.slowdown and r.method not in apart]
        assert times == pytest.approx(sorted(times), rel=1e-9)
        assert all(row.bound is None or row.bound <= row.slowdown for row in rows)
        assert advice.best is rows[0] and advice["mbs"].fits and not advice["undivided"].fits
    advice = advices["H100"]
    assert not advice["outofcore_file"].fits and snippet(advice["outofcore_file"]) == ""
    for text in ("Micro-Batch Streaming", "ESTIMATED", "optimizer.step()"):
        assert text in advice.text()
    assert advice.text().startswith(f"Take {TITLES[advice.best.method]}: ")
    assert "slower than undivided would be" in advice.answer()
    found = json.loads(json.dumps(advice.to_json()))["methods"]
    assert [row["method"] for row in found] == [row.method for row in advice.rows]
    assert found[0]["fits"] and found[0]["code"] and found[0]["slowdown"] >= found[0]["bound"]


@pytest.mark.parametrize("batch", [7, 16, 31])
@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_what_fits_and_is_no_slower_undivided_is_left_undivided(batch, device):
    found = told(device, METHODS, batch, 1 << 40)
    assert found.best.method == "undivided" and "fits undivided" in found.answer()
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
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2)
    normalised = nn.Sequential(*layers)
    normalised(torch.randn(2, 3, 8, 8))
    found = advise(normalised, 8, 10**7, device="H100", image=8, methods=["mbs", "checkpointing"])
    assert "normalises by its micro-batch" in found.changes("mbs")
    assert found["checkpointing"].reason


def test_too_little_memory_is_told_and_code_keeps_its_block():
    nothing = told("H100", memory=1)
    assert json.dumps(nothing.to_json()) and nothing.text().startswith("Nothing fits 9.31e-10 GiB")
    assert not any(row.fits for row in nothing.rows if row.method in PAIRS)
    tight = told("H100", memory=int(0.9 * nothing["undivided"].peak_bytes))
    assert tight["mbs_in_outofcore"].fits and "OutOfCore(" in tight.code("mbs_in_outofcore")


def test_a_device_that_is_here_is_measured():
    measured = ["undivided", "mbs"]
    found = advise(workload(), 8, 10**9, probe_seconds=0.3, methods=measured)
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


def test_what_mbs_refuses_has_no_code():
    speed = Speed(**vars(Speed.of("cpu")) | {"streaming_refused": "its loss"})
    for method in ("mbs", "mbs_in_outofcore", "checkpointing_mbs"):
        found = advise(workload(), BATCH, MEMORY, speed=speed, methods=[method])
        assert not found[method].fits and found.code(method) == "" and found.to_json()


def test_memory_and_sides_as_text():
    sizes = {"16GiB": 2**34, "1.5 MiB": 3 * 2**19, "800MB": 8 * 10**8, "7": 7, "2gib": 2**31}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "16 G i B", "0", "0.1", "1e9", "16PiB"):
        with pytest.raises(AdviceError, match="give bytes with a unit"):
            parse_memory(text)
    sides = {None: None, "224": (224, 224), "512x1024": (512, 1024)}
    assert {text: parse_sides(text) for text in sides} == sides
    for text in ("0", "12x", "a", "-3", "1.5"):
        with pytest.raises(AdviceError, match="give pixels"):
            parse_sides(text)


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
