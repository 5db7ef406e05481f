"""The exceptions of this package; every message says what happened, where, and what to do."""

LONGEST = 400  # characters of a message


class CollabCompressError(Exception):
    """Base of all errors raised on purpose by this package."""


class UnsupportedModelError(CollabCompressError):
    """The model has no attention that can be converted, or one that breaks the algebra."""


class CompressionError(CollabCompressError):
    """A conversion was asked for that cannot be done, or its weights are unusable."""


class CalibrationError(CollabCompressError):
    """Calibration data is missing, empty or malformed."""


class HeadError(CollabCompressError):
    """Something was asked of attention heads that they cannot do."""


class RecipeError(CollabCompressError):
    """An experiment is described in a way that cannot be read, or cannot be run."""


class BusyError(RecipeError):
    """Another process is at work on the same experiment."""


class CheckpointError(CollabCompressError):
    """A model directory cannot be read or written."""


class DataError(CollabCompressError):
    """A data set is missing or malformed, or predictions cannot be scored."""


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, shortened if it is very long."""
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"
