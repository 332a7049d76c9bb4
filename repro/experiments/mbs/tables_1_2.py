"""Is a large mini-batch worth having, and a large image? (Table 1) What fits? (Table 2)

Table 1 has no MBS: it is the paper's motivation.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from repro.experiments.judge import Cases, Estimate, cases
from repro.experiments.mbs import cells
from repro.experiments.mbs.runs import INITIAL, LARGE_BATCH, PAPER, ROLES, resolutions, sizes
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

ROLES_1 = ("ResNet-50", "U-Net")  # of Table 1


def cell(results: Results, role: str, resolution: str, size: str) -> list[Record]:
    """Return the trainings of one cell of Table 1; `size` is ``small`` or ``large``."""
    undivided = results.select("train", role=role, resolution=resolution, micro_batch=None)
    return [r for r in undivided if (r.config["mini_batch"] == LARGE_BATCH) == (size == "large")]


def table1(results: Results) -> Iterator[dict[str, Any]]:
    """The metric by mini-batch and image size."""
    paper = PAPER["table1"]
    for role, resolution, size in product(ROLES_1, ("low", "high"), ("small", "large")):
        ours = DASH
        if records := cell(results, role, resolution, size):
            config = records[0].config
            side = config["augment"].get("crop_size") or config["dataset"]["image_size"]
            ours = f"{side} px, {config['mini_batch']}"
        values = cells.best(results, records)
        yield {
            "model": cells.ran_as(role, results.records),
            # The paper's text leaves the smaller size out; see the note in paper.toml.
            "image, mini-batch: paper": (
                f"{paper[role][f'{resolution}_size']} px, {paper[f'{size}_batch']}"
            ),
            "ours": ours,
            "paper (%)": f"{paper[role][f'{resolution}_{size}']:.2f}",
            "ours (%)": Summary.of(values).text(),
            "n": len(values),
        }


def gain(results: Results, resolution: str, size: str) -> Cases:
    """The metric of a large mini-batch at the high resolution less that of another cell."""

    def compare(role: str) -> Estimate:
        largest, other = ("high", "large"), (resolution, size)
        return cells.gap(results, *(cell(results, role, *of) for of in (largest, other)))

    return cases(ROLES_1, compare)


TABLE1 = cells.artefact(
    "table1",
    plan=resolutions,
    rows=table1,
    claims={
        "large_mini_batch": partial(gain, resolution="high", size="small"),
        "high_resolution": partial(gain, resolution="low", size="large"),
    },
)


def _metrics(results: Results, experiment: str, role: str) -> dict[str, Any]:
    record = results.first(experiment, role=role)
    return record.metrics if record else {}


def table2(results: Results) -> Iterator[dict[str, Any]]:
    """The largest mini-batch that fits: tried, modelled and chosen by the streamer."""
    for role in ROLES:
        metrics = _metrics(results, "size", role)
        error, limit = metrics.get("auto_prediction_error"), metrics.get("limit_bytes")
        fits, predicted = metrics.get("largest_that_fits"), _metrics(results, "foretell", role)
        yield {
            "model": cells.ran_as(role, results.records),
            "limit (MiB)": f"{limit / cells.MIB:,.1f}" if limit else DASH,
            "mini-batch, paper": INITIAL[role],
            "predicted, paper's network and card": predicted.get("largest", DASH),
            "largest 2ᵏ that fits": fits if fits is not None else DASH,
            "M(B): largest that fits": metrics.get("predicted_largest") or DASH,
            '"auto" chose': metrics.get("auto_micro_batch") or DASH,
            "prediction error": f"{100 * error:+.2f} %" if error is not None else DASH,
            "n": int(bool(metrics)),
        }


@cells.check
def initial_sizes(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the paper's size fits its card by prediction, and its double does not."""
    for role in ROLES:
        if (n := _metrics(results, "foretell", role).get("largest")) is not None:
            fits = INITIAL[role] <= n < 2 * INITIAL[role]
            yield fits, f"{role}: {n}, paper {INITIAL[role]}"


@cells.check
def prediction(results: Results) -> Iterator[tuple[bool, str]]:
    """Whether the model's size lies between the last that fits and the next tried."""
    for role in ROLES:
        metrics, ran = _metrics(results, "size", role), cells.ran_as(role, results.records)
        fits, predicted = metrics.get("largest_that_fits"), metrics.get("predicted_largest")
        if fits is not None and predicted is not None:
            tried = f"of powers of two {fits} ran and {2 * fits} did not"
            yield fits <= predicted < 2 * fits, f"{ran}: M(B) admits {predicted}, {tried}"


TABLE2 = cells.artefact(
    "table2",
    plan=sizes,
    rows=table2,
    checks={"prediction": prediction, "initial_sizes": initial_sizes},
)
