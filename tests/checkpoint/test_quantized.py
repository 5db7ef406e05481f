"""Quantizing the weights of a converted model while they are loaded, by a quantizer that rounds them."""

import copy
import enum
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from collab_compress import Compression, CompressionError, compress, describe
from collab_compress.checkpoint import quantizer
from collab_compress.transformers_parts import QUANTIZERS


class Method(enum.StrEnum):
    ROUNDED = "rounded"


class RoundingConfig(QuantizationConfigMixin):
    def __init__(self):
        self.quant_method = Method.ROUNDED


class RoundingQuantizer(HfQuantizer):
    def _process_model_before_weight_loading(self, model, **_):
        self.widths = {name: part.weight.shape for name, part in model.named_modules() if isinstance(part, nn.Linear)}

    def _process_model_after_weight_loading(self, model, **_):
        return round_(model)

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return False


def round_(model):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_((module.weight * 32).round() / 32)
    return model


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    monkeypatch.setitem(QUANTIZERS, "rounded", RoundingQuantizer)
    monkeypatch.setattr(quantizer, "QUANTIZES", ("rounded",))


@pytest.mark.parametrize("widths", [{"dk": 9}, {"dk": 13, "dv": 14, "head_dim": 5}])
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForSequenceClassification])
def test_it_is_what_quantizing_afterwards_gives(widths, auto_class, make_tiny, batch, tmp_path):
    model = make_tiny("bert", auto_class._model_mapping[type(make_tiny("bert").config)])
    compress(model, Compression(**widths), calibration=None)
    model.save_pretrained(tmp_path)
    expected = round_(copy.deepcopy(model))
    loaded = auto_class.from_pretrained(tmp_path, quantization_config=RoundingConfig())
    with torch.no_grad():
        assert torch.equal(loaded(**batch)[0], expected(**batch)[0])
    assert describe(loaded) == describe(model)
    linear = {name: part.weight.shape for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert loaded.hf_quantizer.widths == linear  # of the converted model
    assert not loaded.hf_quantizer.is_trainable
    again = auto_class.from_pretrained(tmp_path)  # the configs of checkpoint and loaded model stay apart
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model(**batch)[0])


def test_a_quantized_model_is_neither_saved_nor_converted(make_tiny, tmp_path, caplog):
    model = make_tiny("bert")
    compress(model, Compression(dk=9), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, quantization_config=RoundingConfig())
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="is not serializable"):
        loaded.save_pretrained(tmp_path / "again")
    assert "save the converted model, and quantize it whenever it is loaded" in caplog.text
    with pytest.raises(CompressionError, match="BertModel is quantized; convert the unquantized checkpoint instead"):
        compress(loaded, Compression(dv=9), calibration=None)


def test_other_methods_are_refused(make_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(quantizer, "QUANTIZES", ())
    model = make_tiny("bert")
    compress(model, Compression(dk=9), calibration=None)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with EditConfig but you are passing a RoundingConfig"):
        AutoModel.from_pretrained(tmp_path, quantization_config=RoundingConfig())
