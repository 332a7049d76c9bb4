"""What the notebook on Micro-Batch Streaming tells first."""

from collections.abc import Iterable
from dataclasses import replace

from repro.experiments.design import Results, claims_of
from repro.experiments.judge import Estimate, ratio
from repro.experiments.mbs.beyond import TABLE4, TABLE5, gain, means, optimum, paper_gain
from repro.experiments.mbs.describing import facts, ran_as
from repro.experiments.mbs.sameness import initial_gap, pair
from repro.experiments.mbs.settings import ROLES, best, paper_rows, trainings
from repro.experiments.mbs.times import longer_step, paper_overhead
from repro.experiments.story import Effect, Look, Story
from repro.records import Record
from repro.report import Summary


def _results(look: Look, role: str) -> Results:
    return look("table5" if role == "U-Net" else "table4")


def _span(numbers: Iterable[float], form: str) -> str:
    ends = sorted(numbers)
    return f"{ends[0]:{form}} to {ends[-1]:{form}}"


def _short(change: Estimate) -> str:
    return str(replace(change, digits=1, unit=""))


def _word(results: Results, artefact: str, key: str) -> str:
    exhibit = TABLE4 if artefact == "table4" else TABLE5
    return exhibit.judge(claims_of("mbs")[artefact][key], results).word


def accuracy(look: Look) -> str:
    """Say what ResNet-50's stand-in reaches, without and with MBS and by mini-batch."""
    role = "ResNet-50"
    results = _results(look, role)
    first = paper_rows(role)[0]
    cells = [best(results, records) for records in pair(results, role)]
    without, with_ = (Summary.of(cell).mean for cell in cells)
    initial = first["mini_batch"]
    change = _short(initial_gap(results, role))
    word = _word(results, "table4", "same_result")
    return (
        f"{ran_as(role, results.records)} reaches {without:.1f} % undivided and {with_:.1f} % with "
        f"MBS in mini-batches of {initial} (paper {first['without'][0]:.1f} and "
        f"{first['with'][0]:.1f} %): {change} points. Of all classifiers, that the accuracy stays "
        f"the same: {word}. {_larger(results, role)} Of all classifiers, that a larger mini-batch "
        f"is best: {_word(results, 'table4', 'optimum_beyond')}."
    )


def segmentation(look: Look) -> str:
    """Say what U-Net's stand-in gains by a larger mini-batch."""
    role = "U-Net"
    results = _results(look, role)
    without = Summary.of(best(results, pair(results, role)[0])).mean
    return (
        f"{ran_as(role, results.records)} reaches an IoU of {without:.1f} % undivided (paper "
        f"{paper_rows(role)[0]['without'][0]:.1f} %). {_larger(results, role)} That a larger "
        f"mini-batch is best: {_word(results, 'table5', 'optimum_beyond')}."
    )


def _larger(results: Results, role: str) -> str:
    """Say what the best mini-batch above the initial one reaches, and the largest."""
    size, reached = optimum(results, role), means(results, role)
    papers = {row["mini_batch"]: row["with"][0] for row in paper_rows(role)}
    above = {n: value for n, value in papers.items() if n > paper_rows(role)[0]["mini_batch"]}
    top = max(above, key=lambda n: above[n])
    largest = max(reached)
    return (
        f"With MBS the best larger mini-batch, {size}, reaches {reached[size]:.1f} % (paper "
        f"{papers[top]:.1f} % at {top}), {_short(gain(results, role, size))} points over "
        f"undivided (paper {paper_gain(role, top):+.1f}); the largest, {largest}, "
        f"{reached[largest]:.1f} % (paper {papers[largest]:.1f} %)."
    )


def cost(look: Look) -> str:
    """Say what time it costs to divide a mini-batch, into smaller parts and into full ones."""
    papers = [_span([paper_overhead(role, row) for role in ROLES], ".2f") for row in (0, 1)]
    halved, full = (
        [longer_step(_results(look, role), role, way) for role in ROLES]
        for way in ("halved", "doubled")
    )
    lowest, highest = (pick(halved, key=lambda found: found.mean) for pick in (min, max))
    ratios = _span([Effect.of("", None, found).ours or 0.0 for found in full], ".2f")
    return (
        f"The initial mini-batch in two halves takes {replace(lowest, digits=2)} to "
        f"{replace(highest, digits=2)} of its undivided time, by the (small) network, "
        f"×{papers[0]} in the paper; two micro-batches of its full size take ×{ratios} of it a "
        f"sample, ×{papers[1]} in the paper."
    )


def setup(look: Look) -> Iterable[str]:
    """Yield what all artefacts share."""
    records: dict[str, Record] = {}
    tables = (f"table{number}" for number in range(1, 6))
    for name in (*tables, "normalisation", "figure2", "batchnorm"):
        records |= {record.identity: record for record in look(name).records}
    yield from facts(list(records.values()))


def effects(look: Look) -> Iterable[Effect]:
    """Yield what a larger mini-batch gives U-Net, and what streaming costs ResNet-50."""
    role = "U-Net"
    results = _results(look, role)
    first, *above = paper_rows(role)
    size = optimum(results, role)
    streamed = best(results, trainings(results, role, size, True))
    change = ratio(streamed, best(results, trainings(results, role, first["mini_batch"], False)))
    yield Effect.of(
        f"IoU in the best larger mini-batch over undivided, {ran_as(role, results.records)}",
        max(row["with"][0] for row in above) / first["without"][0],
        replace(change, candidates=gain(results, role, size).candidates),
    )
    role = "ResNet-50"
    results = _results(look, role)
    yield Effect.of(
        f"time of a mini-batch in two halves over whole, {ran_as(role, results.records)}",
        paper_overhead(role, 0),
        longer_step(results, role, "halved"),
        less=True,
    )


STORY = Story(
    idea="split a mini-batch into micro-batches that fit, send one to the device while another is "
    "computed, add up their gradients so that the sum is that of the whole mini-batch",
    says="Streamed in micro-batches, a mini-batch trains with the same curves as undivided, may be "
    "32 to 128 times as large as the largest that one card holds undivided, and gains 1.29 to 2.44 "
    "points of accuracy or IoU over that one, for 0.3 to 5.1 % more time an epoch at the best "
    "sizes.",
    findings=(accuracy, cost, segmentation),
    figure="table4",
    look_for="The shaded sizes run out of memory without MBS. There the paper's accuracy (hollow) "
    "first rises above the line of the largest mini-batch that fits undivided, then falls; look "
    "whether ours (solid) leaves the line by more than its interval.",
    setup=setup,
    effects=effects,
)
