"""Do real processes and the simulation train the same? (our question, not the paper's)"""

from typing import Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Expectation, Results, claim
from repro.experiments.dualbatch.settings import ENGINES, clusters, facts
from repro.experiments.judging import NotRun, Verdict, certain, combine
from repro.report import DASH

_SAID = {True: "yes", False: "NO", None: DASH}


def table(results: Results) -> list[dict[str, Any]]:
    """Return one training by both engines."""
    found = []
    for engine in ENGINES:
        for record in results.select("train", workers=2, engine=engine):
            if record.status != "ok":
                found.append({"engine": engine, "accuracy (%)": record.status})
                continue
            metrics = record.metrics
            stale = metrics["staleness"]
            found.append(
                {
                    "engine": engine,
                    "accuracy (%)": f"{metrics['accuracy'][-1]:.2f}",
                    "commits": metrics["commits"],
                    "staleness, mean": f"{np.mean(stale):.2f}",
                    "staleness, most": max(stale),
                    "wall (s)": f"{metrics['wall_time_s'][-1]:.2f}",
                    "same weights in the same order": _SAID[metrics["same_weights"]],
                }
            )
    return found


@claim(
    "same_weights",
    "Real processes and the simulation give the same weights for the same order of commits (our "
    "question, not the paper's)",
    "none",
)
def same_weights(results: Results, expected: Expectation) -> Verdict:
    """Judge every bit of the weights that a training on Ray and its repetition end with."""
    metrics = results.need("train", workers=2, engine="ray").metrics
    if metrics["same_weights"] is None:
        raise NotRun("too large to train twice")
    return combine([certain(f"{metrics['commits']} commits, every bit", metrics["same_weights"])])


TABLE = Exhibit(
    runs=clusters,
    table=table,
    caption=caption(
        "One training with one small-batch and one large-batch worker, by the engine with a "
        "virtual clock and by real processes on Ray, which commit in whatever order they end. "
        "The last column trains again in the same order, on the local engine.",
        facts,
    ),
    claims=(same_weights,),
)
