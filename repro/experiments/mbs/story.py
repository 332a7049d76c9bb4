"""What the notebook on Micro-Batch Streaming tells first."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from repro.experiments.design import Results, expectation
from repro.experiments.intervals import Gap
from repro.experiments.mbs.beyond import (
    TABLE4,
    beyond,
    gain,
    largest_trained,
    optimum,
    paper_gain,
    paper_optimum,
    reach,
)
from repro.experiments.mbs.describing import facts
from repro.experiments.mbs.sameness import initial_gap
from repro.experiments.mbs.settings import CLASSIFIERS, PAPER, ROLES, paper_rows
from repro.experiments.mbs.times import longer_step, paper_overhead
from repro.experiments.story import Effect, Look, Story
from repro.records import Record


def _results(look: Look, role: str) -> Results:
    return look("table5" if role == "U-Net" else "table4")


def _paper_reach(role: str) -> float:
    return float(paper_rows(role)[-1]["mini_batch"] / PAPER["table2"][role]["mini_batch"])


def _listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _span(numbers: Iterable[float], form: str) -> str:
    ends = sorted(numbers)
    return f"{ends[0]:{form}} to {ends[-1]:{form}}"


def beyond_memory(look: Look) -> str:
    """Say how far beyond memory mini-batches trained, and that they did not without MBS."""
    reached = {role: reach(_results(look, role), role) for role in ROLES}
    undivided = [r for role in ROLES for r in beyond(_results(look, role), role, False)]
    refused = sum(record.status == "out_of_memory" for record in undivided)
    factors = [f"{largest:g} ({role})" for role, (largest, *_) in reached.items()]
    return (
        f"Mini-batches {_listed(factors)} times as large as what fits (SIMULATED limit) trained "
        "with MBS in "
        f"{sum(done for _, done, _ in reached.values())} of "
        f"{sum(tried for *_, tried in reached.values())} runs; without MBS {refused} of "
        f"{len(undivided)} ran out of memory; the paper reached "
        f"{_listed([f'{_paper_reach(role):g}' for role in ROLES])} times."
    )


def cost(look: Look) -> str:
    """Say what time it costs to divide a mini-batch, into smaller parts and into full ones."""
    papers = [_span([paper_overhead(role, row) for role in ROLES], ".2f") for row in (0, 1)]
    halved, full = (
        [longer_step(_results(look, role), role, way) for role in ROLES]
        for way in ("halved", "doubled")
    )
    lowest, highest = (pick(halved, key=lambda gap: gap.mean) for pick in (min, max))
    return (
        f"Two halves of a mini-batch that fits take {replace(lowest, digits=2)} to "
        f"{replace(highest, digits=2)} of the time of the whole one, by the network, ×{papers[0]} "
        f"in the paper; two micro-batches of its full size ×{_ratios(full)} of its time a sample, "
        f"×{papers[1]} in the paper."
    )


def _ratios(gaps: Iterable[Gap]) -> str:
    return _span([Effect.of("", None, gap).ours or 0.0 for gap in gaps], ".2f")


def accuracy(look: Look) -> str:
    """Say whether MBS keeps the accuracy, and what larger mini-batches do to it."""
    results = look("table4")
    words = {
        claim.key: TABLE4.judge(claim, results, expectation("mbs", "table4", claim.key)).word
        for claim in TABLE4.claims
    }
    role = CLASSIFIERS[0]
    size, candidates = optimum(results, role)
    largest = largest_trained(results, role)
    best = _short(gain(results, role, size), candidates)
    return (
        f"MBS changes the accuracy of {role} by {_short(initial_gap(results, role))} points at the "
        f"mini-batch that fits, by {best} at the best larger one (paper "
        f"{paper_optimum(role):+.1f}) and by {_short(gain(results, role, largest))} at the largest "
        f"(paper {paper_gain(role, largest):+.1f}). Of all networks, that it stays the same is "
        f"{words['same_result']}, that larger ones gain {words['optimum_beyond']}."
    )


def _short(gap: Gap, candidates: int = 1) -> str:
    """Return a gap with one digit; of the best of several, with the interval that its claim has."""
    return replace(gap, digits=1, unit="").text(1 - 0.05 / candidates)


def setup(look: Look) -> Iterable[str]:
    """Yield what all artefacts share."""
    records: dict[str, Record] = {}
    tables = (f"table{number}" for number in range(1, 6))
    for name in (*tables, "normalisation", "figure2", "batchnorm"):
        records |= {record.identity: record for record in look(name).records}
    yield from facts(list(records.values()))


def effects(look: Look) -> Iterable[Effect]:
    """Yield how far beyond memory ResNet-50 trains, and what streaming costs it."""
    role = "ResNet-50"
    results = _results(look, role)
    largest, _, _ = reach(results, role)
    label = "largest mini-batch over what fits, ResNet-50"
    yield Effect(label, _paper_reach(role), largest, None, "SIMULATED")
    yield Effect.of(
        "time of a mini-batch in two halves over whole, ResNet-50",
        paper_overhead(role, 0),
        longer_step(results, role, "halved"),
        less=True,
    )


STORY = Story(
    idea="split a mini-batch into micro-batches that fit, send one to the device while another is "
    "computed, add up their gradients so that the sum is that of the whole mini-batch",
    says="Streamed in micro-batches, a mini-batch trains with the same curves as undivided, may be "
    "32 to 128 times as large as what one card holds, and gains 1.29 to 2.44 points of accuracy or "
    "IoU beyond what fits, for 0.3 to 5.1 % more time an epoch at the best sizes.",
    promises=(
        ("a mini-batch beyond memory trains", "table4.trains_beyond"),
        ("an epoch takes little longer than in batches that fit", "table4.epoch_time"),
        ("a batch that fits takes little longer in two halves", "table4.overhead_halved"),
        ("the best batch is larger than what fits (classifiers)", "table4.optimum_beyond"),
        ("the best batch is larger than what fits (U-Net)", "table5.optimum_beyond"),
    ),
    findings=(beyond_memory, cost, accuracy),
    figure="table4",
    look_for="In the shaded sizes, which run out of memory without MBS, the paper's accuracy "
    "(hollow) first rises above the line of what fits, then falls; look whether ours (solid) "
    "leaves the line by more than its interval.",
    setup=setup,
    effects=effects,
)
