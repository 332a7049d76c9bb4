"""Which of the five, and when: sentences whose numbers are those of the records. (Part 3)"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from repro.experiments.design import Chosen, Exhibit, Run, claims_of
from repro.experiments.judge import NotRun
from repro.experiments.query import Results
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
from repro.experiments.view import caption
from repro.report import DASH

LIMIT_FIGURE, ACCURACY_FIGURE = "Part 1 (together/limit)", "Part 2 (together/accuracy)"
NOT_RUN = "not run yet"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return all runs of both parts: the page computes nothing of its own."""
    return [*under_limit(profile), *trainings(profile, chosen)]


def _speeds(results: Results, mode: str, where: str | None = None) -> str:
    """Say the speed kept on each network, and at how many times what fits.

    Where another way is named, it is at the largest that the other one trains, on its networks.
    """
    kept = []
    for network in NETWORKS:
        by_multiple = points(results, network, mode)
        fitting = [m for m, point in points(results, network, where or mode).items() if point.fits]
        last = by_multiple.get(max(fitting, default=0))
        if last is not None and last.speed is not None:
            kept.append(f"{network} {last.speed:.2f} at {max(fitting)}×")
    return f"of undivided images/s: {', '.join(kept)}" if kept else f"speed: {NOT_RUN}"


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
    """Name the networks on which a way does not fit, and from which mini-batch on."""
    by_network = {network: points(results, network, mode) for network in NETWORKS}
    known = {network: tried for network, tried in by_network.items() if tried}
    if not known:
        return NOT_RUN
    ends = []
    for network, tried in known.items():
        if failed := [multiple for multiple in tried if tried[multiple].fits is False]:
            ends.append(f"{network} at {min(failed)}×")
    if not ends:
        return f"fits on all networks up to {max(max(tried) for tried in known.values())}×"
    return "does not fit on " + ", ".join(ends)


def _accuracy(results: Results, strategy: str) -> str:
    """Say a strategy's accuracy less the fixed small batch's, with its interval."""
    try:
        return f"{accuracy.less(results, strategy, 'fixed')} over the fixed small batch"
    except NotRun as missing:
        return f"not compared: {missing}" if accuracy.searched(results) else NOT_RUN


def _gives(results: Results, strategy: str) -> str:
    """Say the same, and the updates and the simulated time over the fixed small batch's."""
    said = _accuracy(results, strategy)
    try:
        updates, time = (
            accuracy.over(results, strategy, "fixed", name) for name in ("updates", "parallel")
        )
    except NotRun:
        return said
    return f"{said}; updates over fixed: {updates}; SIMULATED time on several devices: {time}"


def _time_here(results: Results, strategy: str) -> str:
    """Say the time of a training on this machine over the fixed small batch's."""
    means = []
    for one in (strategy, "fixed"):
        ends = [accuracy.seconds(results, record) for record in accuracy.trained(results, one)]
        if not ends or not all(ends):
            return NOT_RUN
        means.append(statistics.fmean(end[-1] for end in ends if end))
    return f"{means[0] / means[1]:.2f}"


def _verdicts(results: Results, names: Sequence[str]) -> str:
    """Say what became of the claims that a row rests on."""
    parts = []
    for name in names:
        artefact, _, key = name.partition(".")
        exhibit = _EXHIBITS[artefact]
        own = results.parts.get(artefact, results)
        verdict = exhibit.judge(claims_of("together")[artefact][key], own)
        parts.append(f"{key}: {verdict.word}")
    return "; ".join(parts)


_EXHIBITS = {"limit": limit.UNDER_LIMIT, "accuracy": accuracy.ACCURACY}
Say = Callable[[Results], str]
# What it is, its question, when to take it, what it costs, when it is the wrong tool, its figure,
# the claims that say whether to take it.
_PAGE: tuple[tuple[str, str, str, Say, Say, str, tuple[str, ...]], ...] = (
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
        ("limit.streaming_keeps_speed",),
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
        ("limit.swapping_always_fits", "limit.streaming_over_swapping"),
    ),
    (
        "Checkpointing (torch's)",
        "memory",
        "a little more is needed than there is, and the gradient has to be the whole batch's",
        lambda results: _speeds(results, "checkpointing"),
        lambda results: (
            f"far beyond memory: it {_ends(results, 'checkpointing')}; BatchNorm's running "
            "statistics are updated twice"
        ),
        LIMIT_FIGURE,
        ("limit.recomputing_ends", "limit.recomputing_costs"),
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
        ("limit.larger_micro_batches",),
    ),
    (
        "μ-cuDNN's convolutions",
        "speed",
        "convolutions have to keep to a workspace; inside either method to bound memory",
        lambda results: _speeds(results, "tuned_mbs"),
        lambda results: (
            "where torch's own convolutions may take what they like: streamed by them, "
            f"{_speeds(results, 'mbs', 'tuned_mbs')}"
        ),
        LIMIT_FIGURE,
        (),
    ),
    (
        "θ-adaptive batch size",
        "accuracy and speed",
        "several devices wait for updates, and the training has epochs enough to grow in",
        lambda results: _gives(results, "theta"),
        lambda results: (
            "where one device computes, and fewer updates save little: of fixed's seconds here it "
            f"takes {_time_here(results, 'theta')}"
        ),
        ACCURACY_FIGURE,
        ("accuracy.linear_loses",),
    ),
    (
        "θ-adaptive + MBS",
        "accuracy, speed and memory",
        "the batch that θ asks for outgrows the device",
        lambda results: _gives(results, "theta_mbs"),
        lambda results: f"where memory never binds: undivided has {_accuracy(results, 'theta')}",
        ACCURACY_FIGURE,
        ("accuracy.streamed_as_undivided", "accuracy.growth_keeps_accuracy"),
    ),
    (
        "Dual-batch learning",
        "accuracy",
        "workers on a parameter server are there, and need not wait for each other",
        lambda results: _gives(results, "dual"),
        lambda results: (
            "on one device, which makes all workers' passes by itself; with cyclic resolution "
            + _gives(results, "hybrid")
        ),
        ACCURACY_FIGURE,
        ("accuracy.larger_workers",),
    ),
    (
        "Cyclic resolution + θ-adaptive",
        "speed",
        "images can be shrunk and time is what counts",
        lambda results: _gives(results, "cyclic_theta"),
        lambda results: (
            "where small images lose what classes differ in: at full resolution "
            f"{STRATEGIES['theta']} has {_accuracy(results, 'theta')}"
        ),
        ACCURACY_FIGURE,
        ("accuracy.cycling_saves",),
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
            "claims": _verdicts(results, names) or DASH,
            "figure": source,
        }
        for tool, question, when, costs, wrong, source, names in _PAGE
    ]


def facts(results: Results) -> Iterable[str]:
    """Yield what the captions of both parts say of machine, limit and data."""
    yield from limit.facts(results)
    yield from accuracy.facts(results)


DECISION = Exhibit(
    parts=("limit", "accuracy"),
    runs=runs,
    table=table,
    caption=caption(
        "What each tool gives and costs, and where it is the wrong one; numbers from the records "
        "of the figure that a row names.",
        facts,
    ),
)
