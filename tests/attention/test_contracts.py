"""What a converted model keeps of the dense one: its scale, probabilities, dropout, and one graph."""

import copy
import math

import pytest
import torch

from collab_compress import Compression, compress, read_factors
from collab_compress.architectures import find_dense_attention

FULL = 24


def test_scale_is_not_that_of_the_shared_width(family, make_tiny):
    """The authors' code scales by √(R/H); at R = 8 that would multiply every score by 1.6."""
    dense = make_tiny(family)
    scaling = find_dense_attention(dense)[0].scaling
    compress(dense, Compression(dk=8), calibration=None)
    name = next(iter(read_factors(dense)))
    assert dense.get_submodule(name).scaling == scaling == pytest.approx(1 / math.sqrt(8))


def test_output_attentions(family, make_tiny, batch):
    dense = make_tiny(family)
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=FULL), calibration=None)
    for model in (dense, converted):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        name = "decoder_attentions" if family == "marian" else "attentions"
        expected = dense(**batch, output_attentions=True)[name]
        attentions = converted(**batch, output_attentions=True)[name]
    real = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()[:, None, :, None]
    assert len(attentions) == len(expected)
    for one, other in zip(attentions, expected, strict=True):
        torch.testing.assert_close(one * real, other * real, atol=1e-5, rtol=1e-4)
