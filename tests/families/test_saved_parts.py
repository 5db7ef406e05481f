"""Models inside a converted one save and load, and every class that loads the stock checkpoint loads it too."""

import inspect
import sys

import pytest
import torch
from tiny_families import TINIES, build, build_low
from transformers import PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.attention import is_converted
from collab_compress.errors import UnsupportedModelError


@pytest.fixture
def dense(kin):
    return build(kin, TINIES[kin].generates)


@pytest.fixture
def model(kin):
    return build_low(kin, TINIES[kin].generates)


def converted_in(model):
    return [module for module in model.modules() if is_converted(module)]


def classes_for(model):
    """Yield classes of the modelling module that may load parts of `model`, with one head class for all."""
    configs = {type(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    for name, class_ in vars(sys.modules[type(model).__module__]).items():
        plain = "For" not in name or name.endswith("ForCausalLM") or class_ is type(model)
        if (
            inspect.isclass(class_)
            and issubclass(class_, PreTrainedModel)
            and plain
            and class_.config_class in configs
        ):
            yield class_


def load_stock(model_class, path):
    """Return the attention modules of a stock model and its missing keys; None if attention is missing."""
    try:
        model, report = model_class.from_pretrained(path, output_loading_info=True)
        names = [site.name for site in find_attention(model)]
    except (AttributeError, TypeError, UnsupportedModelError):  # an incomplete model
        return None
    if any(key.startswith(f"{name}.") for key in report["missing_keys"] for name in names):
        return None
    return names, report["missing_keys"]


@pytest.mark.structures
def test_each_class_that_loads_the_stock_checkpoint_loads_this_one(kin, dense, model, tmp_path):
    dense.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "converted")
    stored = [module.state_dict() for module in converted_in(model)]
    loaded = []
    for model_class in classes_for(dense):
        stock = load_stock(model_class, tmp_path / "stock")
        if stock is None:
            continue
        other, report = model_class.from_pretrained(tmp_path / "converted", output_loading_info=True)
        assert report["missing_keys"] == stock[1]
        assert [name for name, module in other.named_modules() if is_converted(module)] == stock[0]
        for module in converted_in(other):
            weights = module.state_dict()
            assert any(
                weights.keys() == tensors.keys()
                and all(torch.equal(weights[name], tensors[name]) for name in weights)
                for tensors in stored
            )
        loaded.append(model_class)
    assert type(model) in loaded
