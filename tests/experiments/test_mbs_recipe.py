"""The recipe table of Micro-Batch Streaming says what is run."""

from repro.experiments.mbs import settings
from repro.experiments.mbs.recipe import recipe
from repro.experiments.recipes import PROFILES


def test_it_says_what_the_profiles_run():
    rows = {row["item"]: row for row in recipe()}
    for role in settings.ROLES:
        for column, profile in PROFILES.items():
            assert rows[f"{role}: network"][column].startswith(
                settings.MODELS[profile][role]["name"]
            )
            sizes = rows[f"{role}: mini-batches with MBS"][column].split(", ")
            assert sizes == [str(n) for n in settings.MINI_BATCHES[profile][role]]
            epochs = rows[f"{role}: samples of an epoch, epochs"][column].split(", ")[1]
            timed_alone = profile == "gpu" and role not in settings.TRAINED_ON_GPU
            expected = "timed alone" if timed_alone else settings.EXTENT[profile][role]["epochs"]
            assert epochs == str(expected)
    assert rows["memory"]["paper profile"].startswith("24 GiB")
    assert rows["ResNet-50: data"]["paper profile"].endswith("split random")
    assert all(list(row) == list(rows["memory"]) for row in rows.values())


def test_what_the_paper_leaves_open_has_a_ground():
    for row in recipe():
        if "not stated" in row["paper"]:
            assert row["why they differ"], row["item"]
