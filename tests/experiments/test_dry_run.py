"""Dry runs: peaks, work and time of first steps, and that every recipe starts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from commands import command_line
from torch import nn

from repro.experiments import PAPERS, load_paper
from repro.experiments.dry_run import FAILS, NO_STEP, UNTRIED, try_first_steps
from repro.experiments.mbs import runs
from repro.measure import MemoryMeter
from repro.measure.fake_tensors import first_steps, flops_of, imagined
from repro.training import plain_step

OWN = {"classification": "flowers102", "segmentation": "carvana"}


def toy_step(count):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = plain_step(model, nn.functional.cross_entropy, optimizer, "cpu")
    inputs, labels = torch.zeros(count, 3, 8, 8), torch.zeros(count, dtype=torch.int64)
    return partial(step, inputs, labels), [model, inputs, labels]


def test_peak_of_first_steps_and_operations_of_a_product():
    step, (model, *tensors) = toy_step(4)
    with MemoryMeter("cpu", resident=[*model.parameters(), *tensors]) as meter:
        step()
        step()
    with imagined():
        assert first_steps(*toy_step(4)) == meter.peak_bytes
        a, b = torch.empty(4, 512), torch.empty(512, 5)
        assert flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b) == 2 * 4 * 512 * 5
        assert flops_of(torch.ops.aten.relu.default, (a,), {}, a) == 0


@pytest.mark.slow
def test_resnet101_fits_the_papers_card_as_in_the_paper():
    paper, sizes = load_paper("mbs"), [(8, False), (16, False), (16, True)]
    trained = [runs.training("paper", "ResNet-101", OWN, *each) for each in sizes]
    found = [try_first_steps(paper, run) for run in trained]
    results, (undivided, _, streamed) = zip(*found, strict=True)
    assert results == ("starts", "out of memory", "starts")
    assert streamed == pytest.approx(undivided, rel=0.02)


def test_a_recipe_that_cannot_start_fails():
    paper = load_paper("mbs")
    run = runs.training("paper", "U-Net", OWN, 16, False, "low")
    cut = replace(run, config=run.config | {"augment": {"crop_size": 4000}})
    assert "crop_size=(4000, 4000) does not fit" in try_first_steps(paper, cut)[0]
    odd = replace(run, config=run.config | {"model": {"name": "unet", "widht": 4}})
    assert try_first_steps(paper, odd)[0].startswith(f"{FAILS}ValueError: ")


@pytest.mark.slow
@pytest.mark.parametrize("key", PAPERS)
def test_the_first_and_the_last_run_of_a_gpu_of_each_experiment_start(key):
    if key == "dualbatch":
        pytest.importorskip("ray")
    paper = load_paper(key)
    chosen = {task: next(iter(names), "") for task, names in paper.datasets["gpu"].items()}
    runs = [r for artefact in paper.artefacts.values() for r in artefact.runs("gpu", chosen)]
    ends = [{run.experiment: run for run in some} for some in (runs, reversed(runs))]
    for run in {run for end in ends for run in end.values()}:
        result, _ = try_first_steps(paper, run)
        fits = result == "out of memory" and run.experiment in ("step", "train", "measured")
        assert fits or result in ("starts", NO_STEP) or result.startswith(UNTRIED), run


def test_the_command_computes_nothing(monkeypatch, capsys, results_folder):
    given = ("run", "adaptive/figure7", "--profile", "paper", "--dry-run")
    code, out, _ = command_line(monkeypatch, capsys)(*given)
    assert code == 0 and "cannot be tried without the device: it starts processes" in out
    assert "peak (GiB)" in out and not results_folder.exists()
