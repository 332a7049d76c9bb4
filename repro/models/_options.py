"""Checks of the options that every architecture shares."""


def check_at_least(minimum: int, **options: int) -> None:
    """Raise a ValueError if an option is not a whole number of at least `minimum`.

    Args:
        minimum: The smallest value allowed.
        **options: Each option by its name, as the caller of the architecture knows it.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least {minimum}: "
                f"pass {name}={minimum} or more"
            )
