"""The tiniest model of every family that can be converted, and what it reads.

Tests marked `every_family` run for all; the others for one family of each kind, because modules that are a `copy_of`
another family's differ in nothing else. Tests marked `structures` do not depend on how a family names its parts: they
run for STRUCTURES, and for the other families with the slow tests.
"""

import pytest
from tiny_families import TINIES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STRUCTURES = ("albert", "bert-cross", "clip", "deberta-v2", "detr", "gpt2", "llama", "marian", "mobilebert")
STRUCTURES += ("musicgen_decoder", "t5", "vit", "whisper")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "structures: for a family of each structure; for the others, a slow test")
    config.addinivalue_line("markers", "every_family: for families that are copies of another too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `kin` with every family, or one of each kind, and `generator` with those that generate."""
    every = metafunc.definition.get_closest_marker("every_family")
    structures = metafunc.definition.get_closest_marker("structures")
    names = sorted(name for name, tiny in TINIES.items() if every or not tiny.copy_of)
    slow = [name for name in names if structures and name not in STRUCTURES]
    values = {name: pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names}
    if "kin" in metafunc.fixturenames:
        metafunc.parametrize("kin", values.values())
    if "generator" in metafunc.fixturenames:
        metafunc.parametrize("generator", [values[name] for name in names if TINIES[name].generates])


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "</s>": 1, "<s>": 2, "[UNK]": 3, **{f"w{number}": number for number in range(4, 61)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )
