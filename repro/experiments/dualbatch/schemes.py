"""Table 1: what each scheme trains with in two stages of two sub-stages, from our schedules.

The run lays the schedules out; nothing is trained.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Stage, SubStage
from repro.experiments.dualbatch.building import Config
from repro.experiments.outcome import Outcome, reported
from repro.measure import TimeModel

SCHEMES = ("dual-batch learning", "cyclic progressive learning", "hybrid scheme")


def schemes(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Lay out the first two stages of Table 7 by each scheme, with one small-batch worker."""
    paper = reported("dualbatch")
    part, table = paper["table6"]["cifar"], paper["table7"]
    workers, k = paper["workers"], paper["table6"]["k"]

    def subs(n_small: int) -> list[SubStage]:
        sub_stages = []
        rows = (part["resolutions"], part["large_batches"], table["dropouts"])
        for side, large, dropout in zip(*rows, strict=True):
            model = TimeModel(1.0, paper["inferred"][f"ratio_{side}"])
            plan = DualBatchPlan.solve(
                model, k, n_small, workers - n_small, large, paper["cifar_samples"]
            )
            sub_stages.append(SubStage(side, dropout, plan))
        return sub_stages

    both = {
        SCHEMES[0]: subs(config["n_small"])[-1:],
        SCHEMES[1]: subs(0),
        SCHEMES[2]: subs(config["n_small"]),
    }
    stages = [Stage(int(epochs), rate) for epochs, rate in table["stages"][: config["stages"]]]
    return Outcome({"rows": [row for name in SCHEMES for row in _rows(name, stages, both[name])]})


def _rows(name: str, stages: Sequence[Stage], subs: Sequence[SubStage]) -> list[dict[str, Any]]:
    schedule = CyclicProgressiveSchedule(stages, subs)
    rows = []
    for (stage, sub_stage), group in itertools.groupby(
        schedule, key=lambda setting: (setting.stage, setting.sub_stage)
    ):
        epochs = list(group)
        first = epochs[0]
        rows.append(
            {
                "scheme": name,
                "stage": stage,
                "sub_stage": sub_stage,
                "first": first.epoch,
                "last": epochs[-1].epoch,
                "rate": first.lr,
                "batches": [n for n in (first.small_batch, first.large_batch) if n is not None],
                "resolution": first.resolution,
                "dropout": first.dropout,
            }
        )
    return rows
