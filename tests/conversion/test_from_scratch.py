import pytest
import torch
from transformers import AutoModel, BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from collab_compress import CompressionError, FromScratch, from_config, read_factors


def fresh(make_tiny, **options):
    torch.manual_seed(0)
    return from_config(make_tiny("bert").config, FromScratch(**options), BertForMaskedLM)


@pytest.mark.parametrize("dk", [2, 7, 24, 30])
def test_concatenation_gives_every_channel_to_one_head(make_tiny, dk):
    mixing = next(iter(read_factors(fresh(make_tiny, dk=dk)).values())).mixing
    assert (mixing.sum(0) == 1).all()
    assert set(mixing.unique().tolist()) <= {0.0, 1.0}
    widths = mixing.sum(1)
    assert widths.max() - widths.min() <= 1
    assert (mixing.argmax(0).diff() >= 0).all()  # blocks


def test_projections_start_like_the_models_own(make_tiny):
    factors = list(read_factors(fresh(make_tiny, dk=24)).values())
    std = torch.cat([torch.cat([f.query, f.key]) for f in factors]).std()
    assert float(std) == pytest.approx(0.4, rel=0.05)
    assert all((f.content_bias == 0).all() for f in factors)


def test_t5_starts_as_narrowly_as_unscaled_scores_need():
    """T5 draws queries with deviation 1/√(D·d) and keys with 1/√D, by their names."""
    config = T5Config(vocab_size=61, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    factors = read_factors(from_config(config, FromScratch(dk=64), T5ForConditionalGeneration))
    for part, expected in (("query", 1 / 32), ("key", 1 / 8)):
        deviation = torch.cat([getattr(factor, part) for factor in factors.values()]).std()
        assert float(deviation) == pytest.approx(expected, rel=0.05)


def test_the_narrow_baseline_is_narrow_concatenated_attention(make_tiny, tmp_path):
    """Frozen blocks at R = 12 of 3 heads: plain attention with heads 4 wide, scaled by 1/√4, saved and loaded too."""
    model = fresh(make_tiny, dk=12, train_mixing=False).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 5, 24)
    for body in (model.bert, AutoModel.from_pretrained(tmp_path)):
        attention = body.encoder.layer[0].attention.self
        assert attention.scaling == pytest.approx(4**-0.5)
        assert not attention.qk.mixing.requires_grad
        q, k, _, v = attention.qkv(x).split([12, 12, 3, 24], -1)
        q, k, v = (part.reshape(2, 5, 3, -1).transpose(1, 2) for part in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(attention(x)[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dk": 0}, "dk is 0; expected at least 1"),
        ({"dk": None}, "dk is None; expected a whole number"),
        ({"dk": "8"}, "dk is '8'; expected a whole number"),
        ({"dk": 8.5}, "dk is 8.5; expected a whole number"),
    ],
)
def test_bad_options_say_what_to_do(options, message):
    with pytest.raises(CompressionError, match=message):
        FromScratch(**options)


def test_a_config_can_be_used_again(make_tiny, tmp_path):
    config = make_tiny("bert").config
    for dk in (6, 9):
        from_config(config, FromScratch(dk=dk), BertForMaskedLM).save_pretrained(tmp_path / str(dk))
        loaded = BertForMaskedLM.from_pretrained(tmp_path / str(dk))
        assert {factors.rank for factors in read_factors(loaded).values()} == {dk}
    BertForMaskedLM(config).save_pretrained(tmp_path / "dense")
    assert read_factors(BertForMaskedLM.from_pretrained(tmp_path / "dense")) == {}


def test_the_config_of_a_saved_converted_model_is_refused(make_tiny, tmp_path):
    fresh(make_tiny, dk=6).save_pretrained(tmp_path)
    saved = BertConfig.from_pretrained(tmp_path)
    with pytest.raises(CompressionError, match="pass a stock model's config"):
        from_config(saved, FromScratch(dk=6), BertForMaskedLM)
