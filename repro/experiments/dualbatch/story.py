"""What the notebook on dual-batch learning tells first."""

from collections.abc import Iterable

from repro.experiments.design import claims_of
from repro.experiments.dualbatch.accuracy import (
    ENOUGH,
    LEAST,
    MOST,
    TABLE5,
    accuracy_of,
    gains,
    paper_cells,
)
from repro.experiments.dualbatch.describing import described, trained
from repro.experiments.dualbatch.fairness import (
    UNTUNED,
    best_accuracy,
    best_rate,
    kept_gain,
    tuned_gain,
    untuned,
)
from repro.experiments.dualbatch.flatness import FLATNESS
from repro.experiments.dualbatch.hybrid import (
    PAPER_RATIOS,
    SAVINGS,
    TABLE8,
    TABLE10,
    cycled,
    hybrid_gain,
)
from repro.experiments.dualbatch.measured_plan import over_alone
from repro.experiments.dualbatch.settings import (
    CIFAR,
    IMAGENET,
    PAPER,
    WORKERS,
    K,
    mix,
    section51,
    section52,
)
from repro.experiments.judge import Estimate, NotRun
from repro.experiments.story import Effect, Look, Story

_EXHIBITS = {"table5": TABLE5, "table8": TABLE8, "table10": TABLE10, "flatness": FLATNESS}


def word(look: Look, artefact: str, key: str) -> str:
    """Return the verdict on a claim."""
    claim = claims_of("dualbatch")[artefact][key]
    return _EXHIBITS[artefact].judge(claim, look(artefact)).word


def saving(look: Look) -> str:
    """Say what cycling the resolution saves real workers."""
    ratios = [
        f"{cycled(look(artefact), role)} of the time at {role}'s resolutions (paper "
        f"×{PAPER_RATIOS[role]:.2f}): {word(look, artefact, 'saving')}"
        for role, artefact in ((IMAGENET, "table10"), (CIFAR, "table8"))
    ]
    return (
        "Two real workers, on SYNTHETIC images, that cycle the resolution take "
        f"{'; '.join(ratios)}."
    )


def gain(look: Look) -> str:
    """Say what trainings end with, what dual batches gain, and that it is or is not decided."""
    results, most = look("table5"), max(K)
    found = [gains(results, k)[mix(n)][0] for k in K for n in ENOUGH]
    ran = [gap for gap in found if gap is not None]
    if len(ran) < len(found):
        raise NotRun("no records")
    base = section51(results, most, 0)
    ends = [
        f"{accuracy_of(results, section51(results, most, n))} with {told} (paper "
        f"{paper_cells(most)[n]['accuracy']:.1f} %)"
        for n, told in ((0, "large batches alone"), (3, "three small-batch workers"))
    ]
    low, high = (end(gap.mean for gap in ran) for end in (min, max))
    return (
        f"Test accuracy ends at {' and at '.join(ends)}. Two small-batch workers or more gain "
        f"{low:+.1f} to {high:+.1f} points (paper {LEAST:+.1f} to {MOST:+.1f}): "
        f"{word(look, 'table5', 'gain')}. All are of {trained(base)}."
    )


def hybrid(look: Look) -> str:
    """Say what the hybrid scheme ends with and gains."""
    results, paper = look("table8"), PAPER["table8"]["hybrid"][3]["accuracy"]
    return (
        "With the resolution cycled as well, three small-batch workers end at "
        f"{accuracy_of(results, section52(results, 3, 'hybrid'))} (paper {paper:.1f} %), "
        f"{hybrid_gain(results)} over large batches alone (paper {_GAIN:+.1f}): "
        f"{word(look, 'table8', 'gain')}."
    )


def settings(look: Look) -> str:
    """Say how much of the gain of small batches depends on momentum and on the rate."""
    kept = kept_gain(look("updates"), WORKERS)
    restarted = gains(look("table5"), K[1])[mix(WORKERS)][0]
    rates = look("rates")
    ends = [
        f"{told} end at {best_accuracy(rates, n)} (×{rate:g}{f', {UNTUNED}' * untuned(rate)})"
        for n, told in ((0, "large batches alone"), (3, "three small-batch workers"))
        if (rate := best_rate(rates, n))
    ]
    if restarted is None or len(ends) < 2:
        raise NotRun("no records")
    try:
        tuned = f"Three small-batch workers gain {tuned_gain(rates, 3)} at rates tuned for each."
    except NotRun as missing:
        tuned = f"What mixing gains at rates tuned for each is not known ({missing})."
    return (
        "The gain depends on momentum and rate. Four small-batch workers gain "
        f"{restarted} where momentum begins anew in each share, and {kept} where workers keep it. "
        f"At the best of the rates tried, as multiples of the paper's, {' and '.join(ends)}. "
        f"{tuned}"
    )


def setup(look: Look) -> Iterable[str]:
    """Yield what captions leave out."""
    artefacts = ("table5", "table8", "synchronisation", "flatness", "own_plan", "engines", "table2")
    names = (*artefacts, "figure3", "figure13", "table10")
    records = {record.key: record for name in names for record in look(name).records}
    yield from described(list(records.values()))


def effects(look: Look) -> Iterable[Effect]:
    """Yield what cycling the resolution saves, and what small batches cost."""
    ours, ratio = cycled(look("table10"), IMAGENET), PAPER_RATIOS[IMAGENET]
    yield Effect.of("time with the resolution cycled over not (ImageNet's)", ratio, ours, less=True)
    most = max(K)
    cost = over_alone(look("own_plan")).get(most)
    if isinstance(cost, Estimate):
        label = f"time with both batch sizes, planned to be ×{most:g}, over large alone"
        yield Effect.of(label, most, cost, less=True)


_GAIN = PAPER["claims"]["cifar_gain"]

STORY = Story(
    idea="of several workers that train one model some take small batches, which learn better, and "
    "the others large ones, which run faster; the size of the images cycles from small to large",
    says=f"Small and large batches at once gain up to {MOST:.1f} points of accuracy on CIFAR-100 "
    f"for {100 * (max(K) - 1):.0f} % more time; with the resolution cycled as well they gain "
    f"{_GAIN:g} points and take {SAVINGS[CIFAR]:g} % less time than without cycling, on ImageNet "
    f"{SAVINGS[IMAGENET]:g} % less.",
    findings=(gain, hybrid, settings, saving),
    figure="table5",
    look_for="In the upper left our gains of accuracy (solid) should lie above 0 as the paper's "
    "do (hollow), and highest at three small-batch workers; an interval that reaches 0 leaves the "
    "gain open. Below, how our trainings came there.",
    setup=setup,
    effects=effects,
)
