"""Records made up for tests: of every run of an artefact, what a function says of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from invented import make_record

from repro.experiments import load_paper
from repro.experiments.design import Artefact, Run, claims_of
from repro.experiments.judge import NotRun, Verdict
from repro.experiments.query import Results

SEEDS = (0, 1, 2)

# Given a run and a seed: the changes to its record, None for no record.
Maker = Callable[[Run, int], Mapping[str, Any] | None]

OUT_OF_MEMORY = {"status": "out_of_memory", "error": "OutOfMemoryError: no room"}
FAILED = {"status": "failed", "error": "ValueError: wrong"}


def timing(*seconds: float) -> dict[str, Any]:
    """Return samples of a timing."""
    return {"samples_s": list(seconds), "warmup": 1}


def table_of(artefact: Artefact, results: Results) -> pd.DataFrame:
    """Return an artefact's table."""
    return pd.DataFrame(list(artefact.rows(results)), dtype=object)


def made_results(
    target: str, make: Maker, chosen: Mapping[str, str], profile: str = "gpu",
    seeds: Sequence[int] = SEEDS,
) -> Results:  # fmt: skip
    """Return results of ``PAPER/ARTEFACT`` with a record of every run that `make` gives one."""
    key, _, name = target.partition("/")
    runs, records = load_paper(key).artefacts[name].runs(profile, chosen), []
    for run in runs:
        for seed in run.seeds if run.seeds is not None else seeds:
            changes = make(run, seed)
            if changes is not None:
                values = {"paper": key, "config": run.config, "seed": seed, **changes}
                records.append(make_record(run.experiment, **values))
    return Results(runs, seeds, records, profile=profile)


def verdict(target: str, results: Results) -> Verdict:
    """Return the verdict on the claim ``PAPER/ARTEFACT/KEY`` by its rule, whatever the setting."""
    paper, artefact, key = target.split("/")
    numbers = load_paper(paper).artefacts[artefact].claims[key]
    try:
        return claims_of(paper)[artefact][key].judge(numbers(results))
    except NotRun as missing:
        return Verdict("not run", str(missing))


def check_row(target: str, results: Results) -> dict[str, str]:
    """Return the only check of ``PAPER/ARTEFACT`` as a row."""
    key, _, name = target.partition("/")
    (check,) = load_paper(key).artefacts[name].checks
    return check.row(results)
