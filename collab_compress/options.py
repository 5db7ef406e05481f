"""Options of conversions and reports, defined in `collab_compress_options`."""

from collab_compress_options.options import (
    KEEP,
    KINDS,
    LARGEST_SEED,
    SECTION_NAMES,
    CalibrationOptions,
    Compression,
    Kind,
    ReportOptions,
    Solver,
    check_counts,
    check_kinds,
    check_known,
)

__all__ = [
    "KEEP",
    "KINDS",
    "LARGEST_SEED",
    "SECTION_NAMES",
    "CalibrationOptions",
    "Compression",
    "Kind",
    "ReportOptions",
    "Solver",
    "check_counts",
    "check_kinds",
    "check_known",
]
