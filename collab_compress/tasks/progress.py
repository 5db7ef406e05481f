"""Whether `datasets` shows its progress bars."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of `datasets` and of downloads inside, and leave them as they were.

    The environment variables that force them on or off keep their say.
    """
    before = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _show(shown, shown)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _show(*before)


def _show(mapping: bool, downloads: bool) -> None:
    (datasets.enable_progress_bars if mapping else datasets.disable_progress_bars)()
    (enable_progress_bars if downloads else disable_progress_bars)()
