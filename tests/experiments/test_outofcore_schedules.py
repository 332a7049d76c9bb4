"""Schedules as they run."""

import pytest
from made import FAILED, OUT_OF_MEMORY
from test_outofcore_settings import PAPER, World, judged, nothing, panels, table

from repro.experiments.outofcore import schedules, settings
from repro.experiments.outofcore.settings import BY_SCHEDULE

# What makes each claim fail: by how much faster the other schedule is than it usually is.
WRONG = {
    "faster_than_lms_here": {"lms": 0.75},
    "faster_than_earlier_here": {"vdnn": 0.75, "on_demand": 0.75},
    "changes_pay_here": {"window": 0.6},
}


def world(relative: dict[str, float], **rules: object) -> World:
    return World(relative={(BY_SCHEDULE, n): v for n, v in relative.items()}, **rules)


def word(key: str, found: World) -> str:
    return judged(f"schedules/{key}", found).word


class TestClaims:
    def test_every_claim_is_tried(self):
        assert list(PAPER.artefacts["schedules"].exhibit.claims) == list(WRONG)

    @pytest.mark.parametrize("profile", ["quick", "paper"])
    @pytest.mark.parametrize("key", WRONG)
    def test_right_wrong_and_open(self, key, profile):
        assert word(key, World(profile)) == "reproduced"
        assert word(key, world(WRONG[key], profile=profile)) == "not reproduced"
        assert word(key, World(profile, noise=1.0)) == "undecided"
        for rules in ({"places": ()}, {"status": {(BY_SCHEDULE,): FAILED}}):
            assert word(key, World(profile, **rules)) == "not run"

    def test_one_earlier_schedule_that_is_faster_is_partly(self):
        verdict = judged("schedules/faster_than_earlier_here", world({"on_demand": 0.75}))
        assert verdict.word == "partly"
        assert verdict.evidence.startswith("ResNet-20 (for ResNet-50), images/s over vDNN")

    def test_out_of_memory(self):
        verdict = judged(
            "schedules/faster_than_earlier_here", World(status={("vdnn",): OUT_OF_MEMORY})
        )
        assert (
            verdict.word == "undecided" and "vdnn: vDNN: one function ahead ran" in verdict.evidence
        )
        own = World(status={(BY_SCHEDULE, "paper"): OUT_OF_MEMORY})
        assert word("faster_than_lms_here", own) == "not reproduced"


def test_table_and_figure():
    rows = table("schedules", World(status={("vdnn",): OUT_OF_MEMORY, ("lms",): FAILED}))
    assert [row["schedule"] for row in rows] == [
        schedules.TITLES[name] for name in ("window", "paper", "vdnn", "on_demand")
    ]
    assert [row["over in core"] for row in rows] == ["80%", "70%", "x", "40%"]
    ((title, shown),) = panels("schedules", World()).items()
    assert title == "ours: ResNet-20 for ResNet-50, measured, SIMULATED memory limit and link"
    assert [t.get_text() for t in shown.get_yticklabels()] == list(schedules.TITLES.values())
    assert not table("schedules", nothing)


def test_every_schedule_has_the_same_setting():
    configs = [dict(run.config) for run in settings.schedules("quick")]
    assert [config.pop("schedule") for config in configs] == list(settings.SCHEDULES)
    assert all(config == configs[0] for config in configs)
