"""Which memory captured steps share, with a stand-in for CUDA's graphs."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from repro.experiments.captured import CapturedPasses, captured_step


class Graph:
    made = 0

    def __init__(self):
        self.number = Graph.made = Graph.made + 1
        self.replays = 0

    def pool(self):
        return (0, self.number) if self.given is None else self.given

    def replay(self):
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """Captures run at once, and replays do nothing."""

    @contextmanager
    def graph(graph, pool=None):
        graph.given = pool
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(Graph, "made", 0)
    for name, value in {
        "CUDAGraph": Graph,
        "graph": graph,
        "stream": nullcontext,
        "Stream": lambda *_: stream,
        "current_stream": lambda *_: stream,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_graphs_of_all_shapes_share_the_pool_of_the_first_and_keep_their_own_results(graphs):
    model = nn.Linear(3, 2)
    passes = CapturedPasses(model, nn.functional.cross_entropy)
    passes.captured = True
    step = captured_step(passes, torch.optim.SGD(model.parameters(), 0.0))
    results = {}
    for size in (4, 2, 4, 8, 2):
        results[size] = step(torch.randn(size, 3), torch.zeros(size, dtype=torch.long))
    kept = list(passes._graphs.values())
    assert [own.graph.replays for own in kept] == [2, 2, 1]
    assert kept[0].graph.given is None and {own.graph.pool() for own in kept} == {(0, 1)}
    # What is returned lives for as long as its graph, so that no other takes its memory.
    outputs = [own.loss.data_ptr() for own in kept]
    outputs += [gradient.data_ptr() for own in kept for gradient in own.gradients]
    assert len(set(outputs)) == 9
    assert CapturedPasses(model, nn.functional.cross_entropy)._pool is None


def test_rates_of_dropout_have_graphs_of_their_own_and_a_capture_is_no_training(graphs):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    passes = CapturedPasses(model, nn.functional.cross_entropy)
    passes.captured = True
    torch.manual_seed(0)
    batch = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
    drawn = torch.get_rng_state()
    for rate in (0.5, 0.1, 0.5):
        model[2].p = rate
        passes(*batch)
    assert [own.graph.replays for own in passes._graphs.values()] == [2, 1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # A capture computes nothing on a GPU; the stand-in draws once for each of the two.
    with torch.random.fork_rng():
        torch.set_rng_state(drawn)
        for _ in range(2):
            model(batch[0])
        expected = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), expected)
