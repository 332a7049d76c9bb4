"""How long the rest takes, and when nothing more is begun."""

import time
from datetime import datetime

import pytest

from repro.experiments.design import UsageError
from repro.experiments.forecast import Forecast, ending, in_words


class TestForecast:
    def test_what_ran_here_counts_before_what_ran_elsewhere(self):
        forecast = Forecast({"a": 10.0, "b": 30.0}, side_by_side=2)
        assert forecast.left({"a": 3, "b": 1}) == 30.0
        assert forecast.left({"a": 3, "b": 1}, {"b"}) == 45.0  # which has the machine for itself
        forecast.learn("a", 20.0)
        assert forecast.expected("a") == 20.0
        assert forecast.expected("b") == 60.0  # this machine takes twice as long
        assert forecast.left({"a": 2, "b": 1}) == 50.0

    def test_of_unknown_runs_the_mean_is_expected(self):
        forecast = Forecast({})
        assert forecast.expected("new") is None and forecast.left({"new": 1}) is None
        assert forecast.left({}) == 0.0
        forecast.learn("a", 10.0)
        forecast.learn("a", 30.0)
        forecast.learn("b", 40.0)
        assert forecast.expected("new") == 30.0

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(None, "for an unknown time"), (5, "less than a minute"), (59, "about a minute"),
         (600, "about 10 min"), (7199, "about 2.0 h"), (9000, "about 2.5 h")],
    )  # fmt: skip
    def test_words_are_no_finer_than_what_is_known(self, seconds, words):
        assert in_words(seconds) == words


class TestEnding:
    def test_the_next_time_of_that_day_or_so_many_hours_on(self):
        def late() -> datetime:
            return datetime(2026, 11, 23, 23, 30)

        start = time.monotonic()
        assert ending(None, None) is None
        assert ending("02:30", None, late) - start == pytest.approx(3 * 3600, abs=5)
        assert ending("23:45", None, late) - start == pytest.approx(900, abs=5)
        assert ending("23:30", None, late) - start == pytest.approx(24 * 3600, abs=5)
        assert ending(None, 2.5) - start == pytest.approx(9000, abs=5)

    @pytest.mark.parametrize(
        ("until", "hours", "named"),
        [("25:00", None, "'25:00'"), ("soon", None, "02:30"), (None, 0.0, "--hours is 0"),
         (None, -1.0, "above 0"), (None, float("nan"), "nan"), ("02:30", 1.0, "one of them")],
    )  # fmt: skip
    def test_what_is_refused(self, until, hours, named):
        with pytest.raises(UsageError, match=named):
            ending(until, hours)
