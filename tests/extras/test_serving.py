"""The guide to serving runs as it stands."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from collab_compress import Compression, Solver, compress
from collab_compress.calibration.builtin import builtin_texts

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve_it.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def exported(minilm_path, minilm_tokenizer, tmp_path_factory):
    """Return what the guide's code for ONNX Runtime leaves, run in a folder with a converted MiniLM."""
    model = AutoModel.from_pretrained(minilm_path)
    compress(model, Compression(dk=128, solver=Solver(sweeps=2)), calibration=None)
    names = {"texts": builtin_texts(pairs=False)[::10]}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore", category=FutureWarning):
        patch.chdir(tmp_path_factory.mktemp("served"))
        for part in (model, minilm_tokenizer):
            part.save_pretrained("minilm-half")
        exec(compile(BLOCKS[0], "onnxruntime", "exec"), names)
        yield names


def error(names, hidden_states):
    """Return the error of hidden states on the guide's batch, over the norm of PyTorch's."""
    with torch.no_grad():
        expected = names["model"](**names["batch"]).last_hidden_state.numpy()
    return np.linalg.norm(hidden_states - expected) / np.linalg.norm(expected)


def test_onnxruntime(exported):
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    inputs = {name: tensor.numpy() for name, tensor in exported["batch"].items()}
    assert error(exported, session.run(["last_hidden_state"], inputs)[0]) < 1e-5
    assert error(exported, exported["hidden_states"]) < 0.3
    assert Path("int8.onnx").stat().st_size < 0.3 * Path("model.onnx").stat().st_size


def test_embeddings(exported):
    """The oracle pools PyTorch's hidden states one text at a time, without padding."""
    texts = exported["tokenizer"].batch_decode(exported["batch"]["input_ids"], skip_special_tokens=True)
    for text, embedding in zip(texts, exported["embeddings"], strict=True):
        with torch.no_grad():
            hidden = exported["model"](**exported["tokenizer"](text, return_tensors="pt")).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
        assert embedding @ expected > 0.97  # of int8


def test_openvino(exported):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    names = dict(exported)
    exec(compile(BLOCKS[1], "openvino", "exec"), names)
    assert error(names, names["hidden_states"]) < 0.3
    assert Path("int8.bin").stat().st_size < 0.3 * Path("model.onnx").stat().st_size
