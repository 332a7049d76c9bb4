"""Any plan, live: its batch sizes, shares and factor, and what every worker does when."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from repro.dualbatch import DualBatchPlan, largest_k
from repro.experiments.dualbatch import drawings
from repro.experiments.dualbatch.grids import PAPER, WORKERS
from repro.measure import TimeModel


@dataclass(frozen=True)
class Setting:
    """What a plan is solved for: times of a device, and samples of an epoch."""

    name: str
    times: TimeModel
    samples: int


def paper_setting() -> Setting:
    """Return the setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080."""
    inferred = PAPER["inferred"]
    times = TimeModel(inferred["a"], inferred["b"])
    return Setting("ResNet-18, GTX 1080", times, PAPER["cifar_samples"])


def solve(setting: Setting, k: float, n_small: int, large_batch: int) -> DualBatchPlan | str:
    """Return the plan, or in words why there is none."""
    try:
        return DualBatchPlan.solve(
            setting.times, k, n_small, WORKERS - n_small, large_batch, setting.samples, "floor"
        )
    except ValueError as error:
        return str(error)


def describe(plan: DualBatchPlan | str) -> str:
    """Return a plan in a few words, or why there is none."""
    if isinstance(plan, str):
        return f"no such plan: {plan}"
    parts = [f"(n_S, n_L) = ({plan.n_small}, {plan.n_large}), k = {plan.k:g}"]
    if plan.n_small:
        parts.append(f"B_S = {plan.small_batch}, d_S = {plan.small_samples:,}")
    if plan.n_large:
        parts.append(f"B_L = {plan.large_batch}, d_L = {plan.large_samples:,}")
    parts.append(f"factor {plan.update_factor:.3f}")
    times = " and ".join(f"{plan.time_of(kind):.3f}" for kind in dict.fromkeys(plan.kinds))
    return "; ".join([*parts, f"predicted {times} s"])


def _steps(plan: DualBatchPlan, worker: int) -> list[tuple[float, float]]:
    kind = plan.kinds[worker]
    batch, left = plan.batch_of(kind), plan.share_of(kind)
    spans, now = [], 0.0
    while left > 0:
        seconds = plan.time_model.predict(min(batch, left))
        spans.append((now, seconds))
        now, left = now + seconds, left - batch
    return spans


def draw(plan: DualBatchPlan) -> Figure:
    """Draw the predicted steps of every worker in one epoch."""
    spans = [{"kind": kind, "steps": _steps(plan, i)} for i, kind in enumerate(plan.kinds)]
    names = [f"worker {i}, {kind}" for i, kind in enumerate(plan.kinds)]
    baseline = plan.time_model.pass_time(plan.large_batch, round(plan.samples / plan.n))
    return drawings.workers(spans, names, baseline)


def draw_choices(setting: Setting, large_batch: int, plan: DualBatchPlan | None) -> Figure:
    """Draw B_S against k for every number of small-batch workers."""
    lines = {}
    for n_small in range(1, WORKERS + 1):
        top = min(1.3, largest_k(setting.times, n_small, WORKERS - n_small, large_batch))
        points = []
        for step in range(1, 61):
            k = 1 + (top - 1) * step / 60
            found = solve(setting, k, n_small, large_batch)
            if isinstance(found, DualBatchPlan) and found.small_batch:
                points.append((k, float(found.small_batch)))
        lines[f"n_S = {n_small}"] = points
    chosen = (plan.k, float(plan.small_batch)) if plan and plan.small_batch else None
    return drawings.frontier(lines, chosen)


def draw_all(setting: Setting, large_batch: int, plan: DualBatchPlan | str) -> list[Figure]:
    """Return the figures of a plan; none where there is none."""
    if isinstance(plan, str):
        return []
    return [draw(plan), draw_choices(setting, large_batch, plan)]
