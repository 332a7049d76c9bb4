"""What the paper's Table 1 says: how far ResNet-50 trains, and at what speed."""

from repro.experiments.outofcore.settings import CHUNKS, IN_CORE, PAPER, SCHEDULE

CLAIMS, TABLE = PAPER["claims"], PAPER["table1"]
IN_CORE_BATCH, LMS_BATCH = CLAIMS["in_core_batch"], CLAIMS["lms_batch"]
LARGEST_BATCH = CLAIMS["largest_batch"]


def published(mode: str) -> dict[int, float]:
    """Return the paper's images/s by batch size, of those that trained."""
    pairs = zip(TABLE["batches"], TABLE[mode], strict=True)
    return {batch: rate for batch, rate in pairs if rate == rate}


def over_lms(way: str, batch: int, lms_batch: int) -> float:
    """Return the paper's speed kept by a way over LMS's, V100 over P100."""
    shares = []
    for mode, base, size in ((way, IN_CORE, batch), ("lms", "lms_in_core", lms_batch)):
        shares.append(published(mode)[size] / max(published(base).values()))
    return shares[0] / shares[1]


def faster(batch: int) -> float:
    """Return the paper's images/s at a batch size, without chunks or with, whichever are more."""
    chunks = published(CHUNKS)[batch]
    return max(chunks, published(SCHEDULE).get(batch, chunks))
