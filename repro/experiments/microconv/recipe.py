"""The paper's recipe beside ours, item by item, computed from `settings`."""

from repro.experiments.microconv.settings import (
    ALGORITHMS,
    BATCHES,
    CONV2_BATCH,
    LIMITS_MIB,
    NETWORKS,
    REPEATS,
    ROLES,
    SETTINGS,
    limit_of,
    policies,
)
from repro.experiments.recipes import compared

_SMALL = "two cores have five minutes (long: hours)"


def recipe() -> list[dict[str, str]]:
    """Return a row for each item.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, long, quick, why they differ.
    """
    rows = [
        compared(
            f"{role}: mini-batch, image side",
            f"{BATCHES[role]}, {NETWORKS['paper'][role]['image']}",
            lambda p, role=role: (  # type: ignore[misc]
                f"{NETWORKS[p][role]['batch']}, {NETWORKS[p][role]['image']}"
            ),
            f"{_SMALL}; quick does not scale limits with it, so that they bind less; whole "
            "iterations have mini-batches and limits of their own",
        )
        for role in ROLES
    ]
    limits = ", ".join(f"{limit} MiB" for limit in LIMITS_MIB)
    return [
        *rows,
        compared(
            "AlexNet's conv2: mini-batch", "256", lambda p: str(CONV2_BATCH[p]), _SMALL, long=False
        ),
        compared(
            "workspace of each kernel",
            limits,
            lambda p: ", ".join(
                f"{limit_of(p, 'AlexNet', 'WR', limit):g} MiB" for limit in LIMITS_MIB
            ),
            "long: as much for a sample; so have ResNet-50 and DenseNet-40 by their mini-batches",
        ),
        compared(
            "policies",
            "undivided, powerOfTwo, all",
            lambda p: ", ".join(
                f"{role}: {' '.join(names)}" for role in ROLES if (names := policies(p, role))
            ),
            "all measures every size: minutes for the large networks",
        ),
        compared(
            "algorithms",
            "cuDNN 6.0 and 7.1",
            lambda p: ", ".join(ALGORITHMS[p]),
            "cuDNN needs its device; NNPACK has algorithms with explicit workspace on a CPU",
        ),
        compared(
            "numbers",
            "float32",
            lambda p: ", ".join(SETTINGS[p]),
            "today's devices round float32 products (TF32) by default; both are measured",
        ),
        compared("repeats", "50", lambda p: f"median of {REPEATS[p]}", _SMALL, long=False),
    ]
