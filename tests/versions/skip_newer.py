"""A plugin that skips tests of what an older Transformers does not have, or does in another way; for `run.py`."""

import re

import pytest
import torch
import transformers
from packaging.version import Version

from collab_compress.errors import UnsupportedModelError

INSTALLED = Version(transformers.__version__)
# Version that brought it, tests, and what it is: what these tests show does not hold before.
BROUGHT = (
    ("5.5", "static", "caches of these families have a fixed size"),
    ("5.15", r"test_generation\[(llama|phi|qwen2)", "static caches are allocated when they are filled"),
    ("5.5", r"cannot_be_saved_is_refused|a_validation_error_is_reported", "configs are validated"),
    ("5.5", r"undoing_leaves_a_stock_model|edited_by_itself_is_described", "towers are models of their own"),
    ("5.5", "of_gpt2_is_refused|towers_may_differ", "these families"),
    ("5.10", "chooses_among_the_widths_of_a_stock", "ViT"),
    ("5.10", "esm_without_a_rotary|same_as_the_python_api", "names of weights are those of the model"),
    ("5.15", "a_stock_model_needs_no_package", "T5"),
    ("5.15", r"test_half_precision\[dtype", "all weights take the dtype that is asked for"),
    ("5.15", r"growth_beside.*\[4", "losses without token counts are divided by accumulation once"),
    ("5.15", "device_map_auto", "models of several devices are made without weights"),
    ("5.20", "depend_on_accumulation|adds_up|how_its_loss", "losses without token counts are scaled by accumulation"),
    ("5.15", r"without_the_package", "a checkpoint that was loaded by its own code saves that code again"),
    ("5.15", r"saving_twice_changes_nothing", "weights are saved in one order"),
    ("5.23", r"edits_of_another_model_are_refused\[pruned", "weights of another shape are refused"),
    (
        "5.20",
        r"test_damaged_files|a_folder_of_images|folders_that_cannot_be_read",
        "image processors without torchvision",
    ),
)


NEWEST_ONLY = ("test_table.py",)  # it reads the descriptions of all families


def pytest_ignore_collect(collection_path):
    """Leave out files that cannot be imported or speak of the newest version alone."""
    old = (
        collection_path.name == "test_calibration.py" and Version("5.5") > INSTALLED
    )  # processors without torchvision
    return True if old or collection_path.name in NEWEST_ONLY else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Skip what a newer version brought."""
    for item in items:
        if "compile" in item.name and Version(torch.__version__).release < (2, 13):
            item.add_marker(pytest.mark.skip(reason="torch.compile is tested with torch 2.13 alone"))
        for version, tests, what in BROUGHT:
            if Version(version) > INSTALLED and re.search(tests, item.name):
                item.add_marker(pytest.mark.skip(reason=f"since Transformers {version}, {what}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test in which a family is refused because it needs a newer version."""
    try:
        return (yield)
    except UnsupportedModelError as error:
        older = "can be converted with Transformers" in str(error)
        if older or (Version("5.5") > INSTALLED and "'clip' has no description" in str(error)):
            pytest.skip(str(error))
        raise
