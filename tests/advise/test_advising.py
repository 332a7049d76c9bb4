"""All methods beside each other, and the lines that use each."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from commands import command_line
from torch import Tensor, nn
from torch.nn import functional

from repro.advise import METHODS, AdviceError, advise, measuring
from repro.advise.advising import TITLES, Advice, parse_memory, parse_sides, ranked
from repro.advise.predicting import Prediction
from repro.advise.snippets import snippet

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


@cache
def told(device: str, batch: int = BATCH, memory: int = MEMORY, **given: Any) -> Advice:
    given = {"example": tuple(tensor[:4] for tensor in data()), "probe_seconds": 0} | given
    return advise(network(), batch, memory, device=device, blocks=["ReLU"], **given)


def run(code: str, folder: Any) -> dict[str, Tensor]:
    """Run a method's lines in a loop of one's own; return the weights."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = zip(*(tensor.split(BATCH) for tensor in data()), strict=True)
    given = {
        "model": model, "optimizer": optimizer, "swap_folder": folder,
        "loader": [[part.clone() for part in pair] for pair in pairs],
        "loss_fn": functional.cross_entropy, "device": "cpu",
    }  # fmt: skip
    exec(code, given)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_lines_of_each_method_run(method, tmp_path):
    """They end with the weights of plain training."""
    code = told("cpu").code(method)
    lines = [line for line in code.splitlines() if not line.startswith("from ")]
    assert 3 < len(lines) <= 8
    found, before = run(code, tmp_path), network().state_dict()
    assert any(not torch.equal(found[name], value) for name, value in before.items())
    plain = run(told("cpu").code("undivided"), tmp_path)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in plain.items())


def test_the_lines_say_that_a_batch_of_another_form_is_to_be_moved():
    example = {"input": torch.randn(2, 3)}, torch.randint(4, (2,))
    found = advise(nn.Linear(3, 4), 8, 10**9, example=example, device="H100", probe_seconds=0)
    for method, moved in (("undivided", True), ("accumulation", True), ("mbs", False)):
        assert found.code(method).startswith("# Move, and split") is moved
    assert not told("H100").code("undivided").startswith("#")


@pytest.mark.slow
def test_ranked_by_what_fits_and_then_by_time():
    for advice in (told("cpu"), told("H100")):
        rows = advice.rows
        assert {row.method for row in rows} == {*METHODS} == {*TITLES}
        fits = [row.fits for row in rows]
        assert fits == sorted(fits, reverse=True) and True in fits and False in fits
        times = [row.slowdown for row in rows if row.fits and row.slowdown]
        assert times == pytest.approx(sorted(times), rel=1e-9)
        assert all(row.bound is None or row.bound <= row.slowdown for row in rows)
        assert advice.best is rows[0] and advice["mbs"].fits and not advice["undivided"].fits
    assert not advice["outofcore_file"].fits and advice.code("outofcore_file") == ""
    for text in ("Micro-Batch Streaming", "ESTIMATED", "optimizer.step()"):
        assert text in advice.text()
    assert advice.text().startswith(f"Take {TITLES[advice.best.method]}: ")
    assert "slower than undivided would be" in advice.answer()


@pytest.mark.parametrize("batch", [7, 16, 31])
@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_what_fits_and_is_no_slower_undivided_is_left_undivided(batch, device):
    found = told(device, batch, 1 << 40)
    assert found.best.method == "undivided" and "fits undivided" in found.answer()
    order = [row.method for row in found.rows if row.slowdown == pytest.approx(1, rel=1e-9)]
    assert order == [method for method in METHODS if method in order]


def test_ties_by_rounding_go_to_the_plainest():
    def row(method: str, slowdown: float | None, fits: bool = True) -> Prediction:
        return Prediction(method, 1, fits, 1, slowdown, None, slowdown)

    rows = [
        row("mbs", 1 - 1e-16), row("save_on_cpu", None), row("checkpointing", 0.97),
        row("undivided", 1.0), row("accumulation", 1 - 2e-16), row("outofcore", 0.1, False),
    ]  # fmt: skip
    assert [r.method for r in ranked(rows)] == [
        "checkpointing", "undivided", "mbs", "accumulation", "save_on_cpu", "outofcore"
    ]  # fmt: skip


def test_too_little_memory_is_told_and_code_keeps_its_block():
    nothing = told("H100", memory=1)
    assert nothing.text().startswith("Nothing fits 9.31e-10 GiB")
    assert not nothing["mbs_in_outofcore"].fits
    tight = told("H100", memory=int(0.9 * nothing["undivided"].peak_bytes))
    assert tight["mbs_in_outofcore"].fits and "OutOfCore(" in tight.code("mbs_in_outofcore")


def test_a_device_that_is_here_is_measured():
    found = told("cpu", 8, 10**9, probe_seconds=0.3)
    assert "measured on this CPU" in found.grounds and "2" in found.grounds
    assert found["undivided"].seconds > 0 and found["undivided"].slowdown == 1
    assert "steps of 2 samples" in (rough := told("cpu", 8, 10**9, probe_seconds=1e-9).grounds)
    assert "mostly too long" in rough
    assert told("cpu:0").text() == told("cpu").text()


def planted(monkeypatch, **lines: str) -> None:
    """Have methods run another line after each step."""
    longer = lambda row: f"{snippet(row)}; {lines.get(row.method, 'pass')}"  # noqa: E731
    monkeypatch.setattr(measuring, "snippet", longer)


@pytest.mark.slow
def test_measured_methods_are_ranked_by_what_they_took(monkeypatch):
    planted(monkeypatch, undivided="__import__('time').sleep(0.1)")
    model, example, memory = network(), data(), 10**9
    kept = [tensor.clone() for tensor in (*model.state_dict().values(), *example)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    found = advise(model.eval(), BATCH, memory, example=example, blocks=["ReLU"], measure=True,
                   probe_seconds=0)  # fmt: skip
    times = [row.measured_s for row in found.rows]
    assert found.rows[-1].method == "undivided" and 0.1 < times[-1] < 5  # predicted as the fastest
    for earlier, later in pairwise(times):
        assert earlier <= later
    assert all(row.slowdown == pytest.approx(row.measured_s / times[-1]) for row in found.rows)
    # A batch that fits needs no method, whatever was measured.
    assert found.answer().startswith("Take no method") and "as measured" in found.answer()
    assert found.grounds.startswith("10 methods measured, median of 5 steps after 1 (3 where ")
    assert {"measured (s)", "predicted (s)"} <= found.table()[0].keys()
    # The user's own things are as they were.
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
    after = [*model.state_dict().values(), *example]
    assert all(torch.equal(*pair) for pair in zip(kept, after, strict=True))
    assert not model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_methods_that_cannot_be_measured_say_why(monkeypatch):
    memory = "raise torch.OutOfMemoryError('planted')"
    refusal = "from repro.mbs import LossCheckError; raise LossCheckError('planted')"
    planted(monkeypatch, accumulation="1 / 0", checkpointing=memory, mbs=refusal)
    found = told.__wrapped__("cpu", memory=10**9, measure=True)
    fitting = [row for row in found.rows if row.fits]
    assert len(fitting) == 8 and fitting[-1].method == "accumulation"
    assert [row.measured_s is None for row in fitting] == [False] * 7 + [True]
    assert fitting[-1].reason == "not measured: ZeroDivisionError: division by zero"
    assert found["checkpointing"].reason == "measured, it ran out of memory: planted"
    assert found["mbs"].reason == "MBS refuses it: planted"
    assert {row.method for row in found.rows[8:]} == {"checkpointing", "mbs"}


@pytest.mark.slow
def test_undivided_steps_beyond_the_limit_are_measured_to_compare_with():
    found = told("cpu", measure=True)
    whole, best = found["undivided"], found.best
    assert not whole.fits and whole.measured_s and whole.slowdown == 1
    assert best.fits and best.slowdown == best.measured_s / whole.measured_s


def test_what_cannot_be_measured():
    found = told("H100", measure=True)
    assert found.grounds.startswith("nothing measured, as H100 is not here; the data sheet of")
    assert found.rows == told("H100").rows
    absent = "nothing measured, as xpu is not here; the data sheet of H100"
    assert told("xpu").grounds.startswith(absent)
    images, labels = data()  # the lines take one tensor of inputs
    with pytest.raises(AdviceError, match="one tensor of inputs"):
        told("cpu", 4, measure=True, example=((images[:4],), labels[:4]))


@pytest.mark.gpu
def test_measured_on_an_accelerator_within_the_limit(device, monkeypatch):
    planted(monkeypatch, accumulation="kept = torch.empty(2**28, device=device)")
    example, limit = tuple(tensor[:4] for tensor in data()), 2**28
    found = advise(network(), BATCH, limit, example=example, device=str(device), blocks=["ReLU"],
                   measure=True, probe_seconds=0)  # fmt: skip
    assert found["accumulation"].reason.startswith("measured, it ran out of memory: ")
    assert not found["accumulation"].fits and not found["outofcore_file"].fits
    others = [row for row in found.rows if row.method not in ("accumulation", "outofcore_file")]
    assert all(row.fits and row.measured_s for row in others), [row.reason for row in others]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"device": "toaster"}, "'toaster' is not known"),
        ({"device": "meta"}, "computes nothing"),
        ({"probe_seconds": float("nan")}, "probe_seconds is nan"),
        ({"probe_seconds": float("inf")}, "probe_seconds is inf"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "SGD'>: give a name, or a function of"),
    ],
)
def test_refused_before_anything_is_recorded(given, message):
    asked = {"model": network(), "batch": 4, "memory_bytes": 10**6, "image": 8, **given}
    with pytest.raises(AdviceError, match=message):
        advise(**asked)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_has_set_is_no_matter(without_gradients):
    expected = advise(network(), 4, 10**6, image=8)
    with without_gradients():
        model, example = network(), (torch.randn(2, 3, 8, 8), torch.arange(2))
    torch.set_default_device("meta")
    try:
        with without_gradients():
            found = advise(model, 4, 10**6, example=example, probe_seconds=0.1, measure=True)
    finally:
        torch.set_default_device(None)
    assert found["undivided"].measured_s and found.best is not None
    assert found["undivided"].peak_bytes == expected["undivided"].peak_bytes


def test_a_method_that_there_is_not_is_named():
    with pytest.raises(AdviceError, match="method 'swap' is none of undivided, acc"):
        told("cpu").code("swap")


def test_memory_and_sides_as_text():
    sizes = {"16GiB": 2**34, "1.5 MiB": 3 * 2**19, "800MB": 8 * 10**8, "2gib": 2**31}
    sizes["1048576"] = 2**20
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "16 G i B", "0", "0.1", "1e9", "16PiB", "16", "1023KiB"):
        with pytest.raises(AdviceError, match="give 1 MiB or more"):
            parse_memory(text)
    sides = {"224": (224, 224), "512x1024": (512, 1024)}
    assert {text: parse_sides(text) for text in sides} == sides
    for text in ("0", "12x", "a", "-3", "1.5"):
        with pytest.raises(AdviceError, match="give pixels"):
            parse_sides(text)


@pytest.mark.slow
def test_from_the_command_line(monkeypatch, capsys):
    run_command = command_line(monkeypatch, capsys)
    given = ["--model", "resnet20", "--batch", "512", "--memory", "300MiB", "--device", "cuda"]
    code, out, err = run_command("advise", *given, "--image", "32", "--method", "mbs")
    assert code == 0 and not err
    assert out.startswith("Take ") and "MicroBatchStreamer(model, loss_fn" in out
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
