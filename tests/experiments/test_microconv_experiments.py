"""The experiments of μ-cuDNN at toy scale: what they measure."""

import copy

import pytest
import torch
from torch import nn

from repro.experiments.microconv import experiments, measured, runs
from repro.measure import machine as machine_module
from repro.microconv import Candidate, best_division, micro_batch_sizes

MIB = 2**20


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keep from tests that follow what would hold for the whole process."""
    monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(experiments, "caches", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_divisions_of_conv2_that_were_run():
    run = runs.conv2("smoke")
    metrics = experiments.candidates(run.config, 0, None, "cpu").metrics
    cells = [(row["limit_mib"], row["policy"]) for row in metrics["checked"]]
    assert sorted(cells) == sorted((limit, p) for limit in (8, 64) for p in runs.POLICIES)
    listed = metrics["kernels"][0]["candidates"]
    for row in metrics["checked"]:
        assert sum(size for size, _ in row["parts"]) == 4
        sizes = micro_batch_sizes(4, row["policy"])
        ways = {size: [Candidate(*way) for way in listed[str(size)]] for size in sizes}
        best = best_division(4, ways, row["limit_mib"] * MIB)
        assert row["predicted_s"] == pytest.approx(best.time_s) and row["time_s"] > 0
    # The golden rerun derives from the measured times what was derived then.
    again = measured.divided_again(run.config, metrics)
    assert again["infeasible_at_64_mib"] == metrics["infeasible_at_64_mib"] == 0
    for row, before in zip(again["checked"], metrics["checked"], strict=True):
        assert [list(part) for part in row["parts"]] == before["parts"]


def test_it_starts_from_an_empty_cache_and_leaves_its_own():
    (run,) = runs.alexnet_kernels("smoke", "undivided")
    first, again = (experiments.candidates(run.config, 0, None, "cpu") for _ in range(2))
    assert first.metrics["measured"] == again.metrics["measured"] > 0
    assert first.metrics["checked"] == []
    (cache,) = experiments.caches.values()
    conv2 = runs.conv2("smoke").config | {"policy": "undivided"}
    experiments.candidates(conv2, 0, None, "cpu")  # a layer keeps its times to itself
    experiments.network(runs.Cell(8).run("smoke").config, 0, None, "cpu")
    assert list(experiments.caches.values()) == [cache]


def test_threads_are_put_back_after_an_error(monkeypatch):
    def refuse(*arguments, **options):
        raise KeyboardInterrupt

    torch.set_num_threads(3)
    monkeypatch.setattr(experiments, "tune", refuse)
    with pytest.raises(KeyboardInterrupt):
        experiments.cluster(runs.cluster("smoke").config, 0, None, "cpu")
    assert torch.get_num_threads() == 3


def test_differences():
    config = runs.Cell(8, role="ResNet-50").run("smoke").config
    one, images, labels = experiments.build_network(config, "cpu")
    other = copy.deepcopy(one)
    assert experiments.difference(one, other, images, labels) == (0.0, 0.0)
    with torch.no_grad():
        next(one.parameters())[0].mul_(-1.5)
    loss, gradient = experiments.difference(one, other, images, labels)
    assert loss > 1e-6 and gradient > 1e-3
    dropout = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 10))
    images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 3])
    same = experiments.difference(dropout, copy.deepcopy(dropout), images, labels)
    assert same == (0.0, 0.0)  # the same dropout on both sides
