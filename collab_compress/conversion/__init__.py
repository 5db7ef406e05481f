"""From dense to converted and back: compress, refit, expand, and build from scratch."""

from collab_compress.conversion.expand import to_stock
from collab_compress.conversion.feed_forward import FeedForward
from collab_compress.conversion.inventory import find_feed_forward
from collab_compress.conversion.refit import refit_
from collab_compress.conversion.report import PartReport

__all__ = [
    "FeedForward",
    "PartReport",
    "find_feed_forward",
    "refit_",
    "to_stock",
]
