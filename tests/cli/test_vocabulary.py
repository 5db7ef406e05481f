"""The command with `--vocabulary`."""

import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from collab_compress import read_factors
from collab_compress.calibration.builtin import builtin_texts

TEXT = "The cat sat on the mat."


def outputs(model, tokenizer):
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXT, return_tensors="pt"))[0]


def test_alone_it_leaves_a_plain_model_with_its_tokenizer(succeeds, model_dir, tmp_path):
    printed = succeeds("tiny", "--vocabulary", "8000", "--json", "report.json")
    assert "Of the vocabulary of 30,522 tokens 8,000 stay; parameters " in printed
    assert "of 759 held-back texts keep their tokens, and so their hidden states; all have +" in printed
    assert "collab_compress" not in printed.split("To use it:")[1]
    saved = tmp_path / "tiny-vocabulary8000"
    model, tokenizer = BertForSequenceClassification.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert (len(tokenizer), model.config.vocab_size) == (8000, 8000)
    assert not (saved / "vocab.txt").exists()  # that of all tokens
    before = BertForSequenceClassification.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    torch.testing.assert_close(outputs(model, tokenizer), outputs(*before), atol=1e-6, rtol=1e-6)
    record = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert record["vocabulary"]["tokens_after"] == 8000
    assert record["compression"] is None
    assert "30,522 tokens 8,000 stay" in (saved / "README.md").read_text(encoding="utf-8")


def test_before_a_conversion_with_the_tokens_of_a_file(succeeds, model_dir, tmp_path):
    (tmp_path / "tokens.txt").write_text("\ufeffcat\nmat\nsat\n##ing\n\n", encoding="utf-8")
    (tmp_path / "texts.txt").write_text("\n".join(builtin_texts(pairs=False)[:60]), encoding="utf-8")
    arguments = ("--dk", 8, "--calibration", "texts.txt")
    succeeds("tiny", "--vocabulary", "tokens.txt", *arguments)
    saved = tmp_path / "tiny-vocabulary-dk8"
    model, tokenizer = AutoModel.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert len(read_factors(model)) == 2
    assert len(tokenizer) == model.config.vocab_size < 3000
    assert tokenizer.tokenize("cat sitting") == ["cat", "s", "##i", "##t", "##t", "##ing"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vocabulary", "8000", "--plan"), "--plan converts nothing; leave out --vocabulary"),
        (("--vocabulary", "8000", "--sweeps", "9"), "--sweeps belongs to a conversion"),
        (("--vocabulary", "8000", "--calibration", "synthetic"), "--calibration synthetic has none; pass a file of"),
        (
            ("--vocabulary", "none.txt"),
            "--vocabulary none.txt: No such file or directory; expected a number of tokens",
        ),
        (("--vocabulary", "tiny"), "--vocabulary tiny: not a file; expected a number of tokens"),
        (("--vocabulary", "tiny/empty.txt"), "--vocabulary tiny/empty.txt: the file holds no token; expected a num"),
        (("--vocabulary", "9"), "a vocabulary of 9 tokens is asked for; expected at least"),
    ],
)
def test_what_it_cannot_do_is_refused(fails, model_dir, tmp_path, arguments, message):
    (tmp_path / "tiny" / "empty.txt").touch()
    assert message in fails("tiny", *arguments)
