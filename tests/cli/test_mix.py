"""The command with `--mix`."""

import json

import torch
from transformers import AutoModel, BertForSequenceClassification

from collab_compress import alphas_of, merge_alphas_, read_factors


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def test_alone_it_changes_no_output(succeeds, loaded, model_dir, batch, tmp_path):
    printed = succeeds("tiny", "--mix", "--json", "report.json")
    assert "Heads mix in 2 attention modules: alphas 3×3, 18 parameters more." in printed
    assert "merge_alphas_(model)" in printed
    assert "rebuild the mixed heads" in printed
    model, source = loaded(printed), BertForSequenceClassification.from_pretrained(model_dir)
    assert len(alphas_of(model)) == 2
    torch.testing.assert_close(logits(model, batch), logits(source.eval(), batch), atol=1e-6, rtol=1e-6)
    record = json.loads((tmp_path / "tiny-mixed" / "collab_compress.json").read_text(encoding="utf-8"))
    assert record == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert record["compression"] is record["calibration"] is record["report"] is None
    assert record["mixed_heads"] == {f"bert.encoder.layer.{layer}.attention.self": 3 for layer in (0, 1)}


def test_after_a_conversion(succeeds, loaded, model_dir, batch, tmp_path):
    arguments = ("tiny", "--dk", 8, "--calibration", "none")
    printed = succeeds(*arguments, "--mix")
    for part in ("Heads mix in 2 attention modules", "rebuild the shared attention and mixed heads"):
        assert part in printed
    model = loaded(printed)
    assert len(alphas_of(model)) == len(read_factors(model)) == 2
    succeeds(*arguments)
    converted = AutoModel.from_pretrained(tmp_path / "tiny-dk8")
    assert alphas_of(converted) == {}
    record = json.loads((tmp_path / "tiny-dk8-mixed" / "collab_compress.json").read_text(encoding="utf-8"))
    assert record["compression"]["dk"] == 8
    assert len(record["mixed_heads"]) == 2
    merge_alphas_(model)
    with torch.no_grad():
        expected = converted.eval()(**batch)[0]
        torch.testing.assert_close(model.bert(**batch)[0], expected, atol=1e-6, rtol=1e-6)
