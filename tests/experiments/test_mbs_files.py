"""Epochs from files: what is decoded, in which order, what is planned, and how growth is told."""

import os
import threading

import pytest
import torch
from made import OUT_OF_MEMORY
from made_mbs import CHOSEN, PAPER, plausible, results

from repro import datasets
from repro.datasets import TensorLoader
from repro.experiments.design import LONG, PROCESSES
from repro.experiments.judge import NotRun
from repro.experiments.mbs import reading, settings
from repro.experiments.mbs.files import growth_from_files

AUGMENT = {"crop_size": 16, "padding": 2, "flip": True}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return files, the images that they hold, and labels."""
    images = datasets.load("digits", image_size=48).train.images[:20].expand(-1, 3, -1, -1)
    # No two rows or columns alike: an image that is turned or mirrored would differ.
    shade = torch.arange(48, dtype=torch.uint8)
    images = images // 2 + shade + 2 * shade[:, None] // 3
    return reading.write_files(images, tmp_path_factory.mktemp("files")), images, torch.arange(20)


def test_decoded_images_are_those_written_up_to_jpegs_error(written):
    paths, images, _ = written
    apart = (reading.decoded(paths, 48).int() - images.int()).abs().float()
    assert apart.mean() < 4 and apart.amax() < 64
    other = (reading.decoded(paths[::-1], 48).int() - images.int()).abs().float()
    assert other.mean() > 10
    assert reading.decoded(paths, 16).shape == (20, 3, 16, 16)


@pytest.mark.parametrize("way", ["asked", "ahead"])
def test_files_give_the_mini_batches_of_memory_in_its_order(written, way):
    paths, _, labels = written
    resident = reading.decoded(paths, 16)
    plain = TensorLoader(resident, labels, 8, seed=3, **AUGMENT)
    loader = reading.loader_of(way, paths, resident, labels, 8, "cpu", seed=3, **AUGMENT)
    for _ in range(2):  # epochs
        pairs = list(zip(plain, loader, strict=True))
        assert [len(targets) for (_, targets), _ in pairs] == [8, 8, 4]
        for wanted, given in pairs:
            assert all(torch.equal(one, other) for one, other in zip(wanted, given, strict=True))


def test_a_mini_batch_is_decoded_while_the_one_before_it_trains(written, monkeypatch):
    paths, _, labels = written
    resident = reading.decoded(paths, 16)
    decode, by = reading.decoded, []
    begun = [threading.Event() for _ in range(3)]

    def watched(chosen, side):
        by.append(threading.current_thread())
        begun[len(by) - 1].set()
        return decode(chosen, side)

    monkeypatch.setattr(reading, "decoded", watched)
    for way in ("asked", "ahead"):
        by.clear()
        for event in begun:
            event.clear()
        loader = reading.loader_of(way, paths, resident, labels, 8, "cpu", **AUGMENT)
        for number, _ in enumerate(loader):  # the body trains the mini-batch `number`
            if way == "ahead" and number < 2:
                assert begun[number + 1].wait(10)
            assert len(by) == (number + 1 if way == "asked" else min(number + 2, 3))
        assert (threading.main_thread() in by) == (way == "asked")


def test_a_file_that_was_read_leaves_the_page_cache(written):
    paths, _, _ = written
    paths[0].read_bytes()
    if reading.uncached_share(paths[:1]) is None:
        pytest.skip("this system does not say what its page cache holds")
    assert reading.uncached_share(paths[:1]) == 0
    assert reading.read_uncached(paths[0]) == paths[0].read_bytes()
    reading.read_uncached(paths[0])
    # A file system in memory has no cache to leave.
    assert reading.uncached_share(paths[:1]) in (0, 1)


@pytest.mark.parametrize("error", [BlockingIOError, OSError])
def test_what_the_system_says_of_its_cache_is_told(written, monkeypatch, error):
    def refused(*_):
        raise error

    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "preadv", refused, raising=False)
    assert reading.uncached_share(written[0]) == (1.0 if error is BlockingIOError else None)


def test_an_epoch_of_every_way_trains_alike(monkeypatch):
    (run,) = PAPER.artefacts["files"].runs("smoke", CHOSEN)
    seen = {}

    def fit(model, step, loader, *, epochs, device):
        own = [(inputs.double().sum().item(), len(targets)) for inputs, targets in loader]
        seen.setdefault(len(own), []).append(own)

    monkeypatch.setattr(reading, "fit", fit)
    options = dict(run.config["dataset"])
    data = datasets.load(options.pop("name"), **options)
    outcome = reading.file_epochs(run.config, 0, data, "cpu")
    assert set(outcome.timings) == set(run.config["ways"]) and outcome.metrics["files"] == 64
    assert set(seen) == {1, 2}  # mini-batches of 64 and 32
    for epochs in seen.values():
        assert len(epochs) == 9  # three ways, each warmed up and timed twice
        assert all(sorted(epochs).count(own) == 3 for own in epochs)  # each epoch's own order


@pytest.mark.parametrize(
    ("profile", "sizes", "stored", "seen", "seeds"),
    [
        ("smoke", {32, 64}, 48, 16, (0,)),
        ("quick", {32, 512}, 224, 16, (0,)),
        (LONG, {32, 512}, 224, 16, PROCESSES),
        ("gpu", {32, 1024}, 224, 224, (0,)),
        ("paper", {32, 1024}, 224, 224, (0,)),
    ],
)
def test_what_is_planned(profile, sizes, stored, seen, seeds):
    (run,) = PAPER.artefacts["files"].runs(profile, CHOSEN)
    config = run.config
    assert run.seeds == seeds
    assert {(mini, way) for mini, _, way in config["ways"].values()} == {
        (size, way) for size in sizes for way in settings.READINGS
    }
    assert {micro for _, micro, _ in config["ways"].values()} == {16}
    assert config["train_samples"] == max(sizes)
    assert (config["dataset"]["image_size"], config["augment"]["crop_size"]) == (stored, seen)
    if profile == "gpu":
        assert config["model"] == {"name": "resnet50"} and config["benchmark"]


def world(growth, uncached=1.0):
    """Make epochs that grow so by way of reading; all of a process are slow alike."""

    def make(run, seed):
        times = {
            name: (growth[way] if mini > 32 else 1.0) * (1 + seed / 10)
            for name, (mini, _, way) in run.config["ways"].items()
        }
        told = plausible(run, seed)
        return {
            "metrics": told["metrics"] | {"uncached": uncached},
            "timings": {
                name: {"samples_s": [s, 1.01 * s, 0.99 * s], "warmup": 1}
                for name, s in times.items()
            },
        }

    return make


GROWTH = {"memory": 1.0, "ahead": 1.5, "asked": 1.1}


@pytest.mark.parametrize(
    ("profile", "trials"), [("quick", "rounds"), (LONG, "processes"), ("gpu", "rounds")]
)
def test_growth_is_of_each_way_of_reading(profile, trials):
    found = growth_from_files(results("files", world(GROWTH), profile))
    assert {way: gap.shown(gap.mean) for way, gap in found.items()} == {
        "memory": "×1.000", "ahead": "×1.500", "asked": "×1.100"}  # fmt: skip
    assert {gap.trials for gap in found.values()} == {trials}
    # What a process is slower by falls out of its ratio.
    assert all(gap.error < 1e-9 for gap in found.values())


def test_the_table_has_growth_beside_the_papers():
    rows = PAPER.artefacts["files"].table(results("files", world(GROWTH), "gpu"))
    assert list(rows["mini-batches"]) == ["32, 1024"] * 3 and list(rows["n"]) == [3] * 3
    assert [cell[:6] for cell in rows["ours, larger / smaller"]] == ["×1.000", "×1.500", "×1.100"]
    assert set(rows["paper, larger / smaller"]) == {"×1.038"}  # 238.2 / 229.4


@pytest.mark.parametrize(
    ("uncached", "told"),
    [
        (1.0, "100 % not in the page cache"),
        (0.0, "from the page cache and no disk"),
        (None, "perhaps from the page cache"),
    ],
)
def test_the_caption_says_what_the_files_are_and_where_they_came_from(uncached, told):
    artefact = PAPER.artefacts["files"]
    said = artefact.caption(results("files", world(GROWTH, uncached), "quick"))
    assert told in said and "512 files of our own: JPEG, 224 px, 8 kB" in said
    assert "STAND-IN: digits" in said and "SIMULATED" not in said


@pytest.mark.parametrize("outcome", [None, OUT_OF_MEMORY])
def test_without_records_there_is_no_growth(outcome):
    found = results("files", lambda run, seed: outcome)
    with pytest.raises(NotRun):
        growth_from_files(found)
    assert set(PAPER.artefacts["files"].table(found)["ours, larger / smaller"]) == {"not run"}
