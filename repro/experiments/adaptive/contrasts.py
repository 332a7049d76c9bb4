"""What a quantity changes by from cell to cell, as a factor with its error.

Of a whole design at once: its cells make the spread, and counts have at least rounding's.
"""

import math
from collections.abc import Mapping, Sequence

from repro.experiments.intervals import Gap, NotRun, Spread, contrast, logs_of
from repro.records import Record


def trend(cells: Mapping[int, Sequence[float]], resolution: float = 0.0) -> Gap:
    """Return by which factor values grow where the batch doubles: a line through logarithms.

    Args:
        cells: Values above 0 by batch size, one for each seed.
        resolution: What they are counted in, such as whole epochs; see `rounding`.

    Raises:
        NotRun: There are fewer than two sizes.
    """
    if len(cells) < 2:
        raise NotRun("too few batch sizes")
    exponents = [math.log2(size) for size in cells]
    middle = math.fsum(exponents) / len(exponents)
    moment = math.fsum((exponent - middle) ** 2 for exponent in exponents)
    weights = [(exponent - middle) / moment for exponent in exponents]
    logs = [logs_of(cell) for cell in cells.values()]
    return log_contrast(logs, weights, [rounding(cell, resolution) for cell in cells.values()])


def rounding(counts: Sequence[float], resolution: float = 1.0) -> float:
    """Return the spread of a count's logarithm that rounding alone makes.

    Equal counts, such as of whole epochs, are no proof of a spread of 0, but of one no larger than
    this: that of numbers spread evenly over what is rounded to one count.
    """
    return resolution / math.sqrt(12) / (math.fsum(counts) / len(counts))


def log_contrast(
    logs: Sequence[Sequence[float]],
    weights: Sequence[float],
    least: Sequence[float] | None = None,
    *,
    trials: str = "seeds",
) -> Gap:
    """Return `contrast` of logarithms, whose spread is pooled over all these cells.

    Args:
        logs: By cell, one for each seed.
        weights: Of each cell.
        least: The spread that each cell has at least, of what is counted by `rounding`.
        trials: What the values are; ``rounds`` of a timing.
    """
    spread = Spread.pooled(logs)
    return contrast(logs, weights, spread, least, log=True, trials=trials)


def as_high_after(
    trainings: Sequence[Record], others: Sequence[Record], name: str
) -> list[float | None]:
    """Return after what part of the other's epochs a training is first as high as it ends.

    Args:
        trainings: One of each seed.
        others: To compare with, seed by seed.
        name: Of what is measured after each epoch.

    Returns:
        One for each seed that both have; None where it never is as high.
    """
    ends = {other.seed: other.metrics[name] for other in others}
    parts: list[float | None] = []
    for training in trainings:
        if training.seed in ends:
            end = ends[training.seed]
            numbers = enumerate(training.metrics[name], 1)
            first = next(
                (n for n, value in numbers if value is not None and value >= end[-1]), None
            )
            parts.append(first and first / len(end))
    return parts
