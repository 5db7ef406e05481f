"""Make heatmaps of tensors."""

from collections.abc import Sequence

from torch import Tensor

from collab_compress.report.section import Heatmap, numbers


def heatmap(title: str, matrix: Tensor, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Heatmap:
    """Make a heatmap of a matrix (rows, columns)."""
    return Heatmap(title, tuple(numbers(row) for row in matrix), tuple(rows), tuple(columns))


def ragged(title: str, vectors: Sequence[Tensor], rows: Sequence[str]) -> Heatmap:
    """Make a heatmap of vectors of any length, a row each, blank where one is shorter than the longest."""
    longest = max(map(len, vectors))
    values = tuple(numbers(vector) + (None,) * (longest - len(vector)) for vector in vectors)
    return Heatmap(title, values, tuple(rows), numbered(longest))


def numbered(count: int) -> tuple[str, ...]:
    """Name rows or columns by their numbers, from 0."""
    return tuple(map(str, range(count)))
