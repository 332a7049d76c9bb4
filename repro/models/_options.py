"""Checks of the options that every architecture shares."""

from repro.measure.checks import is_whole


def check_at_least(minimum: int, **options: int) -> None:
    """Raise a ValueError if an option is not a whole number of at least `minimum`.

    Args:
        minimum: The smallest value allowed.
        **options: Each option by its name, as the caller of the architecture knows it.
    """
    for name, value in options.items():
        if not is_whole(value, minimum):
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least {minimum}: "
                f"pass {name}={minimum} or more"
            )
