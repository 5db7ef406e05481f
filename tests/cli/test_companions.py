"""What is copied along with a model: its tokenizer, processor, licences and modules, and no data or code."""

import json
import os

import pytest
from collab_compress_cli.model import copy_companions, refuse_pickled_modules

from collab_compress.errors import CheckpointError

OF_TOKENS = "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.txt merges.txt"
OF_TOKENS += " spiece.model source.spm generation_config.json"
COPIED = f"""
    {OF_TOKENS} config.json chat_template.jinja preprocessor_config.json LICENSE NOTICE.md modules.json
    additional_chat_templates/tool_use.jinja 1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors
"""
NOT_COPIED = """
    model.safetensors model.safetensors.index.json model-1-of-2.safetensors pytorch_model.bin model.onnx modeling.py
    training_args.bin optimizer.pt .env customers.csv notes.md runs/events
    checkpoint-9/config.json onnx/model.json 2_Dense/code.py 2_Dense/pytorch_model.bin
"""


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    for name in (COPIED + NOT_COPIED).split():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name, encoding="utf-8")
    return model


@pytest.mark.parametrize("tokens", [True, False])
def test_companions_are_copied_and_nothing_else(folder, tmp_path, tokens):
    out = tmp_path / "out"
    copy_companions(folder, out, tokens=tokens)
    copied = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    stale = {"tokenizer.json", "tokenizer_config.json"}  # which the new tokenizer replaces
    assert copied - stale == set(COPIED.split()) - stale - (set() if tokens else set(OF_TOKENS.split()))
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in copied)


def test_references_to_code_stay_with_the_code(folder, tmp_path):
    settings = {"auto_map": {"AutoTokenizer": ["modeling.Tokenizer", None]}, "model_max_length": 9}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    copy_companions(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_bytes()) == {"model_max_length": 9}


def test_pickled_weights_of_a_module_do_not_travel_half(folder):
    refuse_pickled_modules(folder)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense has weights that are no safetensors"):
        refuse_pickled_modules(folder)


def test_the_links_of_the_hubs_cache_are_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "0a1b", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "LICENSE"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", name))
    copy_companions(snapshot, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["LICENSE", "tokenizer.json"]
    assert not (tmp_path / "out" / "LICENSE").is_symlink()
