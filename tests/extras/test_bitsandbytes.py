"""Weights that bitsandbytes quantizes while a converted model is loaded."""

import pytest
import torch
from transformers import AutoModel, BitsAndBytesConfig

from collab_compress import Compression, Solver, compress

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize(
    ("config", "layer", "least"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "Linear8bitLt", 0.99),
        (BitsAndBytesConfig(load_in_4bit=True), "Linear4bit", 0.9),
    ],
)
def test_quantized_while_it_is_loaded(config, layer, least, minilm, minilm_tokenizer, tmp_path):
    # Widths are multiples of 32, which four bits take on a CPU.
    compress(minilm, Compression(dk=128, dv=256, solver=Solver(sweeps=5)), calibration=None)
    minilm.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, quantization_config=config)
    projections = [
        loaded.encoder.layer[0].attention.self.get_submodule(f"{name}.proj") for name in ("query", "value")
    ]
    assert {type(projection).__name__ for projection in projections} == {layer}
    batch = minilm_tokenizer(["A man is playing a guitar.", "x"], padding=True, return_tensors="pt")
    with torch.no_grad():
        one, other = (model(**batch).last_hidden_state.flatten() for model in (loaded, minilm))
    assert torch.cosine_similarity(one, other, 0) > least
