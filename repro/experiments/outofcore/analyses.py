"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows of Table 1 beyond 512 images. The first analysis asks how much faster the link
would have to be, or how many bytes fewer the variables would have to have; the second is of section
4's trade-off.
"""

from typing import TYPE_CHECKING, Any

from repro.experiments.judge import NotRun
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw, plain
from repro.experiments.outofcore.points import all_hold, artefact
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_CORE_RATE = max(runs.published(runs.IN_CORE).values())  # the paper's images/s
BATCHES, CHUNK_BATCH = runs.SIMULATION["link_batches"], runs.SIMULATION["chunk_batch"]
FASTER, FEWER_BYTES = 1.25, runs.SIMULATION["link_shares"][1]  # times the rate of the link
SHORT = 0.1  # how far images/s may lie below the paper's
BALANCED = 0.05
_WHOSE = panel(runs.RESNET, data="SIMULATED V100")
_SECONDS = {"bound": "bound_s", runs.FITTED: "time_s"}
_NAMES = {"bound": runs.LABELS["bound"], runs.FITTED: "our fastest"}


def _rates(results: Results, method: str) -> dict[tuple[int, float, float], float]:
    """Images/s of a method by batch size, share of the bytes and rate of the link."""
    records = sorted(results.ok("link", role=runs.RESNET), key=lambda r: r.config["batch"])
    return {
        (r.config["batch"], w["share"], w["rate"]): r.config["batch"] / w[_SECONDS[method]]
        for r in records
        for w in r.metrics["rows"]
    }


def link_table(results: Results) -> list[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link, and over those in core."""

    def shown(rate: float, digits: str = ".0f") -> str:
        return f"{rate:{digits}} ({rate / IN_CORE_RATE:.0%})"

    methods = {method: _rates(results, method) for method in _NAMES}
    return [
        {"batch": batch, "bytes": f"{share:.0%}", "GB/s each way": f"{rate / 1e9:g}"}
        | {_NAMES[method]: shown(rates[batch, share, rate]) for method, rates in methods.items()}
        | {"paper": shown(runs.faster(batch), "g")}
        for batch, share, rate in methods[runs.FITTED]
    ]


def link_figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    panels = []
    for batch in BATCHES:
        lines = []
        for method, name in _NAMES.items():
            for share, whose in ((FEWER_BYTES, "budget"), (1.0, "ours")):
                found = {
                    rate / 1e9: speed / IN_CORE_RATE
                    for (size, part, rate), speed in _rates(results, method).items()
                    if (size, part) == (batch, share)
                }
                lines.append(Line(method, plain(found), f"{name}, {share:.0%} of the bytes", whose))
        paper = plain({runs.RATE / 1e9: runs.faster(batch) / IN_CORE_RATE})
        lines.append(Line(runs.CHUNKS, paper, "paper", "paper"))
        ylabel = "images/s over the\nlargest in core"
        panels.append(Panel(f"{batch:,} images\n{_WHOSE}", lines, ylabel))
    return draw(panels, len(panels), "link, each way (GB/s)")


def _over_paper(results: Results, method: str, batch: int, share: float, rate: float) -> float:
    """Our images/s over the paper's."""
    speed = _rates(results, method).get((batch, share, rate))
    if speed is None:
        raise NotRun("no records")
    return float(speed / runs.faster(batch))


def out_of_reach(results: Results) -> tuple[bool, str]:
    """The bound over the paper's images/s, at the rate of the link as we read it."""
    shares = {batch: _over_paper(results, "bound", batch, 1.0, runs.RATE) for batch in BATCHES}
    return all_hold({f"at best ×{share:.2f} at {b}": share < 1 for b, share in shares.items()})


def within_reach(results: Results) -> tuple[bool, str]:
    """Our images/s over the paper's on a faster link or with fewer bytes, by batch size."""
    shares = {
        f"{changed} at {batch}": _over_paper(results, runs.FITTED, batch, share, rate)
        for rate, share, changed in (
            (FASTER * runs.RATE, 1.0, f"{FASTER * runs.RATE / 1e9:g} GB/s"),
            (runs.RATE, FEWER_BYTES, f"{FEWER_BYTES:.0%} of the bytes"),
        )
        for batch in BATCHES
    }
    return all_hold({f"{name} ×{over:.2f}": over >= 1 - SHORT for name, over in shares.items()})


LINK = artefact(
    "link",
    plan=runs.link,
    rows=link_table,
    draw=link_figure,
    checks={"out_of_reach": out_of_reach, "within_reach": within_reach},
)


def _chunk_rows(results: Results) -> dict[int, dict[str, Any]]:
    """A simulated iteration by the size of a chunk in MiB, ascending."""
    record = results.first("chunk_sizes", role=runs.RESNET)
    rows = record.metrics["rows"] if record is not None else {}
    return {int(mib): rows[mib] for mib in sorted(rows, key=int)}


def chunk_table(results: Results) -> list[dict[str, Any]]:
    """Budget, loss, mapping and images/s by the size of a chunk."""
    return [
        {
            "chunk": f"{mib} MiB" + " (the paper's)" * (mib == runs.CHUNK_MIB),
            "budget": runs.gib(row["budget_bytes"]),
            "lost inside, at most": runs.gib(row["internal_bytes"]),
            "chunks mapped and unmapped": f"{row['map_operations']:,}",
            "images/s": f"{CHUNK_BATCH / row['time_s']:.0f}",
        }
        for mib, row in _chunk_rows(results).items()
    ]


def chunk_figure(results: Results) -> "Figure":
    """Draw the memory lost inside chunks, and the speed with mapping and without."""
    rows = _chunk_rows(results)
    lost = {mib: row["internal_bytes"] / runs.GIB for mib, row in rows.items()}
    free, speed = (
        {mib: CHUNK_BATCH / row[key] for mib, row in rows.items()}
        for key in ("unmapped_s", "time_s")
    )
    rates = [
        Line(runs.CHUNKS, plain(free), "with chunks, were mapping free", "budget"),
        Line(runs.CHUNKS, plain(speed), "with chunks"),
    ]
    title = f"{CHUNK_BATCH} images\n{_WHOSE}"
    lines = [Line(runs.CHUNKS, plain(lost), "with chunks")]
    panels = [
        Panel(f"lost inside chunks, {title}", lines, "memory (GiB)"),
        Panel(f"speed, {title}", rates, "images/s"),
    ]
    return draw(panels, 2, "size of a chunk (MiB)")


def trade_off(results: Results) -> tuple[bool, str]:
    """Memory lost inside chunks and time, of the smallest and the fastest over the paper's."""
    rows = _chunk_rows(results)
    if runs.CHUNK_MIB not in rows:
        raise NotRun(f"no records of chunks of {runs.CHUNK_MIB} MiB")
    paper = rows[runs.CHUNK_MIB]
    small, fast = min(rows), min(rows, key=lambda mib: float(rows[mib]["time_s"]))
    lost = rows[small]["internal_bytes"] / paper["internal_bytes"]
    longer, most = rows[small]["time_s"] / paper["time_s"], paper["time_s"] / rows[fast]["time_s"]
    return all_hold(
        {
            f"chunks of {small} MiB over {runs.CHUNK_MIB}: lost inside ×{lost:.2f}": lost < 1,
            f"time ×{longer:.2f}": longer > 1,
            f"time of {runs.CHUNK_MIB} MiB over the fastest, {fast}, ×{most:.2f}": most
            <= 1 + BALANCED,
        }
    )


CHUNK_SIZES = artefact(
    "chunks",
    plan=runs.chunk_sizes,
    rows=chunk_table,
    draw=chunk_figure,
    checks={"trade_off": trade_off},
)
