"""Tables of what was measured, for those who have pandas."""

from collections.abc import Mapping, Sequence
from typing import Any

from collab_compress.errors import CollabCompressError


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`.

    Raises:
        CollabCompressError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise CollabCompressError("tables take pandas: pip install 'collab-compress[data]'") from error
    return pd.DataFrame(rows)
