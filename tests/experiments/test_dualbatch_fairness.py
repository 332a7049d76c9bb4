"""Equal updates, and rates tuned for each: what is read and drawn."""

import itertools
import math

import pytest
import torch
from invented import make_record
from made import SEEDS
from made_dualbatch import (
    CHOSEN,
    World,
    caption,
    figure,
    panels,
    paper_accuracy,
    results,
    rows,
)

from repro.datasets import DatasetError, ImageData, Split
from repro.experiments.dualbatch import building, fairness
from repro.experiments.dualbatch.settings import KEPT, K, final, section51, table5_training
from repro.experiments.judge import NotRun, difference


def test_plans_of_one_k_make_as_many_updates():
    records = [r for r in results("updates").ok("train") if r.config["n_small"]]
    for k, updates in zip(K, (2.07, 3.13), strict=True):
        found = [fairness.updates_over_baseline(r) for r in records if r.config["k"] == k]
        # Batch sizes are whole numbers.
        assert found and found == pytest.approx([updates] * len(found), rel=0.005)


def test_what_mixing_gains_is_over_four_small_workers():
    by_workers = {(row["k"], row["workers"]): row for row in rows("updates")}
    mixed = by_workers["1.1", "3 small, 1 large"]
    assert mixed["at equal updates"].startswith(mixed["at equal updates, paper"])
    assert by_workers["1.1", "4 small"]["at equal updates"] == "–"
    assert by_workers["1", "4 large"]["at equal updates"] == "–"
    gap, paper = fairness.over_equal_updates(results("updates"), K[1])["3 small, 1 large"]
    assert gap.mean == pytest.approx(paper)


def test_momentum_kept_is_shown_beside_and_judged_nowhere():
    def better(config):
        return paper_accuracy(config) + 2 * (config.get("optimizer_state") == "kept")

    found = {row["workers"]: row for row in rows("updates", World(accuracy=better), "quick")}
    assert [name for name in found if "kept" in name] == [
        f"{mix}, momentum kept"
        for mix in ("4 large", "2 small, 2 large", "3 small, 1 large", "4 small")
    ]
    (kept, restarted) = (
        found[name]["accuracy (%)"] for name in ("4 large, momentum kept", "4 large")
    )
    assert float(kept.split()[0]) == pytest.approx(float(restarted.split()[0]) + 2)
    assert not [name for name in found if "kept" in name and found[name]["k"] == "1.05"]
    # Where all keep it, nothing is trained twice.
    assert not [row for row in rows("updates", profile="gpu") if "kept" in row["workers"]]
    seen = results("updates", World(accuracy=better), "quick")
    plain = results("updates", World(), "quick")
    assert str(fairness.gains(seen, K[1])) == str(fairness.gains(plain, K[1]))


@pytest.mark.parametrize("profile", ["gpu", "paper"])
def test_experiments_keep_momentum_where_no_older_record_is(profile):
    config = table5_training(profile, CHOSEN, K[1], 2).config
    assert building.state_of(config) == "kept" and building.clock_of(config)["jitter"] == 0.01
    assert building.clock_of(config | {"engine": "ray"}) == {}
    for older in ("smoke", "quick", "long"):
        config = table5_training(older, CHOSEN, K[1], 2).config
        assert building.state_of(config) == "restarted"
        assert building.clock_of(config) == {"jitter": 0.0, "slowdowns": None}


def tuned(best_of_large):
    """Return accuracies that are best at twice the rate, of large batches alone at another."""

    def accuracy(config):
        if "rate" not in config:
            return paper_accuracy(config)
        best = best_of_large if config["n_small"] == 0 else 2
        return paper_accuracy(config) - abs(math.log2(config["rate"] / best))

    return accuracy


def told(world, seeds=SEEDS):
    found = results("rates", world, "long")
    for run, seed in itertools.product({run for run, _ in found.expected}, seeds):
        if seed not in SEEDS:
            changes = world(run, seed)
            found.records.append(
                make_record("train", paper="dualbatch", config=run.config, seed=seed, **changes)
            )
    return {
        (row["workers"], row["rate over the paper's"]): row["gain over large batches, both tuned"]
        for row in fairness.rates_table(found)
    }


def test_seeds_that_chose_the_rates_do_not_judge_them():
    """Held-out images choose a rate by some seeds; other seeds compare the mixes at it."""
    cells = told(World(accuracy=tuned(1)))
    best = {key for key in cells if "best" in key[1]}
    assert best == {("4 large", "1 (best)"), ("3 small, 1 large", "2 (best)"),
                    ("4 small", "2 (best)")}  # fmt: skip
    mixed = ("3 small, 1 large", "2 (best)")
    assert cells[mixed].startswith("not run: every seed chose the rates")
    later = told(World(accuracy=tuned(1)), (*SEEDS, 3, 4, 5))
    assert later[mixed].startswith("+2.90 [") and later["4 large", "1 (best)"] == "–"


def test_a_best_rate_at_an_end_of_the_grid_is_untuned():
    for edge in (fairness.RATES[0], fairness.RATES[-1]):
        cells = told(World(accuracy=tuned(edge)), (*SEEDS, 3, 4, 5))
        assert ("4 large", f"{edge:g} (best; untuned (edge of the grid))") in cells
        assert cells["3 small, 1 large", "2 (best)"] == f"not run: 4 large: {fairness.UNTUNED}"
    assert fairness.UNTUNED in caption("rates", profile="long")
    drawn = figure("rates", World(accuracy=tuned(4)), "long")
    assert list(panels(drawn)) == [
        "ours: accuracy on images held out",
        "ours: accuracy on test images",
    ]
    assert fairness.UNTUNED in drawn.get_suptitle()


def test_nothing_is_chosen_before_all_rates_were_run():
    some = results(
        "rates", World(status=lambda run: None if run.config["rate"] == 4 else {}), "long"
    )
    assert fairness.best_rate(some, 0) is None
    with pytest.raises(NotRun, match="not all rates"):
        fairness.tuned_gain(some, 3)
    assert "best" not in str(fairness.rates_table(some))


def test_of_trainings_with_momentum_kept_all_seeds_judge():
    """They were planned at once; beside others, which were looked at, the first look counts."""
    found = results("updates", profile="long", seeds=range(5))
    assert fairness.kept_gain(found, 4).n == 4
    kept = final(found, found.ok("train", setting=KEPT, n_small=4), "accuracy")
    restarted = final(found, section51(found, K[1], 4), "accuracy")
    assert difference(kept, restarted).n == 1


def _data(count=20):
    images = torch.arange(count * 3 * 64, dtype=torch.int64).reshape(count, 3, 8, 8) % 251
    split = Split(images.to(torch.uint8), torch.arange(count) % 10)
    return ImageData("made", "made", "real", "Made up.", "0", tuple("0123456789"), split, split)


def test_what_is_held_out_is_not_trained_on_and_is_measured():
    (run, *_) = fairness.rate_runs("smoke", CHOSEN)
    (entry,) = run.config["sub_stages"]
    plan = entry["plan"] | {"samples": 16}
    config = run.config | {"sub_stages": [entry | {"plan": plan}], "test_samples": 10}
    images = building.TrainingData(config, _data(), "cpu")
    assert images.held_out is not None
    trained = {tuple(image.flatten().tolist()) for image in images.images}
    held = {tuple(image.flatten().tolist()) for image in images.held_out[0]}
    assert len(images.images) == 16 and len(held) == 4 and not trained & held
    model = building.build_model(config, 10)
    assert set(images.evaluation(config, "cpu")(model)) == {"accuracy", "test_loss", "held_out"}
    with pytest.raises(DatasetError, match="20 samples of 20 leave none"):
        _data().train.parted(20)


def test_all_test_images_count_after_the_last_epoch_alone(monkeypatch):
    run = table5_training("smoke", CHOSEN, K[1], 2)
    (entry,) = run.config["sub_stages"]
    config = run.config | {
        "sub_stages": [entry | {"plan": entry["plan"] | {"samples": 16}}],
        "test_samples": 20,
        "watched_samples": 5,
        "stages": [[1, 0.1], [2, 0.1]],
    }
    images = building.TrainingData(config, _data(), "cpu")
    seen = []
    monkeypatch.setattr(
        building,
        "evaluate_classifier",
        lambda model, batches, device: seen.append(sum(len(y) for _, y in batches)) or {},
    )
    evaluate = images.evaluation(config, "cpu")
    for _ in range(3):
        evaluate(torch.nn.Identity())
    assert seen == [5, 5, 20]
