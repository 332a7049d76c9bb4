"""What the checker must flag, what it must not, and what the same omissions do to numbers."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simulated_device.checking import RaceError, checked, deferred

SEEDS = [None, *range(12)]  # as late as possible, and other legal orders


def new(value: float = 1.0, size: int = 1000) -> torch.Tensor:
    tensor = torch.full((size,), value, device="sim:0")
    torch.sim.synchronize()
    return tensor


def pinned(value: float = 1.0, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value, pin_memory=True)


def to_be_read():
    """Return a tensor, another to add it to, and a stream on which both may be used."""
    x, side = new(), torch.sim.Stream()
    y = torch.zeros_like(x)
    side.wait_stream(torch.sim.current_stream())
    return x, y, side


# Programs on two streams, each with one omission that `correct` does not make; what they return
# is right only where nothing is missing.


def event_wait(correct):
    """A stream reads what another writes."""
    x, side = new(), torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x.mul_(3)
        done = side.record_event()
    if correct:
        torch.sim.current_stream().wait_event(done)
    y = x + 1
    return y.cpu(), 4.0


def wait_before_overwriting(correct):
    """A stream overwrites what another still reads."""
    x, y, side = to_be_read()
    with torch.sim.stream(side):
        y.add_(x)
    if correct:
        torch.sim.current_stream().wait_stream(side)
    x.fill_(7)
    torch.sim.current_stream().synchronize()
    side.synchronize()
    return y.cpu(), 1.0


def event_recorded_too_early(correct):
    """A stream waits for an event that was recorded before what it needs."""
    x, side = new(), torch.sim.Stream()
    done = torch.sim.Event()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x.mul_(3)
        if not correct:
            done.record()
        x.add_(1)
        if correct:
            done.record()
    torch.sim.current_stream().wait_event(done)
    return (x + 0).cpu(), 4.0


def record_stream(correct):
    """Memory is freed, and handed out again, while another stream reads it."""
    x, y, side = to_be_read()
    with torch.sim.stream(side):
        y.add_(x)
    if correct:
        x.record_stream(side)
    del x
    new_one = torch.full((1000,), 9.0, device="sim:0")
    torch.sim.synchronize()
    assert float(new_one[0]) == 9
    return y.cpu(), 1.0


def memory_for_a_side_stream(correct):
    """Memory that the main stream may still use, as it freed it, is written by a side stream."""
    side = torch.sim.Stream()
    x = new(5.0)
    y = x * 2
    del x
    z = torch.empty(1000, device="sim:0")  # where x was
    if correct:
        side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        z.fill_(1)
    side.synchronize()
    return y.cpu(), 10.0


def host_reads_a_copy(correct):
    """The host reads pinned memory into which a copy is under way."""
    x, there = new(3.0), pinned(0.0)
    there.copy_(x, non_blocking=True)
    if correct:
        torch.sim.current_stream().synchronize()
    return there.clone(), 3.0


def host_reads_what_to_made(correct):
    """Likewise, by `to`, which pins what it makes."""
    there = new(3.0).to("cpu", non_blocking=True)
    if correct:
        torch.sim.synchronize()
    return torch.tensor(there.tolist()), 3.0


def host_writes_a_source(correct):
    """The host writes pinned memory from which a copy is under way."""
    here, x = pinned(3.0), new(0.0)
    x.copy_(here, non_blocking=True)
    if correct:
        torch.sim.current_stream().record_event().synchronize()
    here.numpy()[:] = 5
    return x.cpu(), 3.0


def side_stream_in_backward(correct):
    """The main stream uses gradients of which a side stream's hook makes another."""
    weight, side = new().requires_grad_(), torch.sim.Stream()
    copies = torch.zeros(1000, device="sim:0")
    torch.sim.synchronize()

    def hook(grad):
        side.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(side):
            copies.add_(grad)
        grad.record_stream(side)

    weight.register_hook(hook)
    (weight * 4).sum().backward()
    if correct:
        torch.sim.current_stream().wait_stream(side)
    return (copies * 1).cpu(), 4.0


def another_device(correct):
    """A stream of one device reads what one of another writes."""
    x, other = new(2.0), torch.sim.Stream("sim:1")
    if correct:
        other.wait_stream(torch.sim.current_stream())
    y = torch.empty(1000, device="sim:1")
    x.mul_(2)
    if correct:
        other.wait_stream(torch.sim.current_stream(0))
    source = torch.sim.Stream("sim:0")
    if correct:
        source.wait_stream(torch.sim.current_stream(0))
    with torch.sim.stream(source):
        y.copy_(x)
    return y.cpu(), 4.0


PROGRAMS = {
    event_wait: "aten::mul_ (writes) on stream",
    wait_before_overwriting: "aten::fill_ (writes) on the default stream",
    event_recorded_too_early: "does not wait for stream",
    record_stream: "record_stream(stream",
    memory_for_a_side_stream: "does not wait for the default stream",
    host_reads_a_copy: "the host does not wait for the default stream",
    host_reads_what_to_made: "tolist (reads) on host",
    host_writes_a_source: "numpy (writes) on host",
    side_stream_in_backward: "does not wait for stream",
    another_device: "does not wait for the default stream of sim:0",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
class TestOmissions:
    def test_the_correct_program_is_not_flagged_and_right_in_every_order(self, sim, program):
        for order in (checked, *(partial(deferred, seed) for seed in SEEDS)):
            with order():
                result, expected = program(True)
            assert result.tolist() == [expected] * 1000

    def test_an_omission_is_flagged_named_and_gives_other_numbers_in_some_order(self, sim, program):
        wrong = 0
        for seed in SEEDS:
            with deferred(seed):
                result, expected = program(False)
            wrong += result.tolist() != [expected] * 1000
        assert wrong
        with pytest.raises(RaceError) as error, checked():
            program(False)
        told = str(error.value)
        assert PROGRAMS[program] in told
        start = program.__code__.co_firstlineno
        lines = {f"{__file__}:{start + i}" for i in range(40)}
        assert sum(told.count(line) for line in lines) >= 2  # both operations, where they are


def test_a_race_says_who_and_where(sim):
    x, side = new(), torch.sim.Stream()
    with checked(raises=False) as found:
        with torch.sim.stream(side):
            x.add_(1)
        for _ in range(3):
            y = x * 2
    race = found.races[0]
    assert found.count == 3 and len(found.races) == 1  # one place
    assert (race.first.name, race.first.writes) == ("aten::add_", True)
    assert (race.second.name, race.second.writes) == ("aten::mul", False)
    assert race.nbytes == 4000 and y is not None
    here = test_a_race_says_who_and_where.__code__.co_firstlineno
    assert race.first.line == f"{__file__}:{here + 4} in {race.first.stack[0][2]}"
    assert race.second.line.startswith(f"{__file__}:{here + 6} ")


def test_parts_of_memory_that_do_not_meet_are_free(sim):
    x, side = torch.zeros(10, 10, device=sim), torch.sim.Stream()
    torch.sim.synchronize()
    with checked():
        with torch.sim.stream(side):
            x[:5].add_(1)
            x[5:, ::2].add_(1)  # every other column
        x[5:, 1::2].mul_(2)
        torch.sim.synchronize()
    with pytest.raises(RaceError), checked():
        with torch.sim.stream(side):
            x[:, ::2].add_(1)
        x[2:3, 2:4].mul_(2)


def test_training_on_several_streams_and_threads_is_not_flagged(sim):
    """Copies ahead on one stream, the step on another, a thread that reads the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    model(torch.zeros(2, 3, 6, 6))
    model.to(sim)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    copies, steps, losses = torch.sim.Stream(), torch.sim.Stream(), []
    batches = [torch.randn(4, 3, 6, 6).pin_memory() for _ in range(4)]
    labels = torch.randint(5, (4,)).to(sim)

    def read(loss, ready):
        torch.sim.current_stream().wait_event(ready)
        loss.record_stream(torch.sim.current_stream())
        losses.append(loss.item())

    with checked():
        steps.wait_stream(torch.sim.current_stream())
        for batch in batches:
            with torch.sim.stream(copies):
                images = batch.to(sim, non_blocking=True)
                arrived = copies.record_event()
            with torch.sim.stream(steps):
                steps.wait_event(arrived)
                images.record_stream(steps)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                ready = steps.record_event()
            del images
            thread = threading.Thread(target=read, args=(loss, ready))
            thread.start()
            thread.join()
        torch.sim.current_stream().wait_stream(steps)
    assert len(losses) == 4 and all(v.isfinite().all() for v in model.state_dict().values())
