"""What every family must keep after conversion, on tiny models with padded batches."""

import copy
import math
import pickle

import pytest
import torch
from forms import hidden, mostly_slow

from collab_compress import Compression, compress, read_factors
from collab_compress.architectures import find_dense_attention

FULL = 24


def oracle_scores(x, y, factors, head, scaling):
    """score_i(x, y) by the paper's formula, one position pair at a time, in float64."""
    q, k, m, v = (t.double() for t in (factors.query, factors.key, factors.mixing, factors.content_bias))
    scores = torch.empty(len(x), len(y), dtype=torch.float64)
    for a, xa in enumerate(x.double()):
        for b, yb in enumerate(y.double()):
            scores[a, b] = scaling * (((xa @ q) * m[head]) @ (yb @ k) + v[head] @ yb)
    return scores


@pytest.mark.parametrize(
    ("family", "dk", "implementation"),
    [
        ("bert", 8, "eager"),
        ("bert", 13, "sdpa"),
        ("albert", 5, "eager"),
        ("distilbert", 5, "sdpa"),
        ("marian", 13, "eager"),
    ],
)
def test_low_rank_follows_the_formula_at_the_models_own_scale(family, dk, implementation, make_tiny, batch):
    model = make_tiny(family)
    compress(model, Compression(dk=dk), calibration=None)
    model.double().set_attn_implementation(implementation)
    name, factors = next(iter(read_factors(model).items()))
    module = model.get_submodule(name)
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    output = module(x)[0]
    value = next(getattr(module, name) for name in ("value", "v_lin", "v_proj") if hasattr(module, name))
    projection = {"distilbert": "out_lin", "marian": "out_proj"}
    for sample in range(2):
        heads = []
        for head in range(3):
            scores = oracle_scores(x[sample], x[sample], factors, head, 1 / math.sqrt(8))
            values = value(x[sample]).view(6, 3, 8)[:, head]
            heads.append(scores.softmax(-1) @ values)
        expected = torch.cat(heads, -1)
        if family in projection:
            expected = getattr(module, projection[family])(expected)
        if family == "albert":
            expected = module.LayerNorm(x[sample] + module.dense(expected))
        torch.testing.assert_close(output[sample], expected)


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


def test_copies_and_pickles_are_independent_and_equal(family, make_tiny, batch):
    model = make_tiny(family)
    compress(model, Compression(dk=8), calibration=None)
    expected = hidden(model, batch)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    copied.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(hidden(copied, batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden(pickled, batch), expected)


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
