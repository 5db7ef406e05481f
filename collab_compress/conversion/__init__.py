"""From dense to converted and back: compress, refit, recover, expand, and build from scratch."""

from collab_compress.conversion.expand import to_stock
from collab_compress.conversion.feed_forward import FeedForward, find_feed_forward
from collab_compress.conversion.recovery import distil_, recover_, with_copies
from collab_compress.conversion.refit import refit_
from collab_compress.conversion.report import PartReport

__all__ = [
    "FeedForward",
    "PartReport",
    "distil_",
    "find_feed_forward",
    "recover_",
    "refit_",
    "to_stock",
    "with_copies",
]
