"""Which of the five, and when: sentences whose numbers are those of the records. (Part 3)"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.together import accuracy, limit
from repro.experiments.together.settings import (
    BATCHNORM,
    NETWORKS,
    STRATEGIES,
    TRANSFORMER,
    points,
    trainings,
    under_limit,
)

LIMIT_FIGURE, ACCURACY_FIGURE = "Part 1 (together/limit)", "Part 2 (together/accuracy)"
NOT_RUN = "not run yet"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return all runs of both parts: the page computes nothing of its own."""
    return [*under_limit(profile), *trainings(profile, chosen)]


def _range(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(ends) + unit


def _speeds(results: Results, mode: str, where: str | None = None) -> str:
    """Say the speed kept at the largest mini-batch of each network, and what it is over.

    Where another way is named, it is at the largest that the other one trains, on its networks.
    """
    found = []
    for network in NETWORKS:
        own = points(results, network, mode)
        fitting = [m for m, point in points(results, network, where or mode).items() if point.fits]
        last = own.get(max(fitting, default=0))
        if last is not None and last.speed is not None:
            found.append((last.speed, max(fitting)))
    if not found:
        return f"speed: {NOT_RUN}"
    speed = _range([speed for speed, _ in found])
    reach = _range([times for _, times in found], digits=0)
    return f"keeps {speed} of undivided images/s at {reach} times what fits"


def _errors(results: Results, mode: str, networks: Iterable[str]) -> str:
    """Say how far gradients are from the whole mini-batch's."""
    errors = [
        last.gradient_error
        for network in networks
        if (last := limit.largest(points(results, network, mode))) is not None
    ]
    if not errors:
        return NOT_RUN
    ends = dict.fromkeys(f"{error:.1g}" for error in (min(errors), max(errors)))
    return " to ".join(ends)


def _ends(results: Results, mode: str) -> str:
    """Name the networks on which a way ends before the largest mini-batch."""
    found = {network: points(results, network, mode) for network in NETWORKS}
    known = {network: own for network, own in found.items() if own}
    if not known:
        return NOT_RUN
    ends = []
    for network, own in known.items():
        fitting = [multiple for multiple in own if own[multiple].fits]
        if len(fitting) < len(own):
            ends.append(f"{network} after {max(fitting, default=0)}×")
    return "ends on " + ", ".join(ends) if ends else "ends on none of the networks"


def _accuracy(results: Results, strategy: str) -> str:
    """Say a strategy's accuracy beside the fixed small batch's."""
    ours, fixed = (accuracy.trained(results, name) for name in (strategy, "fixed"))
    if not ours or not fixed:
        return f"accuracy: {NOT_RUN}"
    own, other = (
        statistics.fmean(accuracy.final(record, "test") for record in records)
        for records in (ours, fixed)
    )
    return f"{own - other:+.1f} points beside the fixed small batch's {other:.1f} %"


def _over_fixed(results: Results, strategy: str, name: str) -> str:
    ours, fixed = (accuracy.trained(results, one) for one in (strategy, "fixed"))
    if not ours or not fixed:
        return NOT_RUN
    own, other = (
        statistics.fmean(accuracy.final(record, name) for record in records)
        for records in (ours, fixed)
    )
    return f"{own / other:.2f}"


def _work(results: Results, strategy: str) -> str:
    updates = _over_fixed(results, strategy, "updates")
    time = _over_fixed(results, strategy, "parallel")
    return f"updates over fixed: {updates}; simulated time on four devices over fixed: {time}"


Say = Callable[[Results], str]
# What it is, its question, when to take it, what it costs, when it is the wrong tool, its figure.
_PAGE: tuple[tuple[str, str, str, Say, Say, str], ...] = (
    (
        "Micro-Batch Streaming",
        "memory",
        "the batch is wanted, the samples fit one by one: the first thing to try",
        lambda results: _speeds(results, "mbs"),
        lambda results: (
            "where layers look at the whole batch: with BatchNorm the gradient's relative error "
            f"is {_errors(results, 'mbs', BATCHNORM)}, without "
            f"{_errors(results, 'mbs', [TRANSFORMER])}"
        ),
        LIMIT_FIGURE,
    ),
    (
        "Out-of-core training",
        "memory",
        "the gradient has to be the whole batch's, BatchNorm included, or one sample does not fit",
        lambda results: (
            f"{_speeds(results, 'outofcore')}; to a file: {_speeds(results, 'outofcore_file')}"
        ),
        lambda results: (
            "where dividing by samples would do, and where one operation outgrows the budget: it "
            f"{_ends(results, 'outofcore')}"
        ),
        LIMIT_FIGURE,
    ),
    (
        "Checkpointing (torch's)",
        "memory",
        "a little more is needed than there is, and the gradient has to be the whole batch's",
        lambda results: _speeds(results, "checkpointing"),
        lambda results: (
            f"far beyond memory: it {_ends(results, 'checkpointing')}; running statistics of "
            "BatchNorm are updated twice"
        ),
        LIMIT_FIGURE,
    ),
    (
        "Checkpointing + MBS",
        "memory",
        "BatchNorm is there, and micro-batches should be larger",
        lambda results: _speeds(results, "checkpointing_mbs"),
        lambda results: (
            "without BatchNorm, where it only takes time: with it the gradient's relative error is "
            f"{_errors(results, 'checkpointing_mbs', BATCHNORM)} "
            f"(MBS alone {_errors(results, 'mbs', BATCHNORM)})"
        ),
        LIMIT_FIGURE,
    ),
    (
        "μ-cuDNN's convolutions",
        "speed",
        "convolutions have to keep to a workspace; inside either way to bound memory",
        lambda results: _speeds(results, "tuned_mbs"),
        lambda results: (
            "where torch's own convolutions are free to take what they like: streamed alone it "
            f"{_speeds(results, 'mbs', 'tuned_mbs')}"
        ),
        LIMIT_FIGURE,
    ),
    (
        "θ-adaptive batch size",
        "accuracy and speed",
        "several devices wait for updates, and the training has epochs enough to grow in",
        lambda results: f"{_accuracy(results, 'theta')}; {_work(results, 'theta')}",
        lambda results: (
            "where samples are few and one device computes: linear scaling from the start has "
            f"{_accuracy(results, 'linear')}"
        ),
        ACCURACY_FIGURE,
    ),
    (
        "θ-adaptive + MBS",
        "accuracy, speed and memory",
        "the batch that θ asks for outgrows the device",
        lambda results: f"{_accuracy(results, 'theta_mbs')}; {_work(results, 'theta_mbs')}",
        lambda results: f"where memory never binds: undivided has {_accuracy(results, 'theta')}",
        ACCURACY_FIGURE,
    ),
    (
        "Dual-batch learning",
        "accuracy",
        "workers on a parameter server are there, and need not wait for each other",
        lambda results: f"{_accuracy(results, 'dual')}; {_work(results, 'dual')}",
        lambda results: (
            "on one device, which makes all workers' passes by itself; with cyclic resolution "
            f"{_accuracy(results, 'hybrid')}; {_work(results, 'hybrid')}"
        ),
        ACCURACY_FIGURE,
    ),
    (
        "Cyclic resolution + θ-adaptive",
        "speed",
        "images can be shrunk and time is what counts",
        lambda results: f"{_accuracy(results, 'cyclic_theta')}; {_work(results, 'cyclic_theta')}",
        lambda results: (
            "where small images lose what classes differ in: at full resolution "
            f"{STRATEGIES['theta']} has {_accuracy(results, 'theta')}"
        ),
        ACCURACY_FIGURE,
    ),
)


def table(results: Results) -> list[dict[str, Any]]:
    """Return the page: a row for each tool, with the numbers of the records that are there."""
    return [
        {
            "tool": tool,
            "answers": question,
            "take it where": when,
            "what it gives and costs": costs(results),
            "the wrong tool": wrong(results),
            "figure": source,
        }
        for tool, question, when, costs, wrong, source in _PAGE
    ]


def facts(results: Results) -> Iterable[str]:
    """Yield what the captions of both parts say of machine, limit and data."""
    yield from limit.facts(results)
    yield from accuracy.facts(results)


DECISION = Exhibit(
    runs=runs,
    table=table,
    caption=caption(
        "Which tool answers which question, what it gives and costs, and when it is the wrong one. "
        "Every number is computed from the records behind the figure that the row names; of "
        "small networks, on the machine that is named.",
        facts,
    ),
)
