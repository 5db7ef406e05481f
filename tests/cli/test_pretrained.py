"""Foreign checkpoints are loaded without running or unpickling them, and errors name the file."""

import io
import os
import pickle
import sys

import pytest
import torch
from checkpoints import change_json, change_weights
from collab_compress_cli.pretrained import load_config, load_tokenizer, load_weights
from transformers import AutoModel, AutoProcessor, AutoTokenizer, BertModel

from collab_compress.errors import CheckpointError

EVIL = """
import pathlib
pathlib.Path("executed").write_text("")
from transformers import BertConfig, BertModel, BertTokenizer
class Config(BertConfig): model_type = "evil"
class Model(BertModel): config_class = Config
class Tokenizer(BertTokenizer): pass
"""


class Payload:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.fixture
def folder(make_tiny, tmp_path, monkeypatch):
    """Save a model in the current directory, with "yes" as the answer to every prompt."""
    make_tiny("bert").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 100))
    return tmp_path


def fails(load, *arguments, words):
    with pytest.raises(CheckpointError) as caught:
        load(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not os.path.exists("executed")


def test_code_of_a_model_is_not_run(folder):
    (folder / "model" / "evil.py").write_text(EVIL, encoding="utf-8")
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    change_json(folder / "model" / "config.json", model_type="evil", auto_map=code)
    fails(load_config, "model", words="it requires code that comes with it, which is not run")
    fails(load_weights, AutoModel, "model", words="it requires code that comes with it, which is not run")


def test_references_to_code_of_a_stock_model_are_dropped(folder):
    change_json(folder / "model" / "config.json", auto_map={"AutoModel": "evil.Model"})
    for config in (load_config("model"), load_weights(AutoModel, "model")[0].config):
        assert not hasattr(config, "auto_map")


@pytest.mark.parametrize("auto_class", [AutoTokenizer, AutoProcessor])
def test_code_of_a_tokenizer_is_not_run(folder, auto_class):
    (folder / "model" / "evil.py").write_text(EVIL, encoding="utf-8")
    (folder / "model" / "vocab.txt").write_text("[UNK]\n", encoding="utf-8")
    code = {"AutoTokenizer": ["evil.Tokenizer", None]}
    change_json(folder / "model" / "tokenizer_config.json", tokenizer_class="Evil", auto_map=code)
    fails(load_tokenizer, "model", auto_class, words="cannot load the tokenizer in model")


def test_code_of_a_processor_is_not_run(folder):
    (folder / "model" / "evil.py").write_text(EVIL, encoding="utf-8")
    code = {"AutoProcessor": "evil.Processor"}
    change_json(folder / "model" / "processor_config.json", processor_class="Evil", auto_map=code)
    fails(load_tokenizer, "model", AutoProcessor, words="which is not run")


def test_a_pickle_is_not_opened(folder):
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    fails(load_weights, BertModel, "model", words="no file named model.safetensors")


@pytest.mark.parametrize("pruned", [False, True])
def test_a_tensor_of_another_shape_is_named_with_its_reason(folder, pruned):
    change_json(folder / "model" / "config.json", pruned_heads={"0": [1]} if pruned else {})
    name = "encoder.layer.0.attention.output.dense.weight"
    change_weights(folder / "model", **{name: torch.ones(24, 16)})
    reason = "; Transformers 4 pruned its heads (pruned_heads), which 5 does not read" if pruned else ""
    fails(load_weights, BertModel, "model", words=f"{name} has shape (24, 16), the config makes it (24, 24){reason}")


def test_a_validation_error_is_reported_in_full(folder):
    change_json(folder / "model" / "config.json", hidden_size="x")
    fails(load_config, "model", words="'hidden_size': TypeError: Field 'hidden_size' expected int, got str")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_tokenizer_is_an_error_in_one_line(folder, name, text, minilm_tokenizer):
    minilm_tokenizer.save_pretrained(folder / "model")
    (folder / "model" / name).write_text(text, encoding="utf-8")
    fails(load_tokenizer, "model", words="cannot load the tokenizer in model")


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"metadata": {}, "weight_map": [1]}'])
def test_a_damaged_index_is_an_error_in_one_line(folder, text):
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    fails(load_weights, BertModel, "model", words="cannot load weights from model: ")
