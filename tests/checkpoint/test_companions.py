"""What is copied along with a model: tokenizer, processor, licences, folders of sentence-transformers."""

import ast
import json
import os
from pathlib import Path

import pytest
import transformers

from collab_compress.checkpoint.directory import (
    COMPANIONS,
    companions_of,
    copy_companions,
    not_copied,
)
from collab_compress.errors import CheckpointError

COPIED = """
    tokenizer.json tokenizer_config.json special_tokens_map.json vocab.txt merges.txt source.spm
    sentencepiece.bpe.model chat_template.jinja preprocessor_config.json generation_config.json modules.json
    sentence_bert_config.json config_sentence_transformers.json LICENSE LICENSE.txt NOTICE normalizer.json
    word_shape.json word_pronunciation.json video_preprocessor_config.json tekken.json
    additional_chat_templates/tool_use.jinja 1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors
"""
NOT_COPIED = """
    config.json README.md model.safetensors model.safetensors.index.json pytorch_model.bin model.onnx modeling.py
    training_args.bin optimizer.pt notes.md customers.csv trainer_state.json eval_results.json adapter_config.json
    texts.txt tensors.safetensors .env runs/events other/config.json other/chat_template.jinja 2_Dense/code.py
    2_Dense/pytorch_model.bin 2_Dense/customers.json credentials.json customer_messages.json
    LICENSE.key vocab-customers.txt
"""


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    for name in (COPIED + NOT_COPIED).split():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name, encoding="utf-8")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "1_Pooling", "3_Normalize")]
    (model / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    return model


def test_companions_are_copied_and_nothing_else(folder, tmp_path):
    assert sorted(map(str, companions_of(folder))) == sorted(COPIED.split())
    copy_companions(folder, tmp_path / "out")
    copied = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    assert copied == sorted(COPIED.split())
    for name in COPIED.split():
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_references_to_code_stay_with_the_code(folder, tmp_path):
    settings = {"auto_map": {"AutoTokenizer": ["modeling.Tokenizer", None]}, "model_max_length": 9}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    copy_companions(folder, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")) == {"model_max_length": 9}


def test_pickled_weights_of_a_module_do_not_travel_half(folder):
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense has weights that are no safetensors"):
        companions_of(folder)


@pytest.mark.parametrize("path", [5, None, ["a"], ".", "..", "/etc", "1_Pooling/../.."])
def test_a_name_that_is_no_folder_of_the_model(folder, path):
    (folder / "modules.json").write_text(json.dumps([{"path": path}]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"modules\.json names "):
        companions_of(folder)


def test_what_is_left_out_is_named(folder):
    written = {"config.json", "README.md", "model.safetensors", "model.safetensors.index.json", ".env"}
    top = {name.partition("/")[0] for name in NOT_COPIED.split()} - {"2_Dense"}
    assert not_copied(folder) == sorted(top - written)


def test_the_links_of_the_hubs_cache_are_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "0a1b", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", name))
    copy_companions(snapshot, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["LICENSE", "tokenizer.json"]


def test_files_of_every_tokenizer_are_known():
    names = set()
    for source in (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py"):
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VOCAB_FILES_NAMES":
                names |= set(ast.literal_eval(node.value).values())
    assert {"vocab.txt", "spiece.model", "target.spm"} <= names
    assert names <= COMPANIONS
