"""The paper's recipe beside ours, item by item, computed from `settings`."""

from collections.abc import Callable

from repro.experiments.microconv.settings import (
    ALGORITHMS,
    BATCHES,
    CONV2_BATCH,
    LIMITS_MIB,
    NETWORKS,
    REPEATS,
    ROLES,
    SETTINGS,
    policies,
)

PROFILES = {"paper profile": "paper", "gpu": "gpu", "quick": "quick"}
_SMALL = "two cores have five minutes"


def recipe() -> list[dict[str, str]]:
    """Return a row for each item.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, quick, why they differ.
    """
    rows = [
        _row(
            f"{role}: mini-batch, image side",
            f"{BATCHES[role]}, {NETWORKS['paper'][role]['image']}",
            lambda p, role=role: (  # type: ignore[misc]
                f"{NETWORKS[p][role]['batch']}, {NETWORKS[p][role]['image']}"
            ),
            f"{_SMALL}; the limits of workspace are not scaled with it, and bind less",
        )
        for role in ROLES
    ]
    limits = ", ".join(f"{limit} MiB" for limit in LIMITS_MIB)
    return [
        *rows,
        _row("AlexNet's conv2: mini-batch", "256", lambda p: str(CONV2_BATCH[p]), _SMALL),
        _row("workspace of each kernel", limits, lambda _: limits, ""),
        _row(
            "policies",
            "undivided, powerOfTwo, all",
            lambda p: ", ".join(
                f"{role}: {' '.join(own)}" for role in ROLES if (own := policies(p, role))
            ),
            "all measures every size: minutes for the large networks",
        ),
        _row(
            "algorithms",
            "cuDNN 6.0 and 7.1",
            lambda p: ", ".join(ALGORITHMS[p]),
            "cuDNN needs its device; NNPACK has algorithms with explicit workspace on a CPU",
        ),
        _row(
            "numbers",
            "float32",
            lambda p: ", ".join(SETTINGS[p]),
            "today's devices round float32 products (TF32) by default; both are measured",
        ),
        _row("repeats", "50", lambda p: f"median of {REPEATS[p]}", _SMALL),
    ]


def _row(item: str, paper: str, ours: Callable[[str], str], why: str) -> dict[str, str]:
    values = {column: ours(profile) for column, profile in PROFILES.items()}
    return {"item": item, "paper": paper, **values, "why they differ": why}
