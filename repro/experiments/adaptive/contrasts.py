"""What a quantity changes by from cell to cell, as a factor with its error.

Of a whole design at once: all cells share their spread, and counts have at least rounding's.
"""

import math
from collections.abc import Mapping, Sequence

from repro.experiments.intervals import Gap, NotRun, Spread, logs_of, same_seeds


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
    return contrast(logs, weights, [rounding(cell, resolution) for cell in cells.values()])


def rounding(counts: Sequence[float], resolution: float = 1.0) -> float:
    """Return the spread of a count's logarithm that rounding alone makes.

    Equal counts, such as of whole epochs, are no proof of a spread of 0, but of one no larger than
    this: that of numbers spread evenly over what is rounded to one count.
    """
    return resolution / math.sqrt(12) / (math.fsum(counts) / len(counts))


def contrast(
    logs: Sequence[Sequence[float]],
    weights: Sequence[float],
    least: Sequence[float] | None = None,
    *,
    trials: str = "seeds",
) -> Gap:
    """Return the sum of the cells' mean logarithms, each times its weight.

    The cells' pooled spread makes the error; Welch's and Satterthwaite's where they do not share
    one. What seeds share drops out where they are blocks, the same in all cells, and the weights
    come to 0.

    Args:
        logs: By cell, one for each seed.
        weights: Of each cell.
        least: The spread that each cell has at least, of what is counted by `rounding`.
        trials: What the values are; ``rounds`` of a timing.
    """
    counts = [len(cell) for cell in logs]
    mean = math.fsum(w * math.fsum(c) / len(c) for w, c in zip(weights, logs, strict=True))
    shares = [weight**2 / count for weight, count in zip(weights, counts, strict=True)]
    spread = Spread.pooled(logs)
    if spread.alike and spread.within and same_seeds(logs) and abs(math.fsum(weights)) < 1e-9:
        spread = spread.within
    if not spread.dof or (not spread.alike and min(counts) < 2):
        return Gap(mean, math.nan, math.nan, math.nan, log=True, trials=trials)
    sds = [spread.sd if spread.alike else Spread.pooled([cell]).sd for cell in logs]
    floors = least or [0.0] * len(sds)
    variances = [s * max(sd, low) ** 2 for s, sd, low in zip(shares, sds, floors, strict=True)]
    error, dof = math.sqrt(math.fsum(variances)), float(spread.dof)
    if not spread.alike:
        freedom = math.fsum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
        dof = math.fsum(variances) ** 2 / freedom if freedom else math.inf
    # Two cells of so many values each, and of this spread, have a difference with this error.
    count = len(counts) / math.fsum(1 / count for count in counts)
    sd = error * math.sqrt(count / 2)
    seed_dof = dof / (count - 1) if count > 1 and math.isfinite(dof) else 2.0
    return Gap(mean, error, dof, sd, log=True, seed_dof=seed_dof, trials=trials)
