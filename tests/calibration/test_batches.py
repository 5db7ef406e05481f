import pytest
import torch
from datasets import Dataset

from collab_compress.calibration import calibration_batches
from collab_compress.errors import CalibrationError


def test_synthetic_tokens(minilm, minilm_tokenizer):
    batches = calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=20, length=10, seed=3)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.shape == (20, 10)
    assert (ids[:, 0] == minilm_tokenizer.cls_token_id).all()
    assert (ids[:, -1] == minilm_tokenizer.sep_token_id).all()
    assert not torch.isin(ids[:, 1:-1], torch.tensor(minilm_tokenizer.all_special_ids)).any()
    assert ids[:, 1:-1].unique().numel() > 150  # of 160 draws from 30 517 tokens


def test_synthetic_tokens_follow_the_seed(minilm, minilm_tokenizer):
    one, same, other = (
        calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=4, seed=seed)[0]["input_ids"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_length_is_what_the_model_can_take(minilm, minilm_tokenizer):
    minilm.config.max_position_embeddings = 40
    batches = calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=2, length=512)
    assert batches[0]["input_ids"].shape == (2, 40)


@pytest.mark.parametrize("calibration", ["synthetic", ["a dog runs"]])
def test_a_tokenizer_of_another_model_is_refused(make_tiny, minilm_tokenizer, calibration):
    with pytest.raises(CalibrationError, match="vocabulary ends at 60; the tokenizer is not this model's"):
        calibration_batches(calibration, make_tiny("bert"), minilm_tokenizer)


def test_a_file_of_texts(tmp_path, minilm, minilm_tokenizer):
    file = tmp_path / "texts.txt"
    file.write_text("a dog runs\n\ntwo men play a long game of chess in the park\n", encoding="utf-8")
    (batch,) = calibration_batches(file, minilm, minilm_tokenizer)
    assert batch["input_ids"].shape[0] == 2
    assert batch["attention_mask"].sum(1).tolist() == [5, 13]
    (same,) = calibration_batches(str(file), minilm, minilm_tokenizer)
    assert torch.equal(same["input_ids"], batch["input_ids"])


def test_texts_pairs_and_a_column_of_a_data_set(minilm, minilm_tokenizer):
    data = Dataset.from_dict({"text": ["a dog", "a cat"]})
    (from_column,) = calibration_batches(data["text"], minilm, minilm_tokenizer)
    (from_list,) = calibration_batches(["a dog", "a cat"], minilm, minilm_tokenizer)
    assert torch.equal(from_column["input_ids"], from_list["input_ids"])
    (pairs,) = calibration_batches([("a dog", "a cat")], minilm, minilm_tokenizer)
    assert pairs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_ready_batches_pass_through_and_need_no_tokenizer(minilm, batch):
    assert calibration_batches([batch], minilm) == [batch]
    assert calibration_batches(iter([batch]), minilm) == [batch]


@pytest.mark.parametrize("nothing", [None, "none"])
def test_none(minilm, nothing):
    assert calibration_batches(nothing, minilm) == []


@pytest.mark.parametrize(
    ("calibration", "tokenized", "message"),
    [
        ("synthetic", False, r"needs the model's tokenizer, and there is none: pass tokenizer="),
        ("missing.txt", True, r"cannot read calibration texts from missing\.txt"),
        ([], True, "calibration data is empty"),
        (7, True, "calibration is a int; expected"),
        (["text", {"input_ids": torch.ones(1, 1)}], True, "mixes batches and texts"),
        (Dataset.from_dict({"text": ["a"]}), True, r"columns \['text'\]; pass the one with the texts"),
    ],
)
def test_bad_calibration_says_what_to_do(minilm, minilm_tokenizer, calibration, tokenized, message):
    with pytest.raises(CalibrationError, match=message):
        calibration_batches(calibration, minilm, minilm_tokenizer if tokenized else None)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_file_without_text(tmp_path, minilm, minilm_tokenizer, content):
    file = tmp_path / "texts.txt"
    file.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"texts\.txt"):
        calibration_batches(file, minilm, minilm_tokenizer)
