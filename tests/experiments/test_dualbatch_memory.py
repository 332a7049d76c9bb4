"""The largest batch that fits: what is read, drawn and judged."""

import made
import pytest
from made_dualbatch import World, figure, panels, results, rows

from repro.experiments.dualbatch.settings import CIFAR


def checked(world):
    return made.check_row("dualbatch/figure13", 0, results("figure13", world))


@pytest.mark.parametrize(
    ("cifar", "imagenet", "word"),
    [
        (3.4, 3.6, "yes"),
        (-3.4, -3.6, "yes"),
        (3.6, 3.6, "NO"),
        (-9, -9, "NO"),
    ],
)
def test_check(cifar, imagenet, word):
    def edit(metrics, config):
        error = cifar if config["role"] == CIFAR else imagenet
        metrics |= {"measured_max": 100_000, "predicted_max": round(1000 * (100 + error))}

    row = checked(World(edit={"memory": edit}))
    assert row["holds"] == word
    assert f"{cifar:+.1f} %" in row["evidence"] and f"{imagenet:+.1f} %" in row["evidence"]


def test_one_of_two_decides_nothing_of_both():
    def status(run):
        return {} if run.config["role"] == CIFAR else made.OUT_OF_MEMORY

    row = checked(World(status=status))
    assert row["holds"] == "not run" and "ImageNet: no records" in row["evidence"]


def test_nothing_fits():
    def edit(metrics, config):
        metrics["measured_max"] = 0

    world = World(edit={"memory": edit})
    assert checked(world)["holds"] == "NO"
    assert [row["error"] for row in rows("figure13", world)] == ["–", "–"]


def test_table():
    def edit(metrics, config):
        metrics |= {"predicted_max": 1030, "measured_max": 1000}

    found = rows("figure13", World(edit={"memory": edit}))
    assert [row["data"] for row in found] == ["CIFAR-100", "ImageNet"]
    assert [row["largest, paper's prediction"] for row in found] == ["11,147", "1,345"]
    assert [row["error, paper"] for row in found] == ["3.5 %", "3.7 %"]
    assert [row["error"] for row in found] == ["+3.0 %"] * 2
    assert [row["limit (MiB)"] for row in found] == ["24,576"] * 2
    assert [row["parameters etc. (MiB)"] for row in found] == ["1.0"] * 2


def test_figure():
    drawn = figure("figure13")
    titles = list(panels(drawn))
    assert titles[0] == "in CIFAR's place\nours: ResNet-18, 32 px"
    points, line, limit = panels(drawn)[titles[0]].get_lines()
    sizes, peaks = points.get_data()
    assert len(sizes) == 9  # eight probes, and one beyond
    assert peaks[0] == pytest.approx((2**20 + 2**14 * 64) / 2**20)
    assert line.get_ydata() == pytest.approx(peaks, rel=1e-6)
    assert limit.get_ydata()[0] == 24_576
    _, paper, *ours = panels(drawn)[titles[2]].get_lines()
    assert list(paper.get_xdata()) == [3.5, 3.7] and paper.get_markerfacecolor() == "none"
    assert [dot.get_xdata()[0] for dot in ours] == [0, 0]
