"""Checks of arguments that several methods on heads share."""

from math import inf, isfinite
from numbers import Real
from typing import Any

from collab_compress.errors import HeadError


def check_number(name: str, value: Any, least: float = -inf, most: float = inf, *, below: float = inf) -> None:
    """Raise a HeadError unless a value is a finite number from `least` to `most`, and below `below`."""
    if isinstance(value, Real) and isfinite(number := float(value)) and least <= number <= most and number < below:
        return
    end = f" to {most:g}" if most < inf else f" to below {below:g}" if below < inf else " or more"
    expected = "a finite number" if least == -inf else f"{least:g}{end}"
    raise HeadError(f"{name} is {value!r}; expected {expected}")
