"""What do mini-batches beyond memory cost? The times of steps and epochs of Tables 4 and 5."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from repro.experiments.design import Results, one_machine
from repro.experiments.judge import Cases, Estimate, NotRun, cases, in_turns, ratio
from repro.experiments.mbs.describing import ran_as
from repro.experiments.mbs.settings import PAPER, epoch_times, paper_rows, trained, trainings


def epoch_seconds(results: Results, role: str) -> dict[tuple[int, bool], list[float]]:
    """Return seconds of an epoch by mini-batch size of the paper's rows and whether with MBS.

    Of each training the median, but of those that ran side by side; of epochs that were timed in
    turns that of each process.

    Raises:
        NotRun: They are of several machines.
    """
    if results.ok("epochs", role=role):
        # On a card one process times them, and its rounds count.
        record = results.measured("epochs", several=results.profile != "gpu", role=role)
        return {
            (mini, micro is not None): record.timings[name]["samples_s"]
            for name, (mini, micro) in record.config["ways"].items()
        }
    one_machine(trained(results, role, resolution="high"))
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    cells = {}
    for size, streamed in itertools.product(sizes, (False, True)):
        alone = [
            record
            for record in trainings(results, role, size, streamed)
            if record.config.get("timed") is not False
        ]
        cells[size, streamed] = epoch_times(alone)
    return {way: cell for way, cell in cells.items() if cell}


def longer_epoch(results: Results, role: str, size: int) -> Estimate:
    """Return the time of an epoch with MBS over that of the undivided initial mini-batch.

    Epochs that were timed in turns are compared pair by pair.

    Raises:
        NotRun: One of them has no records, or they are of several machines.
    """
    initial = PAPER["table2"][role]["mini_batch"]
    seconds = epoch_seconds(results, role)
    first, second = (seconds.get(way, []) for way in ((size, True), (initial, False)))
    if not first or not second:
        raise NotRun("no records")
    label = f"{ran_as(role, results.records)}, {size}"
    if results.ok("epochs", role=role):
        trials = "rounds" if results.profile == "gpu" else "processes"
        return replace(in_turns(first, second, 3, trials=trials), label=label)
    return replace(ratio(first, second, 3), label=label)


def longer_step(results: Results, role: str, way: str) -> Estimate:
    """Return the time of a sample by a way over that in the undivided initial mini-batch.

    Args:
        results: With the steps that were timed in turns.
        role: The network.
        way: ``halved``, the same mini-batch in two, or ``doubled``, two of it.

    Raises:
        NotRun: They were not timed.
    """
    record = results.measured("overhead", role=role)
    initial = record.config["mini_batch"]
    sizes = {"undivided": initial, "halved": initial, "doubled": 2 * initial}
    per_sample = {
        name: [seconds / samples for seconds in record.timings[name]["samples_s"]]
        for name, samples in sizes.items()
    }
    processes = results.processes("overhead", role=role)
    repeats = len(processes[0].timings[way]["samples_s"])
    several = len(processes) > 1
    by = f" by each of {len(processes)} processes" if several else ""
    trials = "processes" if several else "rounds"
    found = in_turns(per_sample[way], per_sample["undivided"], 3, trials=trials)
    return replace(found, label=ran_as(role, [record]), note=f"{repeats} in turns{by}")


def paper_overhead(role: str, row: int) -> float:
    """Return the paper's time of a row with MBS over the undivided first one."""
    rows = paper_rows(role)
    return float(rows[row]["time_with"][0]) / float(rows[0]["time_without"][0])


def overhead_halved(results: Results, roles: Sequence[str]) -> Cases:
    """Compare steps in two halves with undivided ones."""
    return cases(roles, lambda role: longer_step(results, role, "halved"))


def overhead_sizes(results: Results, roles: Sequence[str]) -> Cases:
    """Compare epochs of the sizes that section 4.3.3 names."""
    named = PAPER["overhead_percent"]
    sizes = [f"{role}, {size}" for role in roles for size in named.get(role, {})]
    return cases(sizes, lambda case: _epoch_of(results, case))


def epoch_time(results: Results, roles: Sequence[str]) -> Cases:
    """Compare epochs of every mini-batch above the initial one that was timed."""

    def above(role: str) -> list[str]:
        initial = PAPER["table2"][role]["mini_batch"]
        timed = sorted(size for size, streamed in epoch_seconds(results, role) if streamed)
        return [f"{role}, {size}" for size in timed if size > initial]

    sizes = [case for role in roles for case in above(role) or [role]]
    return cases(sizes, lambda case: _epoch_of(results, case))


def _epoch_of(results: Results, case: str) -> Estimate:
    role, _, size = case.partition(", ")
    if not size:
        raise NotRun("no records")
    return longer_epoch(results, role, int(size))


FASTER = "ResNet-101, 128"
SLOWER = ("ResNet-50, 128", "AmoebaNet-D, 256")  # all at the paper's best mini-batch


def resnet101_faster(results: Results) -> Cases:
    """Compare ResNet-101's epoch with the undivided one, and the undivided ones of the others.

    So that each ratio is below 1 where ResNet-101 is faster, and the others are slower.
    """

    def compare(case: str) -> Estimate:
        ours = _epoch_of(results, case)
        if case == FASTER:
            return ours
        return replace(ours, mean=-ours.mean, label=f"{ours.label}, undivided over it:")

    return cases((FASTER, *SLOWER), compare)
