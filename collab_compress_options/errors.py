"""Exceptions of this package; every message says what happened, where, and what to do."""

from math import inf, isfinite
from numbers import Real
from typing import Any

MAX_MESSAGE_CHARS = 400


def install(extra: str = "") -> str:
    """Return how to install this package, with one of its extras, until a release puts it on an index."""
    source = f"'.[{extra}]'" if extra else "."
    return f"pip install {source} in a checkout of collab-compress"


class CollabCompressError(Exception):
    """Base of all errors of this package."""


class UnsupportedModelError(CollabCompressError):
    """The model has no attention that can be converted."""


class CompressionError(CollabCompressError):
    """A conversion is impossible, or its weights are unusable."""


class CalibrationError(CollabCompressError):
    """Calibration data is missing, empty or malformed."""


class HeadError(CollabCompressError):
    """A method cannot act on these attention heads."""


class RecipeError(CollabCompressError):
    """A recipe cannot be read, or its experiment cannot be run."""


class CheckpointError(CollabCompressError):
    """A model directory cannot be read or written."""


class DataError(CollabCompressError):
    """A data set is missing or malformed, or predictions cannot be scored."""


for _error in (CollabCompressError, *CollabCompressError.__subclasses__()):
    _error.__module__ = "collab_compress.errors"  # where users import it from


def shown(value: Any) -> str:
    """Return a value as messages show it: a number of NumPy as a plain one."""
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return repr(value.item() if is_numpy_scalar else value)


def check_type(name: str, value: Any, expected: type, error: type[CollabCompressError]) -> None:
    """Raise `error` for an argument of another type than expected, such as a dict of options in place of a class."""
    if not isinstance(value, expected):
        got = f"{name} is of type {type(value).__name__}: {shown(value)}"[:MAX_MESSAGE_CHARS]
        raise error(f"{got}; expected {expected.__name__}")


def check_number(name: str, value: Any, least: float = -inf, most: float = inf, *, below: float = inf) -> None:
    """Raise a HeadError unless a value is a finite number from `least` to `most`, and below `below`."""
    if isinstance(value, Real) and isfinite(number := float(value)) and least <= number <= most and number < below:
        return
    end = f" to {most:g}" if most < inf else f" to below {below:g}" if below < inf else " or more"
    expected = "a finite number" if least == -inf else f"{least:g}{end}"
    raise HeadError(f"{name} is {shown(value)}; expected {expected}")


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of at most 400 characters; of the file system, the reason alone."""
    reason = error.strerror if isinstance(error, OSError) and error.filename is not None else None
    words = " ".join((reason or str(error)).split())
    return words if len(words) <= MAX_MESSAGE_CHARS else words[: MAX_MESSAGE_CHARS - 1] + "…"
