"""How numbers are written for people: three significant digits, whole numbers whole, – for what is not defined."""

from math import floor, isfinite, log10

from collab_compress.report.section import Cell

NONE = "–"


def written(cell: Cell) -> str:
    """Write a cell of a table."""
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:,}".replace("-", "−") if isinstance(cell, int) else short(cell)


def short(value: float | None) -> str:
    """Write a number with three significant digits, or more where it is 1000 or above."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    digits = floor(log10(abs(value)))
    if digits >= 15 or digits < -4:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return f"{value:,.{max(0, 2 - digits)}f}".replace("-", "−")


def percent(share: float | None) -> str:
    """Write a share as per cent, with three significant digits at most."""
    if share is None or not isfinite(share):
        return NONE
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"
