"""What the notebook on dual-batch learning tells first."""

from collections.abc import Iterable

from repro.experiments.design import expectation
from repro.experiments.dualbatch.accuracy import ENOUGH, LEAST, MOST, TABLE5, gains
from repro.experiments.dualbatch.describing import described
from repro.experiments.dualbatch.fairness import over_equal_updates, tuned_gain
from repro.experiments.dualbatch.hybrid import (
    PAPER_RATIOS,
    SAVINGS,
    TABLE8,
    TABLE10,
    cycled,
    hybrid_gain,
)
from repro.experiments.dualbatch.measured_plan import over_alone
from repro.experiments.dualbatch.plans import TABLE2, raw_plan_off
from repro.experiments.dualbatch.settings import CIFAR, IMAGENET, PAPER, K, mix
from repro.experiments.dualbatch.times import ERROR_PERCENT, raw_fits
from repro.experiments.intervals import NotRun
from repro.experiments.story import Effect, Look, Story

_EXHIBITS = {"table2": TABLE2, "table5": TABLE5, "table8": TABLE8, "table10": TABLE10}


def word(look: Look, artefact: str, key: str) -> str:
    """Return the verdict on a claim."""
    exhibit = _EXHIBITS[artefact]
    (claim,) = (claim for claim in exhibit.claims if claim.key == key)
    return exhibit.judge(claim, look(artefact), expectation("dualbatch", artefact, key)).word


def saving(look: Look) -> str:
    """Say what cycling the resolution saves real workers."""
    ratios = [
        f"{gap} of the time at {role}'s resolutions (paper ×{PAPER_RATIOS[role]:.2f}): "
        f"{word(look, artefact, 'saving')}"
        for role, artefact in ((IMAGENET, "table10"), (CIFAR, "table8"))
        for gap, _ in [cycled(look(artefact), role)]
    ]
    return (
        "Two real workers, on SYNTHETIC images, that cycle the resolution take "
        f"{'; '.join(ratios)}."
    )


def gain(look: Look) -> str:
    """Say what dual batches gain in accuracy, and that it is or is not decided."""
    gaps = [gains(look("table5"), k)[mix(n)][0] for k in K for n in ENOUGH]
    ran = [gap for gap in gaps if gap is not None]
    if len(ran) < len(gaps):
        raise NotRun("no records")
    record = look("table5").need("train", n_small=0)
    epochs = sum(count for count, _ in record.config["stages"])
    above = sum(gap.interval()[0] > 0 for gap in ran)
    low, high = (end(gap.mean for gap in ran) for end in (min, max))
    equal = [over_equal_updates(look("table5"), k)[mix(3)] for k in K]
    mixing = " and ".join(str(gap) for gap, _ in equal)
    papers = " and ".join(f"{paper:+.1f}" for _, paper in equal)
    tuned = tuned_gain(look("rates"), 3)
    at_own = f" At a rate tuned for each, three gain {tuned} over none." if tuned else ""
    return (
        f"After {epochs:g} epochs two small-batch workers or more gain {low:+.1f} to {high:+.1f} "
        f"points of accuracy (paper {LEAST:+.1f} to {MOST:+.1f}), with {above} of {len(ran)} "
        f"intervals above 0: {word(look, 'table5', 'gain')}; the hybrid scheme with three gains "
        f"{hybrid_gain(look('table8'))} (paper {PAPER['claims']['cifar_gain']:+.1f}): "
        f"{word(look, 'table8', 'gain')}. Over as many updates of one size, which four small-batch "
        f"workers make, three gain {mixing} (paper {papers}).{at_own}"
    )


def equations(look: Look) -> str:
    """Say what the paper's equations give of the paper's own numbers."""
    errors = raw_fits(look("figure4"))["TensorFlow"]
    return (
        "Equations 4 to 8 give the paper's plans for a ratio b / a that is chosen to give them: "
        f"{word(look, 'table2', 'equations')}; for its authors' raw times batch sizes are up to "
        f"{100 * raw_plan_off(look('table2')):.1f} % off, and equation 2 errs by up to "
        f"{100 * errors['largest_error']:.1f} % of an epoch (the paper: {ERROR_PERCENT:g} %)."
    )


def setup(look: Look) -> Iterable[str]:
    """Yield what captions leave out."""
    artefacts = ("table5", "table8", "synchronisation", "flatness", "own_plan", "engines", "table2")
    names = (*artefacts, "figure3", "figure13", "table10")
    records = {record.key: record for name in names for record in look(name).records}
    yield from described(list(records.values()))


def effects(look: Look) -> Iterable[Effect]:
    """Yield what cycling the resolution saves, and what small batches cost."""
    gap, _ = cycled(look("table10"), IMAGENET)
    ratio = PAPER_RATIOS[IMAGENET]
    yield Effect.of("time with the resolution cycled over not (ImageNet's)", ratio, gap, less=True)
    most = max(K)
    cost = over_alone(look("own_plan")).get(most)
    if cost is not None:
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
    promises=(
        ("cycling the image size saves time", "table10.saving"),
        ("mixing batch sizes gains accuracy over large batches", "table5.gain"),
        ("both together gain accuracy over large batches", "table8.gain"),
        ("mixing ends in a flatter minimum than large batches", "flatness.dual_flatter"),
    ),
    findings=(gain, saving, equations),
    figure="table5",
    look_for="In the upper left our gains of accuracy (solid) should lie above 0 as the paper's "
    "do (hollow), and highest at three small-batch workers; an interval that reaches 0 leaves the "
    "gain open. Below, how our trainings came there.",
    setup=setup,
    effects=effects,
)
