"""Calibrating once for a plan and several conversions."""

import copy

import pytest
import torch
from tiny_families import make_rotary
from tiny_words import bert_config, word_tokenizer
from transformers import BertModel, CTRLConfig, CTRLModel

from collab_compress import (
    CalibrationError,
    CalibrationOptions,
    Compression,
    CompressionError,
    Solver,
    UnsupportedModelError,
    calibrate,
    compress,
)
from collab_compress.analysis import plan
from collab_compress.calibration.builtin import builtin_texts
from collab_compress.calibration.tokenization import sampled
from collab_compress.conversion import plan as decompositions


@pytest.fixture
def no_more_runs(monkeypatch):
    """Fail if the model is run for moments."""

    def forbid():
        monkeypatch.setattr(decompositions, "gather_moments", lambda *_: pytest.fail("moments were gathered again"))

    return forbid


@pytest.mark.parametrize("family", ["bert", "llama", "marian"])
@pytest.mark.parametrize("widths", [{"dk": 12, "dv": 12}, {"dv": 6, "modules": "*0*"}])
def test_conversions_are_the_same_bit_for_bit(family, widths, make_tiny, calibration, no_more_runs):
    make = make_rotary if family == "llama" else make_tiny
    expected = make(family)
    model = copy.deepcopy(expected)
    report = compress(expected, Compression(**widths), calibration)
    calibrated = calibrate(model, calibration)
    no_more_runs()
    for converted in (copy.deepcopy(model), model):  # what the first conversion did to the moments would show
        again = compress(converted, Compression(**widths), calibrated)
        tensors = converted.state_dict()
        assert tensors.keys() == expected.state_dict().keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.state_dict().items())
        assert again.drift == report.drift
        assert again.calibrating == 0
        assert (again.length, again.sequences, again.warnings) == (report.length, report.sequences, report.warnings)


def test_a_plan_takes_it_too(make_tiny, calibration, no_more_runs):
    model = make_tiny("bert")
    expected = plan(model, calibration, shares=(1 / 2,), timed=False)
    calibrated = calibrate(model, calibration)
    no_more_runs()
    assert plan(model, calibrated, shares=(1 / 2,), timed=False) == expected  # all of so few sequences


def test_a_sample_keeps_the_moments_of_all_sequences(make_tiny, calibration):
    calibrated = calibrate(make_tiny("bert"), calibration)  # seven batches of four sequences, and one held back
    few = calibrated.sample(16)
    assert few.used == list(calibrated.used[::2])
    assert few.held_back == calibrated.held_back[::2]
    assert few.moments is calibrated.moments


def test_the_choice_of_widths_does_not_change(make_tiny, calibration):
    expected, model = make_tiny("bert"), make_tiny("bert")
    report = compress(expected, Compression(keep=0.6), calibration)
    assert compress(model, Compression(keep=0.6), calibrate(model, calibration)).choice == report.choice
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    )


def test_random_tokens_are_not_refitted_to():
    tokenizer = word_tokenizer()
    model = BertModel(bert_config(tokenizer)).eval()
    calibrated = calibrate(model, tokenizer=tokenizer, calibration_options=CalibrationOptions(sequences=16, length=8))
    report = compress(model, Compression(dv=6), calibrated)
    assert not report.refits
    assert report.length == 8


def test_random_tokens_beside_texts_do_not_count_in_their_length(minilm_tokenizer):
    tokenizer = minilm_tokenizer
    model = BertModel(bert_config(tokenizer, max_position_embeddings=128)).eval()
    calibrated = calibrate(model, tokenizer=tokenizer, calibration_options=CalibrationOptions(sequences=200))
    assert calibrated.refit
    texts = sampled(builtin_texts(pairs=True), round(200 * 1120 / 1504), 0)
    assert calibrated.length == calibrate(model, texts, tokenizer).length


def test_another_model_is_refused(make_tiny, calibration):
    calibrated = calibrate(make_tiny("bert"), calibration)
    message = "BertModel is not the model that was calibrated, or has changed since; calibrate it"
    for other in (make_tiny("bert", seed=1), make_tiny("bert")):
        with torch.no_grad():
            other.encoder.layer[1].output.dense.bias[3] += 1e-3
        with pytest.raises(CalibrationError, match=message):
            compress(other, Compression(dk=12), calibrated)
        with pytest.raises(CalibrationError, match=message):
            plan(other, calibrated)


def test_a_model_that_was_converted_in_the_meantime_is_refused(make_tiny, calibration):
    model = make_tiny("bert")
    calibrated = calibrate(model, calibration)
    compress(model, Compression(dv=12), calibrated)
    with pytest.raises(CalibrationError, match="has changed since"):
        compress(model, Compression(dk=12), calibrated)


def test_another_length_sample_or_seed_is_refused(make_tiny, calibration):
    model = make_tiny("bert")
    calibrated = calibrate(model, calibration, calibration_options=CalibrationOptions(length=12))
    with pytest.raises(
        CalibrationError, match=r"calibrated with CalibrationOptions\(.*length=12\), got .*length=9\)"
    ):
        compress(model, Compression(dk=12), calibrated, calibration_options=CalibrationOptions(length=9))
    with pytest.raises(CalibrationError, match="calibrated with seed 0, got 1; pass the same"):
        compress(model, Compression(dk=12, solver=Solver(seed=1)), calibrated)
    compress(model, Compression(dv=12), calibrated, calibration_options=CalibrationOptions(length=12))


def test_it_takes_data(make_tiny):
    with pytest.raises(CalibrationError, match="there is nothing to run the model on; pass data"):
        calibrate(make_tiny("bert"), None)


def test_what_cannot_be_calibrated_is_refused_before_data_are_read(make_tiny):
    ctrl = CTRLModel(CTRLConfig(vocab_size=16, n_positions=8, n_embd=8, dff=8, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="model type 'ctrl' has no description"):
        calibrate(ctrl, [{"input_ids": torch.ones(2, 4, dtype=torch.long)}] * 2)
    with pytest.raises(CompressionError, match="seed is 'a'; expected a whole number"):
        calibrate(make_tiny("bert"), "missing.txt", seed="a")


def test_a_map_that_cannot_be_converted_is_left_to_the_conversion(make_tiny, calibration):
    model = make_tiny("bert")
    compress(model, Compression(dk=12), calibration)
    calibrated = calibrate(model, calibration)
    assert {kind.__name__ for _, kind in calibrated.moments} == {"ValueSite"}
    assert compress(model, Compression(dv=12), calibrated).calibrating == 0
