"""What must not change by accident: every planned run, every verdict's word and evidence.

A change on purpose writes both files anew, ``python tests/experiments/test_lock.py``, and its
commit shows the difference.
"""

import json
from pathlib import Path

import pytest

from repro.experiments import PAPERS, load_paper
from repro.experiments.arguments import plan
from repro.experiments.design import COMPUTING_PROFILES, SEEDS
from repro.experiments.query import find_source
from repro.experiments.view import paper_verdicts
from repro.records import identity

PLANS = Path(__file__).with_name("locked_plans.txt")
VERDICTS = Path(__file__).with_name("locked_verdicts.json")


def plans() -> str:
    """Return a line for each configuration: where it is planned, its identity and seeds."""
    lines = ["paper profile experiment identity(seed 0) seeds artefacts"]
    for paper in map(load_paper, PAPERS):
        for profile in COMPUTING_PROFILES:
            # The data set that a profile names first, whatever is at hand.
            chosen = {task: next(iter(n), "") for task, n in paper.datasets[profile].items()}
            users = {k: set(each.runs(profile, chosen)) for k, each in paper.artefacts.items()}
            for run in plan(paper, paper.artefacts.values(), profile, chosen):
                seeds = run.seeds if run.seeds is not None else SEEDS[profile]
                line = [paper.key, profile, run.experiment]
                line += [identity(run.experiment, run.config, 0), ",".join(map(str, seeds))]
                line += [",".join(name for name, used in users.items() if run in used)]
                lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def verdicts() -> str:
    """Return the word and the evidence of every verdict on the reference records, as JSON."""
    sources = [find_source(load_paper(key), local=False) for key in PAPERS]
    rows = [row for source in sources for row in paper_verdicts(source)]
    judged = {row["key"]: [row["verdict"], row["setting"], row["evidence"]] for row in rows}
    return json.dumps(judged, indent=1, ensure_ascii=False) + "\n"


def test_the_planned_runs_are_the_locked_ones() -> None:
    assert plans().splitlines() == PLANS.read_text(encoding="utf-8").splitlines()


@pytest.mark.usefixtures("reference_records")
def test_the_verdicts_on_the_reference_records_are_the_locked_ones() -> None:
    locked = json.loads(VERDICTS.read_text(encoding="utf-8"))
    now = json.loads(verdicts())
    changed = {name: (locked.get(name), now.get(name)) for name in {**locked, **now}}
    assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {}


if __name__ == "__main__":
    PLANS.write_text(plans(), encoding="utf-8")
    VERDICTS.write_text(verdicts(), encoding="utf-8")
