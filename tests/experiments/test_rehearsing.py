"""Runs rehearsed on tensors without content: peaks, work, and that every recipe starts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from commands import command_line
from torch import nn

from repro.experiments import PAPERS, load_paper
from repro.experiments.imagining import imagined_data
from repro.experiments.mbs import runs
from repro.experiments.rehearsing import rehearse, seconds
from repro.measure import MemoryMeter
from repro.measure.datasheets import DEVICES, GIB, Device
from repro.measure.fake_tensors import Work, first_steps, imagined
from repro.training import plain_step

OWN = {"classification": "flowers102", "segmentation": "carvana"}


# What has no model on a device: arithmetic, simulations, kernels, processes on CPUs.
COMPUTED = {
    "mbs": {"foretell"},
    "dualbatch": {"published", "schemes", "solve"},
    "adaptive": {"parallel"},
    "outofcore": {"simulated", "reach", "half", "half_reach", "link", "chunk_sizes", "packed"},
    "microconv": {"candidates", "network", "deepbench", "cluster", "solver", "programme"},
    "together": {"pace", "foretell"},
}


def toy_step(count):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = plain_step(model, nn.functional.cross_entropy, optimizer, "cpu")
    inputs, labels = torch.zeros(count, 3, 8, 8), torch.zeros(count, dtype=torch.int64)
    return model, partial(step, inputs, labels), [model, inputs, labels]


def runs_of(key, profile):
    paper = load_paper(key)
    chosen = {task: next(iter(names), "") for task, names in paper.datasets[profile].items()}
    found = [run for artefact in paper.artefacts.values() for run in artefact.runs(profile, chosen)]
    return paper, list(dict.fromkeys(found))


class TestFirstSteps:
    def test_the_peak_is_that_of_real_tensors(self):
        _, step, resident = toy_step(4)
        model, inputs, labels = resident
        with MemoryMeter("cpu", resident=[*model.parameters(), inputs, labels]) as meter:
            step()
            step()
        with imagined():
            _, step, resident = toy_step(4)
            peak, _ = first_steps(step, resident)
        assert peak == meter.peak_bytes

    def test_the_work_is_that_of_the_second_step(self):
        with imagined():
            _, step, resident = toy_step(4)
            _, work = first_steps(step, resident)
        # A product and a sum each, thrice for the linear layer; the first layer needs no
        # gradient of its input.
        assert work.flops == 4 * (3 * 2 * 512 * 5 + 2 * 2 * 8 * 64 * 27)

    def test_what_has_no_content_takes_no_memory(self):
        with imagined():
            data = imagined_data({"name": "imagenet", "image_size": 288})
        assert data.train.images.shape == (1_281_167, 3, 288, 288)
        assert data.num_classes == 1000


def test_an_operation_takes_the_longer_of_computing_and_moving():
    device = Device("toy", flops=1e9, low_flops=2e9, bandwidth=1e6, memory_bytes=1)
    computes, moves, short = (10**9, 8, False), (8, 10**6, False), (1, 1, False)
    assert seconds(Work((computes,)), device) == pytest.approx(2.5)
    assert seconds(Work(((10**9, 8, True),)), device) == pytest.approx(1.25)  # in 16 bits
    assert seconds(Work((moves,)), device) == pytest.approx(2.5)
    assert seconds(Work((short,)), device) == pytest.approx(5e-6)
    assert seconds(Work((computes, moves)), device) == pytest.approx(5.0)


class TestRuns:
    @pytest.mark.exhaustive
    def test_resnet101_fits_the_papers_card_as_in_the_paper(self):
        paper = load_paper("mbs")
        found = [
            rehearse(paper, runs.training("paper", "ResNet-101", OWN, *sizes))
            for sizes in ((8, None), (16, None), (16, 8))
        ]
        assert [one.fits for one in found] == [one.expected for one in found] == [True, False, True]
        undivided, _, streamed = found
        # Only the second micro-batch, which waits, comes on top.
        waiting = 8 * 3 * 224 * 224 * 4 + 8 * 8
        assert streamed.peak_bytes == pytest.approx(undivided.peak_bytes + waiting, rel=0.02)

    @pytest.mark.slow
    def test_an_epoch_is_80_percent_of_all_flowers(self):
        (run,) = [runs.training("paper", "ResNet-50", OWN, 16, None, "low")]
        assert rehearse(load_paper("mbs"), run).data == "6,551 images of 32×32"

    @pytest.mark.thorough
    def test_gradients_are_those_of_one_card_in_float64(self):
        paper = load_paper("mbs")
        for profile in ("gpu", "paper"):
            planned = runs.normalisations(profile, OWN, [None])
            found, single = rehearse(paper, planned[0]), rehearse(paper, planned[-1])
            assert found.limit_bytes is single.limit_bytes is None
            # Twice the bytes, but no optimizer's.
            assert 1.8 < found.peak_bytes / single.peak_bytes < 2.1
            assert found.peak_bytes < DEVICES["A100"].memory_bytes

    def test_low_precision_is_of_all_parameters_and_buffers(self):
        with imagined():
            model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to("cpu", torch.bfloat16)
            kinds = {name: value.dtype for name, value in model.state_dict().items()}
            assert kinds.pop("1.num_batches_tracked") == torch.int64
            assert set(kinds.values()) == {torch.bfloat16}
            model(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)).sum().backward()

    def test_a_recipe_that_cannot_start_fails(self):
        paper = load_paper("mbs")
        run = runs.training("paper", "U-Net", OWN, 16, None, "low")
        cut = replace(run, config=run.config | {"augment": {"crop_size": 4000}})
        with pytest.raises(ValueError, match=r"crop_size=\(4000, 4000\) does not fit"):
            rehearse(paper, cut)
        odd = replace(run, config=run.config | {"model": {"name": "unet", "widht": 4}})
        with pytest.raises(ValueError, match="no option widht"):
            rehearse(paper, odd)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("profile", ["gpu", "paper"])
    @pytest.mark.parametrize("key", PAPERS)
    def test_every_run_starts_and_fits_as_in_the_paper(self, key, profile):
        paper, runs = runs_of(key, profile)
        found = [(run, rehearse(paper, run)) for run in runs]
        trained = [(run, one) for run, one in found if one is not None]
        others = {run.experiment for run, one in found if one is None}
        assert trained and others == COMPUTED[key]
        for run, one in trained:
            assert one.expected is None or one.fits == one.expected, (
                str(run),
                one.peak_bytes / GIB,
            )
            assert 0 < one.seconds(DEVICES["H100"]) < 100 * 24 * 3600 or not one.epochs, str(run)


def test_the_command_computes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPRO_RESULTS", str(tmp_path))
    command = command_line(monkeypatch, capsys)
    given = ("run", "adaptive/figure10", "--profile", "paper", "--rehearse", "--on")
    code, out, _ = command(*given, "A100", "--only", "strategy=best")
    assert code == 0 and "50,000 images of 32×32" in out and "A100 (ESTIMATED)" in out
    assert not any(tmp_path.iterdir())
    code, _, err = command(*given, "abacus")
    assert code == 2 and "--on is 'abacus'; choose GTX 1080, RTX 3090" in err


@pytest.mark.parametrize("profile", [(), ("--profile", "quick"), ("--profile", "smoke")])
def test_a_profile_for_a_cpu_is_not_rehearsed(profile, monkeypatch, capsys):
    command = command_line(monkeypatch, capsys)
    monkeypatch.setattr("repro.experiments.arguments.default_profile", lambda: "quick")
    code, _, err = command("run", "mbs/table1", "--rehearse", *profile)
    assert code == 2 and "add --profile gpu or paper" in err


@pytest.mark.thorough
def test_choices_are_of_the_whole_plan_when_it_is_rehearsed(monkeypatch, capsys):
    # Table 7 is arithmetic: its runs have no mini-batch to choose, nor a strategy.
    command = command_line(monkeypatch, capsys)
    given = ("run", "adaptive", "--profile", "paper", "--rehearse", "--only", "strategy=best")
    code, out, err = command(*given)
    assert code == 0, err
    assert "adaptive/figure10" in out and "adaptive/table1" not in out
    code, _, err = command(*given[:-1], "strategy=worst")
    assert code == 2 and "no run of the plan has strategy=worst" in err


@pytest.mark.parametrize(
    "given", [("--device", "cpu"), ("--dataset", "digits"), ("--address", "auto"), ("--data", ".")]
)
def test_what_it_would_ignore_is_refused(given, monkeypatch, capsys):
    command = command_line(monkeypatch, capsys)
    code, _, err = command("run", "mbs/table1", "--profile", "gpu", "--rehearse", *given)
    assert code == 2 and f"takes no {given[0]}; leave it out" in err
