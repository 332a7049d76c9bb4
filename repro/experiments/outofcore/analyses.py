"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows of Table 1 beyond 512 images. The first analysis asks how much faster the link
would have to be, or how many bytes fewer the variables would have to have; the second is of section
4's trade-off.
"""

from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import NotRun
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw
from repro.experiments.outofcore.points import all_hold, artefact
from repro.experiments.outofcore.runs import (
    CHUNK_MIB,
    CHUNKS,
    FITTED,
    GIB,
    IN_CORE,
    LABELS,
    RATE,
    RESNET,
    SIMULATION,
    faster,
    gib,
    published,
)
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_CORE_RATE = max(published(IN_CORE).values())  # the paper's images/s
BATCHES, CHUNK_BATCH = SIMULATION["link_batches"], SIMULATION["chunk_batch"]
FASTER, FEWER_BYTES = 1.25, SIMULATION["link_shares"][1]  # times the rate of the link
SHORT = 0.1  # how far images/s may lie below the paper's
BALANCED = 0.05
_WHOSE = panel(RESNET, data="SIMULATED V100")
_SECONDS = {"bound": "bound_s", FITTED: "time_s"}  # what no schedule beats, and our fastest
_NAMES = {"bound": LABELS["bound"], FITTED: "our fastest"}


def _link_rows(results: Results) -> dict[tuple[int, float, float], dict[str, Any]]:
    """What an iteration takes by batch size, share of the bytes and rate of the link."""
    records = sorted(results.ok("link", role=RESNET), key=lambda r: r.config["batch"])
    return {
        (r.config["batch"], w["share"], w["rate"]): w for r in records for w in r.metrics["rows"]
    }


def link_table(results: Results) -> list[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link."""

    def shown(rate: float, digits: str = ".0f") -> str:
        return f"{rate:{digits}} ({rate / IN_CORE_RATE:.0%})"

    return [
        {"batch": batch, "bytes": f"{share:.0%}", "GB/s each way": f"{rate / 1e9:g}"}
        | {name: shown(batch / row[_SECONDS[way]]) for way, name in _NAMES.items()}
        | {"paper": shown(faster(batch), "g")}
        for (batch, share, rate), row in _link_rows(results).items()
    ]


def link_figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    rows, panels = _link_rows(results), []
    for batch in dict.fromkeys(key[0] for key in rows) or BATCHES[:1]:
        lines = []
        for share, whose in ((FEWER_BYTES, "budget"), (1.0, "ours")):
            for way, name in _NAMES.items():
                curve = [
                    (rate / 1e9, batch / row[_SECONDS[way]] / IN_CORE_RATE)
                    for (size, part, rate), row in rows.items()
                    if (size, part) == (batch, share)
                ]
                lines.append(Line(way, curve, f"{name}, {share:.0%} of the bytes", whose))
        if rows:
            paper = [(RATE / 1e9, faster(batch) / IN_CORE_RATE)]
            lines.append(Line(CHUNKS, paper, whose="paper"))
        ylabel = "images/s over the\nlargest in core"
        panels.append(Panel(f"{batch:,} images\n{_WHOSE}", lines, ylabel))
    return draw([panels], "link, each way (GB/s)")


def _over_paper(results: Results, way: str, batch: int, share: float, rate: float) -> float:
    """Our images/s over the paper's.

    Raises:
        NotRun: No records.
    """
    row = _link_rows(results).get((batch, share, rate))
    if row is None:
        raise NotRun("no records")
    return float(batch / row[_SECONDS[way]] / faster(batch))


@check(
    f"At {RATE / 1e9:g} GB/s each way no schedule of our traces reaches the paper's images/s at "
    "928 images and more"
)
def out_of_reach(results: Results) -> tuple[bool, str]:
    """The bound over the paper's images/s."""
    shares = {batch: _over_paper(results, "bound", batch, 1.0, RATE) for batch in BATCHES}
    return all_hold({f"at best ×{share:.2f} at {b}": share < 1 for b, share in shares.items()})


@check(
    f"On a link {FASTER:g} times as fast, or with {FEWER_BYTES:.0%} of the bytes, our schedule has "
    f"the paper's images/s, to {100 * SHORT:g} %, or more"
)
def within_reach(results: Results) -> tuple[bool, str]:
    """Our images/s over the paper's, in both cases and at each batch size."""
    shares = {
        f"{what} at {batch}": _over_paper(results, FITTED, batch, share, rate)
        for rate, share, what in (
            (FASTER * RATE, 1.0, f"{FASTER * RATE / 1e9:g} GB/s"),
            (RATE, FEWER_BYTES, f"{FEWER_BYTES:.0%} of the bytes"),
        )
        for batch in BATCHES
    }
    return all_hold({f"{name} ×{over:.2f}": over >= 1 - SHORT for name, over in shares.items()})


LINK = artefact(
    "link",
    plan=runs.link,
    rows=link_table,
    draw=link_figure,
    checks=(out_of_reach, within_reach),
)


def _chunk_rows(results: Results) -> dict[int, dict[str, Any]]:
    """What a plan takes by the size of a chunk in MiB, ascending."""
    record = results.first("chunk_sizes", role=RESNET)
    rows = record.metrics["rows"] if record is not None else {}
    return {int(mib): rows[mib] for mib in sorted(rows, key=int)}


def chunk_table(results: Results) -> list[dict[str, Any]]:
    """Budget, loss, mapping and images/s by the size of a chunk."""
    return [
        {
            "chunk": f"{mib} MiB" + " (the paper's)" * (mib == CHUNK_MIB),
            "budget": gib(row["budget_bytes"]),
            "lost inside, at most": gib(row["internal_bytes"]),
            "chunks mapped and unmapped": f"{row['map_operations']:,}",
            "images/s, mapping free": f"{CHUNK_BATCH / row['unmapped_s']:.0f}",
            "images/s": f"{CHUNK_BATCH / row['time_s']:.0f}",
        }
        for mib, row in _chunk_rows(results).items()
    ]


def chunk_figure(results: Results) -> "Figure":
    """Draw what is lost inside, and the speed with mapping and without."""
    rows = _chunk_rows(results)
    lost = [(mib, row["internal_bytes"] / GIB) for mib, row in rows.items()]
    free, speed = (
        [(mib, CHUNK_BATCH / row[key]) for mib, row in rows.items()]
        for key in ("unmapped_s", "time_s")
    )
    own = [point for point in speed if point[0] == CHUNK_MIB]
    inside = [Line(CHUNKS, lost, "with chunks")]
    rates = [
        Line(CHUNKS, free, "with chunks, were mapping free", "budget"),
        Line(CHUNKS, speed, "with chunks"),
        Line(CHUNKS, own, "at the paper's size of a chunk", "paper"),
    ]
    title = f"{CHUNK_BATCH} images\n{_WHOSE}"
    panels = [
        Panel(f"lost inside chunks, {title}", inside, "memory (GiB)"),
        Panel(f"speed, {title}", rates, "images/s"),
    ]
    return draw([panels], "size of a chunk (MiB)")


def _over_own(results: Results, key: str, what: str, smallest: bool) -> tuple[int, float, str]:
    """A size of a chunk, the smallest or the best, and its value over that of the paper's.

    Raises:
        NotRun: No records of the paper's.
    """
    rows = _chunk_rows(results)
    if CHUNK_MIB not in rows:
        raise NotRun(f"no records of chunks of {CHUNK_MIB} MiB")
    other = min(rows) if smallest else min(rows, key=lambda mib: float(rows[mib][key]))
    over = float(rows[other][key] / rows[CHUNK_MIB][key])
    return other, over, f"{what} with chunks of {other} MiB over {CHUNK_MIB} ×{over:.2f}"


@check("Smaller chunks lose less inside: the smallest against the paper's")
def smaller_fragments_less(results: Results) -> tuple[bool, str]:
    """The bytes lost inside."""
    _, over, said = _over_own(results, "internal_bytes", "lost inside", smallest=True)
    return over < 1, said


@check("Smaller chunks take longer, for more of them are mapped: the smallest against the paper's")
def smaller_costs_more(results: Results) -> tuple[bool, str]:
    """The time of an iteration."""
    _, over, said = _over_own(results, "time_s", "time", smallest=True)
    return over > 1, said


@check(f"Chunks of {CHUNK_MIB} MiB balance both: no other size is faster by {100 * BALANCED:g} %")
def balanced(results: Results) -> tuple[bool, str]:
    """The time of an iteration over that of the fastest size."""
    fastest, over, _ = _over_own(results, "time_s", "time", smallest=False)
    said = f"time with chunks of {CHUNK_MIB} MiB over the fastest, of {fastest}, ×{1 / over:.2f}"
    return 1 / over <= 1 + BALANCED, said


CHUNK_SIZES = artefact(
    "chunks",
    plan=runs.chunk_sizes,
    rows=chunk_table,
    draw=chunk_figure,
    checks=(smaller_fragments_less, smaller_costs_more, balanced),
)
