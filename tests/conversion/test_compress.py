import copy
import json

import pytest
import torch
from torch import nn
from transformers import (
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
)

from collab_compress import (
    CalibrationError,
    CollabCompressError,
    Compression,
    CompressionError,
    UnsupportedModelError,
    compress,
    read_factors,
)
from collab_compress.architectures import FAMILIES, find_dense_attention
from collab_compress.checkpoint import edits_of
from collab_compress.factorization import factorize


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_factors_are_those_of_the_decomposition(family, make_tiny):
    model = make_tiny(family)
    site = find_dense_attention(model, FAMILIES)[0]
    expected = factorize(site.query_heads(), site.key_heads(), 7, query_bias=site.query_bias()).factors
    compress(model, Compression(rank=7), calibration=None)
    found = read_factors(model)[site.name]
    assert found.query.shape == (24, 7)
    assert found.key.shape == (24, 7)
    assert found.mixing.shape == (3, 7)
    assert found.content_bias.shape == (3, 24)
    for name in ("query", "mixing", "key", "content_bias"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name).float())


def test_calibrated_scores_beat_uncalibrated_ones_on_the_data(family, make_tiny, calibration):
    """The error that calibration minimises is lower, on its data, than that of a conversion without."""
    dense = make_tiny(family)
    drifts = []
    for data in (None, calibration):
        model = copy.deepcopy(dense)
        compress(model, Compression(rank=8), calibration=data)
        before, after = [], []
        for batch in calibration:
            with torch.no_grad():
                before.append(dense(**batch).last_hidden_state)
                after.append(model(**batch).last_hidden_state)
        drifts.append(float((torch.cat(after) - torch.cat(before)).norm() / torch.cat(before).norm()))
    assert drifts[1] < drifts[0]


def test_report(family, make_tiny, calibration):
    model = make_tiny(family)
    before = model.num_parameters()
    report = compress(model, Compression(rank=8), calibration)
    assert report.parameters_before == before
    assert report.parameters_after == model.num_parameters()
    saved = sum(module.parameters_before - module.parameters_after for module in report.modules)
    assert before - report.parameters_after == saved
    for module in report.modules:
        assert 0 < module.data_error < 1
        assert module.weight_error > 0
        assert module.macs_after != module.macs_before
    assert report.drift.output == "last_hidden_state"
    assert report.drift.sequences == 4  # one batch of eight is held back
    assert json.loads(json.dumps(report.to_dict()))["modules"][0]["break_even_length"] is None  # R = d: any length


def test_drift_is_measured_on_what_was_held_back(make_tiny, calibration):
    dense = make_tiny("bert")
    model = copy.deepcopy(dense)
    report = compress(model, Compression(rank=8), calibration)
    mask = calibration[-1]["attention_mask"].bool()
    with torch.no_grad():
        one, other = (net(**calibration[-1]).last_hidden_state[mask] for net in (dense, model))
    assert report.drift.relative_error == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-4)


def test_no_calibration_no_drift(make_tiny):
    report = compress(make_tiny("bert"), Compression(rank=8), calibration=None)
    assert report.drift is None
    assert report.modules[0].data_error is None


def test_same_seed_same_bits(family, make_tiny, calibration):
    models = [make_tiny(family) for _ in range(2)]
    for model in models:
        compress(model, Compression(rank=8), calibration)
    assert equal(state(models[0]), state(models[1]))


def test_progress_names_every_module(make_tiny):
    seen = []
    compress(make_tiny("bert"), Compression(rank=8), calibration=None, progress=lambda *step: seen.append(step))
    assert seen == [("encoder.layer.0.attention.self", 0, 2), ("encoder.layer.1.attention.self", 1, 2), ("", 2, 2)]


def test_dtype_and_mode_are_kept(make_tiny):
    model = make_tiny("bert").to(torch.bfloat16).train()
    compress(model, Compression(rank=8), calibration=None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())


def test_a_classifier_keeps_its_head(make_tiny, batch, calibration):
    dense = make_tiny("bert", BertForSequenceClassification)
    model = copy.deepcopy(dense)
    report = compress(model, Compression(rank=24), calibration)
    assert report.drift.output == "logits"
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, dense(**batch).logits, atol=2e-5, rtol=1e-4)


def test_nothing_changes_when_a_module_cannot_be_decomposed(family, make_tiny, monkeypatch):
    model = make_tiny(family)
    before, calls = state(model), []

    def fails_at_the_last(*args, **kwargs):
        calls.append(1)
        if len(calls) == len(find_dense_attention(model, FAMILIES)):
            raise ValueError("no")
        return factorize(*args, **kwargs)

    monkeypatch.setattr("collab_compress.conversion.plan.factorize", fails_at_the_last)
    with pytest.raises(CompressionError, match=r"attn.*: no|attention.*: no"):
        compress(model, Compression(rank=8), calibration=None)
    assert equal(before, state(model))
    assert edits_of(model) == []


def test_nothing_changes_when_interrupted_after_the_swap(family, make_tiny, batch, calibration, monkeypatch):
    model = make_tiny(family)
    before = state(model)
    with torch.no_grad():
        expected = model(**batch).last_hidden_state

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("collab_compress.conversion.compress.compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(model, Compression(rank=8), calibration)
    assert equal(before, state(model))
    with torch.no_grad():
        assert torch.equal(model(**batch).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "dk is 0; expected at least 1"),
        ({"rank": 10.5}, r"dk is 10\.5; expected a whole number"),
        ({"rank": 8, "device": "abacus"}, "device 'abacus' cannot be used"),
        ({"rank": 8, "device": "meta"}, "device 'meta' cannot be used"),
        ({"rank": -3}, "dk is -3; expected at least 1"),
        ({"rank": 25}, r"dk is 25, but 3 heads × 8 = 24 is exact already; pass dk between 1 and 24"),
        ({"rank": 8, "solver": "magic"}, "unknown solver 'magic'; expected one of als"),
        ({"rank": 8, "sweeps": 0}, "sweeps is 0; expected at least 1"),
        ({"rank": 8, "damping": -1.0}, r"damping is -1\.0; expected 0 or more"),
    ],
)
def test_bad_options_say_what_to_do(make_tiny, options, message):
    with pytest.raises(CompressionError, match=message):
        compress(make_tiny("bert"), Compression(**options), calibration=None)


def test_converting_twice_is_refused(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(rank=8), calibration=None)
    with pytest.raises(CompressionError, match="already converted; expand it first"):
        compress(model, Compression(rank=8), calibration=None)


def test_a_quantized_model_is_refused(make_tiny):
    model = make_tiny("bert")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(CompressionError, match="is quantized; convert the unquantized checkpoint"):
        compress(model, Compression(rank=8), calibration=None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(make_tiny, value):
    model = make_tiny("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[3, 4] = value
    with pytest.raises(CompressionError, match=r"layer\.1\.attention\.self\.key\.weight holds NaN or infinite"):
        compress(model, Compression(rank=8), calibration=None)


def test_every_error_is_of_the_family(make_tiny):
    assert issubclass(CompressionError, CollabCompressError)
    assert issubclass(UnsupportedModelError, CollabCompressError)
    with pytest.raises(CollabCompressError, match=r"nothing\*"):
        compress(make_tiny("bert"), Compression(rank=8, modules="nothing*"), calibration=None)


class TwoBodies(BertPreTrainedModel):
    """A model with attention outside its base model."""

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.other = BertModel(config), BertModel(config)
        self.post_init()


def test_attention_outside_the_base_model_is_refused_before_anything_changes(make_tiny):
    model = TwoBodies(make_tiny("bert").config)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=r"other\.encoder.* lies outside the base model 'bert'"):
        compress(model, Compression(rank=8), calibration=None)
    assert equal(before, state(model))
    compress(model, Compression(rank=8, modules="bert.*"), calibration=None)
    assert {name.partition(".")[0] for name in read_factors(model)} == {"bert"}


def test_a_linear_layer_that_does_more_is_refused(make_tiny):
    class WithAdapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = make_tiny("bert")
    model.encoder.layer[0].attention.self.query = WithAdapter(24, 24)
    with pytest.raises(UnsupportedModelError, match="got WithAdapter, expected a plain Linear"):
        compress(model, Compression(rank=8), calibration=None)


def test_an_attention_implementation_that_cannot_follow_is_refused(make_tiny):
    model = make_tiny("bert")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(CompressionError, match="the model is set to 'flex_attention'"):
        compress(model, Compression(rank=8), calibration=None)


def test_batches_that_do_not_fit_the_model(make_tiny, calibration):
    model = make_tiny("bert", BertForMultipleChoice)
    with pytest.raises(CalibrationError, match="BertForMultipleChoice cannot run on the given batches"):
        compress(model, Compression(rank=8), [{"input_ids": calibration[0]["input_ids"][0, 0]}])


def test_outputs_that_are_not_finite_are_refused(make_tiny, calibration):
    model = make_tiny("bert", BertForSequenceClassification)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    before = state(model)
    with pytest.raises(CalibrationError, match="logits of BertForSequenceClassification is not finite"):
        compress(model, Compression(rank=8), calibration)
    assert before.keys() == state(model).keys()


def test_one_batch_is_split_to_measure_drift(make_tiny, calibration):
    assert compress(make_tiny("bert"), Compression(rank=8), calibration[:1]).drift.sequences == 1
    single = [{name: value[:1] for name, value in calibration[0].items()}]
    assert compress(make_tiny("bert"), Compression(rank=8), single).drift is None


def test_a_model_that_returns_tuples_has_its_drift_measured(make_tiny, calibration):
    model = make_tiny("bert")
    model.config.return_dict = False
    assert compress(model, Compression(rank=8), calibration).drift.output == "last_hidden_state"


def test_frozen_stays_frozen(make_tiny):
    model = make_tiny("bert").requires_grad_(False)
    compress(model, Compression(rank=8), calibration=None)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_parafac_without_tensorly_says_what_to_install(make_tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorly", None)
    with pytest.raises(CompressionError, match="pip install tensorly"):
        compress(make_tiny("bert"), Compression(rank=8, solver="parafac"), calibration=None)


def test_the_papers_recipe_converts_too(make_tiny):
    report = compress(make_tiny("bert"), Compression(rank=12, solver="parafac", sweeps=20), calibration=None)
    ours = compress(make_tiny("bert"), Compression(rank=12), calibration=None)
    for one, other in zip(report.modules, ours.modules, strict=True):
        assert 0 < other.weight_error <= one.weight_error
