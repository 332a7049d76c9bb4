"""Every kind of run of the smoke profile, on the simulated device and under its race checker.

`make smoke-simulated` carries out the whole profile.
"""

import pytest

from repro.experiments import PAPERS, load_paper
from repro.records import RecordStore
from simulated_device.checking import checked
from simulated_device.smoke import carry_out, one_of_each_kind, runs_of

SHORT = ("outofcore", "microconv")  # which have the most code of a device's own
THOROUGH = [pytest.param(name, marks=pytest.mark.slow) for name in PAPERS if name not in SHORT]


@pytest.mark.parametrize("name", [*SHORT, *THOROUGH])
def test_runs_of_a_paper(sim, tmp_path, name):
    paper = load_paper(name)
    runs = one_of_each_kind(runs_of(paper))
    with checked():
        assert carry_out(paper, runs, RecordStore(tmp_path), str(sim)) == []
    assert len(runs) > 1
