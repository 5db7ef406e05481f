"""What a converted model keeps of the dense one: its scale, probabilities, dropout, and one graph."""

import copy
import math

import pytest
import torch
from forms import hidden, mostly_slow

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


def test_attention_dropout_acts_in_training_only(make_tiny, batch):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    attention = model.encoder.layer[0].attention.self.train()
    x = torch.randn(2, 5, 24)
    torch.manual_seed(0)
    first, second = attention(x)[0], attention(x)[0]
    assert not torch.equal(first, second)
    attention.eval()
    assert torch.equal(attention(x)[0], attention(x)[0])


def test_a_model_converted_in_part_runs(make_tiny, batch):
    dense = make_tiny("bert")
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=FULL, modules="*layer.1*"), calibration=None)
    assert list(read_factors(model)) == ["encoder.layer.1.attention.self"]
    torch.testing.assert_close(hidden(model, batch), hidden(dense, batch), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", mostly_slow(zip(["albert", "bert", "distilbert", "marian"]), ("bert",)))
def test_compiles_without_graph_breaks(family, make_tiny, batch):
    model = make_tiny(family)
    compress(model, Compression(dk=8), calibration=None)
    expected = hidden(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(hidden(compiled, batch), expected, atol=1e-5, rtol=1e-4)
