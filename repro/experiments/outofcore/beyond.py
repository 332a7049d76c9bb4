"""How far beyond the device's memory does ResNet-50 train, and at what speed? (Table 1)

Against training in core, against LMS (Le et al. 2019), and with and without chunks; simulated also
at our best, by packed plans with chunks of sizes that variables have.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, exactly, unsure
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import (
    Curve,
    Dots,
    Line,
    Panel,
    draw_dots,
    draw_panel,
    line_of,
)
from repro.experiments.outofcore.points import (
    NO_LINK,
    PLACES,
    Trained,
    all_hold,
    artefact,
    throughput,
    with_allocators,
)
from repro.experiments.outofcore.runs import (
    CHUNKS,
    CLAIMS,
    FITTED,
    IN_CORE,
    IN_CORE_BATCH,
    LABELS,
    LARGEST_BATCH,
    LMS_BATCH,
    MEASURED,
    MIB,
    MODES,
    PACKED_MODES,
    PEERS,
    RESNET,
    SCHEDULE,
    SIMULATED,
    TABLE,
    TO_THE_LETTER,
    faster,
    published,
)
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ways that are simulated.
OF_THE_V100 = (IN_CORE, "lms", *TO_THE_LETTER, SCHEDULE, CHUNKS, *PACKED_MODES, "bound")
FIT = 0.01  # how far simulated throughputs in core may lie from those that they are fitted to
ROW = 0.1  # how far images/s may lie below the paper's
# Batch sizes at which the paper says, or its Table 1 shows, which share of the speed is kept.
KEPT = {
    "512 with chunks": (512, CHUNKS),
    f"{LMS_BATCH} without": (LMS_BATCH, SCHEDULE),
    f"{LARGEST_BATCH} with chunks": (LARGEST_BATCH, CHUNKS),
}
_PAPERS_ROWS = {
    "lms_in_core": ("paper", "in core, P100 (Le et al.)"),
    "lms": ("paper", "LMS, P100 (Le et al.)"),
    **{mode: ("paper, V100", LABELS[mode]) for mode in MODES},
}
_TICKS = (0.5, 1, 2, 4, 8)  # batch size over the largest in core
_TOP = 1.2  # images/s over the largest in core


def table(results: Results) -> list[dict[str, Any]]:
    """Images/s by batch size: the paper's, simulated, measured here."""
    rows = []

    def add(where: str, method: str, cells: Sequence[str]) -> None:
        heads = [f"{batch} ({batch / IN_CORE_BATCH:.2g}×)" for batch in TABLE["batches"]]
        rows.append({"where": where, "method": method, **dict(zip(heads, cells, strict=True))})

    for mode, (where, method) in _PAPERS_ROWS.items():
        rates = published(mode)
        add(where, method, [f"{rates[b]:g}" if b in rates else "x" for b in TABLE["batches"]])
    for where in PLACES:
        trained = Trained(results, where)
        columns, label = _columns(trained), trained.place
        if where == MEASURED and trained.batches:
            label += f", {trained.ran}" * (trained.ran != RESNET)
            add(label, "batch size", ["" if b is None else f"N = {b}" for b in columns])
        for mode in OF_THE_V100 if where == SIMULATED else (*MODES, *TO_THE_LETTER, *PEERS):
            found = trained.points(mode)
            if found:
                add(label, LABELS[mode], [throughput(found, batch) for batch in columns])
            if found and mode == FITTED:
                fits = trained.trained(mode)
                sizes = {batch: point.row["chunk_bytes"] / MIB for batch, point in fits.items()}
                cells = [f"{sizes[b]:.0f}" if b in sizes else DASH for b in TABLE["batches"]]
                add(label, "its chunks (MiB)", cells)
    return rows


def _columns(trained: Trained) -> list[int | None]:
    """Our batch size under each of the paper's: the same, or as large over the largest in core.

    That is to 5 % or the next whole number.
    """
    columns: list[int | None] = []
    for batch in TABLE["batches"]:
        ours = batch if batch in trained.batches else None
        if ours is None and trained.base is not None:
            wanted = trained.base * batch / IN_CORE_BATCH
            near = [b for b in trained.batches if abs(b - wanted) <= max(0.5, 0.05 * wanted)]
            ours = min(near, key=lambda size: abs(size - wanted), default=None)
        columns.append(ours)
    return columns


def figure(results: Results) -> "Figure":
    """Draw how far each way trains, and at which share of the speed in core."""
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(2, 3, 11.2, 6.8)
    first, *others = axes.flat
    v100, here = Trained(results, SIMULATED), Trained(results, MEASURED)
    rows = []
    if results.first("reach", role=RESNET):
        for way in (IN_CORE, SCHEDULE, CHUNKS, "lms"):
            size = v100.largest(way)
            rows.append(Dots(LABELS[way], way, {f"{size:,}": (size, None)}, max(published(way))))
    title = f"largest batch size\n{panel(RESNET, data='SIMULATED V100')}"
    draw_dots(first, title, rows, "batch size", (128, 256, 512, 1024, 2048))
    best = "our best, beside the paper's faster way"
    measured = [_ours(here, way) for way in (*MODES, TO_THE_LETTER[0], *PEERS)]
    panels = [
        _simulated_panel(v100, "scheduling alone", (IN_CORE, SCHEDULE, "paper"), SCHEDULE),
        _simulated_panel(v100, "with chunks", (CHUNKS,), CHUNKS),
        # What no schedule beats on a V100 says nothing of the paper's LMS.
        replace(_simulated_panel(v100, "LMS (paper: P100)", ("lms",), "lms"), ceiling=()),
        _simulated_panel(v100, best, (FITTED,), FITTED),
        Panel(here.title, measured),
    ]
    for axis, shown in zip(others, panels, strict=True):
        draw_panel(axis, shown, _TOP, _TICKS)
        axis.set(xlim=(0.3, 9), xlabel="batch size over the largest in core")
        axis.set_ylabel("images/s over the\nlargest in core")
    legend_below(figure, 4)
    return figure


def _ours(trained: Trained, way: str) -> Line:
    """The share of the speed in core by how many times larger the batch is."""
    return line_of(trained, way, trained.kept, trained.base) if trained.base else Line(way, ())


def _simulated_panel(v100: Trained, what: str, ways: Sequence[str], compared: str) -> Panel:
    """Ways on the V100, simulated, beside what the paper has of one of them."""
    lines = [_ours(v100, way) for way in ways]
    shown = (IN_CORE, compared) if IN_CORE in ways else (compared,)
    lines += [Line(way, _published_shares(way), whose="paper") for way in shown]
    return Panel(f"{what}\n{v100.title}", lines, ceiling=_ours(v100, "bound").curve)


def _published_shares(way: str) -> Curve:
    """The paper's; of our best, those of its faster way."""
    rates = {b: faster(b) for b in published(CHUNKS)} if way == FITTED else published(way)
    best = max(published("lms_in_core" if way == "lms" else IN_CORE).values())
    return [(batch / IN_CORE_BATCH, rate / best) for batch, rate in rates.items()]


def larger_than_core(results: Results) -> Cases:
    """The largest batch sizes within the limit with chunks and in core, of real allocators."""
    trained = with_allocators(results, [RESNET])[RESNET]
    return {RESNET: trained.larger(CHUNKS, IN_CORE, LARGEST_BATCH / IN_CORE_BATCH)}


def larger_than_alone(results: Results) -> Cases:
    """The largest batch sizes with chunks and without."""
    trained = with_allocators(results, [RESNET])[RESNET]
    return {RESNET: trained.larger(CHUNKS, SCHEDULE, CLAIMS["over_schedule"])}


def alone_ends(results: Results) -> Cases:
    """The largest batch size without chunks over LMS's in the paper."""
    trained = with_allocators(results, [RESNET])[RESNET]
    alone = trained.largest(SCHEDULE)
    if not alone:
        raise NotRun("scheduling alone trains nothing")
    open_ = alone <= LMS_BATCH and trained.end_is_open(SCHEDULE)
    gap = (unsure if open_ else exactly)(alone / LMS_BATCH, log=True)
    note = f"{alone} is the largest that was tried" if open_ else ""
    return {RESNET: replace(gap, label=f"{RESNET}, up to {alone}", note=note)}


def speed_kept(results: Results) -> Cases:
    """The measured time of an image over its time in core."""
    here = Trained(results, MEASURED)

    def slower(name: str) -> Estimate | Exact:
        batch, mode = KEPT[name]
        own = results.select(MEASURED, role=RESNET, mode=mode)
        if here.on_cpu and not (own and all("link_share" in record.config for record in own)):
            raise NotRun(NO_LINK)
        size, point = here.at(batch, mode)
        if point is None:
            return Exact(False, f"{size} images ran out of memory")
        label = f"{here.ran}, {size} {name.partition(' ')[2]}: time of an image"
        return replace(here.slowdown(point), label=label)

    return cases(KEPT, slower)


def faster_with_chunks(results: Results) -> Cases:
    """The speeds with chunks and without, on a CPU each over the reference of the same round."""
    here = Trained(results, MEASURED)
    size, alone = here.at(LMS_BATCH, SCHEDULE)
    _, chunks = here.at(LMS_BATCH, CHUNKS)
    if chunks is None:
        return {"images/s": Exact(False, f"{size} images ran out of memory with chunks")}
    if alone is None:
        raise NotRun(f"without chunks {size} images ran out of memory")
    label = f"{here.ran}, images/s at {size}"
    return {"images/s": replace(here.speed(chunks, alone), label=label)}


def larger_than_peers(results: Results) -> Cases:
    """The largest batch sizes over those of what people use today; the note has the speed."""
    here = Trained(results, MEASURED)

    def over(mode: str) -> Estimate | Exact:
        # Any larger batch size will do: what was not tried of ours need not be.
        found, size = here.larger(CHUNKS, mode, 1.01), here.largest(mode)
        theirs, ours = here.points(mode).get(size), here.points(CHUNKS).get(size)
        if isinstance(found, Exact) or theirs is None or ours is None:
            return found
        told = f"at {size} swapping is {here.speed(ours, theirs)} as fast"
        return replace(found, note="; ".join([*filter(None, [found.note]), told]))

    tried = [mode for mode in PEERS if here.points(mode)]
    if not tried:
        raise NotRun("no records")
    return cases(tried, over)


@check(
    f"In core, simulated throughputs are the paper's to {100 * FIT:g} %, since the V100's rates "
    "are fitted to them"
)
def fitted(results: Results) -> tuple[bool, str]:
    """Whether the fitted line passes through the published throughputs."""
    papers = published(IN_CORE)
    return all_hold(
        {
            f"{point.images_per_s:.1f} for {papers[batch]:g} at {batch}": abs(
                point.images_per_s / papers[batch] - 1
            )
            <= FIT
            for batch, point in Trained(results, SIMULATED).trained(IN_CORE).items()
            if batch in papers
        }
    )


@check("No simulated schedule is faster than what the bound allows")
def within_bound(results: Results) -> tuple[bool, str]:
    """How close each way comes to what no schedule beats."""
    v100 = Trained(results, SIMULATED)
    best = v100.trained("bound")
    shares = {
        f"{LABELS[mode]} at {batch}": point.images_per_s / best[batch].images_per_s
        for mode in OF_THE_V100[1:-1]
        for batch, point in v100.trained(mode, beyond=True).items()
        if batch in best
    }
    return all_hold({f"{name} {s:.0%} of it": s <= 1 + 1e-6 for name, s in shares.items()})


@check(
    "Simulated allocators serve larger batch sizes with chunks than in core, than LMS's and than "
    "those of scheduling alone"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """The largest batch sizes; LMS's is of the pairs of distances that hold least."""
    found = {}
    for way, paper in (
        (IN_CORE, LARGEST_BATCH / IN_CORE_BATCH),
        ("lms", CLAIMS["over_lms"]),
        (SCHEDULE, CLAIMS["over_schedule"]),
    ):
        most, other, over = Trained(results, SIMULATED).reach_over(CHUNKS, way)
        found[f"{most} over {other} {LABELS[way]} {over}, paper ×{paper:.2f}"] = most > other
    return all_hold(found)


@check(
    f"Simulated, LMS trains {LMS_BATCH} images at {100 * CLAIMS['lms_speed_kept']:g} % of the "
    "speed in core (to 5 points), and scheduling alone trains no more images (to 3 %)"
)
def simulated_rivals(results: Results) -> tuple[bool, str]:
    """How strong our LMS, and our schedule without chunks, are beside the paper's."""
    v100 = Trained(results, SIMULATED)
    _, point = v100.at(LMS_BATCH, "lms")
    if point is None or point.relative is None:
        return False, f"LMS trains no {LMS_BATCH} images"
    kept, alone = point.relative, v100.largest(SCHEDULE)
    near = abs(kept - CLAIMS["lms_speed_kept"]) <= 0.05
    return all_hold(
        {
            f"LMS up to {v100.largest('lms')}, {kept:.1%} kept at {LMS_BATCH}": near,
            f"scheduling alone up to {alone}": alone <= 1.03 * LMS_BATCH,
        }
    )


@check(
    f"Simulated, chunks make the schedule faster at {LMS_BATCH} images, and our changes make it "
    "faster than the paper's to the letter wherever both train beyond the core"
)
def simulated_gains(results: Results) -> tuple[bool, str]:
    """Images/s over images/s."""
    v100 = Trained(results, SIMULATED)
    alone, chunks = (v100.at(LMS_BATCH, mode)[1] for mode in (SCHEDULE, CHUNKS))
    if alone is None or chunks is None:
        return False, f"{LMS_BATCH} images ran out of memory"
    over = v100.speed(chunks, alone)
    ours = _simulated_over(v100, "paper", "our changes ")
    return all_hold({f"with chunks at {LMS_BATCH} {over}": over.mean > 0, **ours})


def _simulated_over(v100: Trained, other: str, what: str = "") -> dict[str, bool]:
    """Whether scheduling alone is faster than another way, wherever both train beyond the core."""
    ours = v100.trained(SCHEDULE)
    gaps = {
        batch: v100.speed(ours[batch], theirs)
        for batch, theirs in v100.trained(other, beyond=True).items()
        if batch in ours
    }
    return {f"{what}at {batch} {gap}": gap.mean > 0 for batch, gap in gaps.items()}


@check(
    f"Simulated, the schedule keeps {100 * CLAIMS['speed_kept']:g} % of the speed in core at "
    f"{LARGEST_BATCH} images with chunks, {100 * CLAIMS['speed_kept_928']:g} % at {LMS_BATCH} "
    "without"
)
def simulated_speed(results: Results) -> tuple[bool, str]:
    """Over the times in core, which are the paper's; beside them what no schedule beats."""
    v100, found = Trained(results, SIMULATED), {}
    for batch, mode, share in (
        (LARGEST_BATCH, CHUNKS, CLAIMS["speed_kept"]),
        (LMS_BATCH, SCHEDULE, CLAIMS["speed_kept_928"]),
    ):
        _, point = v100.at(batch, mode)
        best = v100.points("bound").get(batch)
        kept = point.relative if point is not None else None
        text = f"{batch} {LABELS[mode]}: " + ("out of memory" if kept is None else f"{kept:.0%}")
        if best is not None and best.relative is not None:
            text += f", no schedule more than {best.relative:.0%}"
        found[text] = kept is not None and kept >= share
    return all_hold(found)


@check(
    "Simulated, the schedule is faster than LMS at its best distances wherever both train beyond "
    f"the core, and with chunks at {LARGEST_BATCH} images than LMS at {LMS_BATCH}"
)
def simulated_over_lms(results: Results) -> tuple[bool, str]:
    """Images/s over images/s."""
    v100 = Trained(results, SIMULATED)
    if v100.base is None:
        raise NotRun("nothing fits in core")
    found = _simulated_over(v100, "lms")
    ours, theirs = v100.at(LARGEST_BATCH, CHUNKS)[1], v100.at(LMS_BATCH, "lms")[1]
    if ours is not None and theirs is not None:
        over = v100.speed(ours, theirs)
        found[f"at {LARGEST_BATCH} over LMS at {LMS_BATCH} {over}"] = over.mean > 0
    return all_hold(found)


@check(
    "Our best, packed plans with fitted chunks, simulates at no more than "
    f"{100 * ROW:g} % below the paper's images/s, with chunks or without, wherever the bound allows"
)
def rows_reached(results: Results) -> tuple[bool, str]:
    """Each batch size beside the paper's faster way, and what mapping comes to."""
    v100, found, beyond = Trained(results, SIMULATED), {}, []
    best, points = v100.trained("bound"), v100.points(FITTED)
    for batch in [b for b in points if b in best and b in published(CHUNKS)]:
        rate, bounded, point = faster(batch), best[batch].images_per_s, points[batch]
        if bounded < rate * (1 - ROW):
            beyond.append(f"{batch} (at best {bounded:.0f} for {rate:g})")
        elif point is None:
            found[f"x at {batch}"] = False
        else:
            over = point.images_per_s / rate - 1
            found[f"{100 * over:+.1f} % at {batch}"] = over >= -ROW
    holds, said = all_hold(found)
    if beyond:
        said += f"; no schedule reaches the paper's images/s at {', '.join(beyond)}"
    slow = [f"{b / p.row['time_by_bytes_s']:.0f} at {b}" for b, p in v100.trained(FITTED).items()]
    told = f"were mapping as slow by the byte as with the paper's chunks: {', '.join(slow)}"
    return holds, f"{said}; {told}"


@check(
    "On a CPU a batch as much larger than the largest in core as the paper's trains, to a "
    "twentieth: the sizes tried end there, and the simulated allocators serve some budget"
)
def trains_on_a_cpu(results: Results) -> tuple[bool, str]:
    """Of what is measured with simulated allocators."""
    here = Trained(results, MEASURED)
    if not here.on_cpu:
        raise NotRun("no records of a CPU")
    most, fits, over = here.reach_over(CHUNKS, IN_CORE)
    holds = most / fits >= 0.95 * LARGEST_BATCH / IN_CORE_BATCH
    return holds, f"{here.ran}: {most} over {fits} {over}"


TABLE1 = artefact(
    "table1",
    plan=runs.table1,
    rows=table,
    draw=figure,
    claims={
        "larger_than_core": larger_than_core,
        "speed_kept_here": speed_kept,
        "larger_than_alone_here": larger_than_alone,
        "alone_ends_here": alone_ends,
        "faster_with_chunks_here": faster_with_chunks,
        "larger_than_peers": larger_than_peers,
    },
    checks=(
        fitted,
        within_bound,
        simulated_reach,
        simulated_rivals,
        simulated_gains,
        simulated_speed,
        simulated_over_lms,
        rows_reached,
        trains_on_a_cpu,
    ),
)
