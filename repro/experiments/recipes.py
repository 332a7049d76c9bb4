"""The rows of every paper's recipe: the paper's value of an item beside each profile's."""

from collections.abc import Callable

from repro.experiments.design import LONG

PROFILES = {"paper profile": "paper", "gpu": "gpu", "long": LONG, "quick": "quick"}  # by column
NOT_STATED = "not stated"
AS_QUICK = "as quick"


def compared(
    item: str, paper: str, ours: Callable[[str], str], why: str = "", *, long: bool = True
) -> dict[str, str]:
    """Return the row of an item.

    Args:
        item: What is set; no other row of the paper has the same.
        paper: The paper's value, or `NOT_STATED`.
        ours: Returns a profile's value.
        why: Why they differ; left out where all are the paper's.
        long: Whether the profile `long` runs what it belongs to.
    """
    values = {
        column: ours(profile) if long or profile != LONG else AS_QUICK
        for column, profile in PROFILES.items()
    }
    same = all(value == paper for value in values.values())
    return {"item": item, "paper": paper, **values, "why they differ": "" if same else why}
