"""The largest batch size that fits in memory, by trial."""

from collections.abc import Callable


def largest_batch(
    fits: Callable[[int], bool],
    known: int = 0,
    *,
    guess: int | None = None,
    growth: float = 2.0,
    within: int = 32,
) -> int:
    """The largest batch size that fits, 0 if none: by steps until one does not, then by bisection.

    Args:
        fits: Whether a size fits; sizes below a fitting one are taken to fit.
        known: A size that fits, to start from; 0 for none.
        guess: Instead a size that may fit, such as a prediction; tried first, then quarters less.
        growth: Factor from one step up to the next.
        within: The relative error is at most one in `within`: 32 for 3 %.
    """
    low = known
    if guess is not None:
        low = max(1, guess)
        while low and not fits(low):
            low = low * 3 // 4
    high = max(low + 1, int(low * growth))
    while fits(high):
        low, high = high, max(high + 1, int(high * growth))
    while high - low > max(1, low // within):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
