"""The tiniest model of every family that can be converted, and what it reads.

One rule says which tests run for which: tests marked `every_family` are the contracts, and run for all. The others
are heavier and run for one family of each kind only, which leaves out those that are a `copy_of` another.
"""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from tiny_families import FAMILIES, Batch, Tiny, make_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from collab_compress import Compression, Solver, compress


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_family: a contract, which families that are copies of another keep too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `kin` every family, or one of each kind, and `generator` those of them that generate."""
    every = metafunc.definition.get_closest_marker("every_family") is not None
    names = sorted(name for name, tiny in FAMILIES.items() if every or not tiny.copy_of)
    if "kin" in metafunc.fixturenames:
        metafunc.parametrize("kin", names)
    if "generator" in metafunc.fixturenames:
        metafunc.parametrize("generator", [name for name in names if FAMILIES[name].generates])


@pytest.fixture(scope="session")
def tinies() -> dict[str, Tiny]:
    return FAMILIES


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedModel]:
    return make_tiny


@cache
def low_rank(name: str, class_name: str) -> PreTrainedModel:
    model = make_tiny(name, class_name)
    compress(model, Compression(dk=7, solver=Solver(sweeps=3)), calibration=None)
    return model


@pytest.fixture(scope="session")
def build_low() -> Callable[..., PreTrainedModel]:
    """Build a tiny model with dk = 7; each is converted once."""
    return lambda name, class_name="": copy.deepcopy(low_rank(name, class_name))


@pytest.fixture(scope="session")
def attend_by_() -> Callable[[PreTrainedModel, str], None]:
    def set_(model: PreTrainedModel, implementation: str) -> None:
        """Set how a model attends; some know nothing but eager attention."""
        model.set_attn_implementation(implementation if model._supports_sdpa else "eager")

    return set_


@pytest.fixture(scope="session")
def inputs() -> Callable[..., Batch]:
    def make(name: str, seed: int = 0) -> Batch:
        """What the family reads, padded where it can be."""
        return FAMILIES[name].reads(torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., torch.Tensor]:
    def real_outputs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """First output, or those of two towers side by side; at real tokens where there is one for each."""
        with torch.no_grad():
            output = model(**batch)
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        towers = [output[name][0] for name in ("text_model_output", "vision_model_output") if name in output]
        real = [
            each if mask is None or mask.shape != each.shape[:2] else each[mask.bool()]
            for each in towers or [output[0]]
        ]
        return torch.cat([each.flatten() for each in real]) if towers else real[0]

    return real_outputs


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "</s>": 1, "<s>": 2, "[UNK]": 3, **{f"w{number}": number for number in range(4, 61)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )
