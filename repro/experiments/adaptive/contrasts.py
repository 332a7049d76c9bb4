"""What a quantity changes by from cell to cell, as a factor with its error."""

import math
from collections.abc import Mapping, Sequence

from repro.experiments.judge import BySeed, Estimate, NotRun, contrast
from repro.records import Record


def of_counts(
    cells: Sequence[BySeed], weights: Sequence[float], resolution: float = 1.0
) -> Estimate:
    """Return `contrast` of the logarithms of counts, seed by seed.

    Equal counts, such as of whole epochs, are no proof of a spread of 0, but of one no larger than
    that of numbers that lie evenly over what is rounded to one count.

    Args:
        cells: Counts above 0, one for each seed.
        weights: Of each cell.
        resolution: What is counted in.
    """
    shares = [
        weight * resolution / (math.fsum(cell) / len(cell))
        for cell, weight in zip(cells, weights, strict=True)
        if cell
    ]
    return contrast(cells, weights, log=True, resolution=math.hypot(*shares))


def trend(cells: Mapping[int, BySeed], resolution: float = 0.0) -> Estimate:
    """Return by which factor values grow where the batch doubles: a line through logarithms.

    Args:
        cells: Values above 0 by batch size, one for each seed.
        resolution: What they are counted in, such as whole epochs; see `of_counts`.

    Raises:
        NotRun: There are fewer than two sizes.
    """
    if len(cells) < 2:
        raise NotRun("too few batch sizes")
    exponents = [math.log2(size) for size in cells]
    middle = math.fsum(exponents) / len(exponents)
    moment = math.fsum((exponent - middle) ** 2 for exponent in exponents)
    weights = [(exponent - middle) / moment for exponent in exponents]
    return of_counts(list(cells.values()), weights, resolution)


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
