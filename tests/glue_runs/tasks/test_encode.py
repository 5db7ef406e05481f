import logging

import pytest
import torch
from collab_compress_glue_runs.tasks import (
    encode_classification,
    encode_language_model,
    encode_masked_language_model,
    encode_translation,
    progress_bars,
    train_tokenizer,
)
from datasets import Dataset, DatasetDict, are_progress_bars_disabled, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedTokenizerFast

from collab_compress.errors import DataError

LINES = ["a b c", "d", "", "a a b e", "c d"]


@pytest.fixture
def words():
    """Return a tokenizer of words: <pad>, <unk>, <s>, </s>, then the words by frequency."""
    return train_tokenizer(LINES, None, "word")


@pytest.fixture
def pairs():
    rows = {"text": ["a man", "two dogs run fast"], "text_pair": ["a person", "cats"], "label": [1, 0]}
    return DatasetDict(train=Dataset.from_dict(rows), test=Dataset.from_dict(rows | {"label": [-1, -1]}))


def test_pairs_equal_the_tokenizer_row_by_row(pairs, minilm_tokenizer):
    encoded = encode_classification(pairs, minilm_tokenizer, max_length=8)
    for row, pair in zip(encoded["train"], pairs["train"], strict=True):
        expected = minilm_tokenizer(pair["text"], pair["text_pair"], truncation=True, max_length=8)
        assert row == {**expected, "labels": pair["label"]}
    assert max(map(len, encoded["train"]["input_ids"])) == 8
    assert encoded["train"][0]["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert encoded["test"].column_names == ["input_ids", "token_type_ids", "attention_mask"]  # it has no labels


def test_scores_stay_scores(minilm_tokenizer):
    data = Dataset.from_dict({"text": ["a"], "text_pair": ["b"], "label": [4.75]})
    batch = DataCollatorWithPadding(minilm_tokenizer)(list(encode_classification(data, minilm_tokenizer)))
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [4.75]


def test_translation_pads_labels_with_what_no_loss_sees(words):
    data = Dataset.from_dict({"source": ["a b", "c"], "target": ["d", "d c b a"]})
    encoded = encode_translation(data, words, max_target_length=4)
    ids = words.convert_tokens_to_ids
    assert encoded[0] == {"input_ids": [*ids(["a", "b"]), 3], "attention_mask": [1, 1, 1], "labels": [*ids(["d"]), 3]}
    assert encoded[1]["labels"] == [*ids(["d", "c", "b"]), 3]  # truncated, with its end token
    batch = DataCollatorForSeq2Seq(words)(list(encoded))
    assert batch["labels"].tolist()[0][2:] == [-100, -100]
    assert batch["input_ids"].tolist()[1][2:] == [0]


def test_source_and_target_may_have_vocabularies_of_their_own(words):
    """Marian's tokenizer encodes targets with another vocabulary, through `text_target`."""

    class Two(type(words)):
        def __call__(self, text=None, text_target=None, **options):
            options.pop("return_token_type_ids", None)
            shift = 0 if text_target is None else 100
            return {"input_ids": [[len(line) + shift] for line in (text if text_target is None else text_target)]}

    words.__class__ = Two
    encoded = encode_translation(Dataset.from_dict({"source": ["ab"], "target": ["abc"]}), words)
    assert encoded[0] == {"input_ids": [2], "labels": [103]}


@pytest.mark.parametrize("length", [2, 3, 5, 100])
def test_blocks_predict_every_token_once(words, length):
    """Against the definition: token t of the stream, for t from 1, is predicted from what stands before it."""
    stream = [2]
    for line in LINES:
        stream += [*words.convert_tokens_to_ids(line.split()), 3]
    encoded = encode_language_model(Dataset.from_dict({"text": LINES}), words, length=length)
    assert encoded["input_ids"][:] == encoded["labels"][:]
    assert [token for row in encoded for token in row["labels"][1:]] == stream[1:]
    assert all(len(row["input_ids"]) == length for row in list(encoded)[:-1])
    assert 2 <= len(encoded[-1]["input_ids"]) <= length


def test_a_selection_is_encoded_as_it_is(words):
    data = Dataset.from_dict({"text": LINES}).select([4, 0])
    stream = [2, *words.convert_tokens_to_ids(["c", "d"]), 3, *words.convert_tokens_to_ids(["a", "b", "c"]), 3]
    assert encode_language_model(data, words)["input_ids"][:] == [stream]


def test_data_sets_on_disk_have_a_cache_for_each_way_of_encoding(pairs, words, tmp_path, caplog):
    """A tokenizer that is loaded anew finds its own."""
    pairs["train"].save_to_disk(tmp_path / "data")
    words.save_pretrained(tmp_path / "tokenizer")
    other = train_tokenizer(["a man", "cats"], None, "word")

    def encoded(tokenizer, length):
        part = encode_classification(load_from_disk(tmp_path / "data"), tokenizer, max_length=length)
        return part.cache_files[0]["filename"], str(part["input_ids"][:])

    with caplog.at_level(logging.WARNING, logger="datasets"):
        first, again = (encoded(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 4) for _ in range(2))
        assert again == first
        results = [first, encoded(words, 5), encoded(other, 4)]
    assert [len(set(column)) for column in zip(*results, strict=True)] == [3, 3]
    assert "hashed" not in caplog.text


def test_progress_shows_only_on_request(pairs, words, capsys):
    before = are_progress_bars_disabled()
    encode_classification(pairs, words)
    assert capsys.readouterr() == ("", "")
    encode_classification(pairs, words, progress=True)
    assert "Map" in capsys.readouterr().err
    with progress_bars(True):
        assert not are_progress_bars_disabled()
        with progress_bars(False):
            assert are_progress_bars_disabled()
        assert not are_progress_bars_disabled()
    assert are_progress_bars_disabled() == before


def test_what_cannot_be_encoded(pairs, words, minilm_tokenizer):
    with pytest.raises(DataError, match="no column 'source' to encode; expected source, target, got text, text_pair"):
        encode_translation(pairs, words)
    with pytest.raises(DataError, match="max_length is 3 tokens; expected 4 to 512"):
        encode_classification(pairs, minilm_tokenizer, max_length=3)
    with pytest.raises(DataError, match=r"max_length is 1 tokens; expected at least 2$"):
        encode_language_model(pairs, words, length=1)
    with pytest.raises(DataError, match="max_length is 600 tokens; expected 3 to 512"):
        encode_translation(pairs, minilm_tokenizer, max_source_length=600)
    with pytest.raises(DataError, match="the tokenizer has no end token"):
        encode_language_model(pairs, minilm_tokenizer)
    with pytest.raises(DataError, match="no rows to encode"):
        encode_language_model(Dataset.from_dict({"text": []}), words)


@pytest.fixture
def masking():
    """Return a tokenizer of words whose fifth token is the mask."""
    return train_tokenizer(LINES, None, "word", mask=True)


def test_what_is_masked_later_is_text_on_end_in_blocks(masking):
    blocks = encode_masked_language_model(Dataset.from_dict({"text": LINES}), masking, length=4)
    assert blocks.column_names == ["input_ids"]
    assert [len(block) for block in blocks["input_ids"]] == [4, 4, 4, 3]
    texts = " </s> ".join([*LINES, ""]).replace("  ", " ").strip()
    assert " ".join(map(masking.decode, blocks["input_ids"])) == texts


def test_what_is_scored_is_masked_the_same_way_every_time(masking):
    rows = Dataset.from_dict({"text": LINES * 40})
    plain = encode_masked_language_model(rows, masking, length=10)["input_ids"]
    masked, again, other = (encode_masked_language_model(rows, masking, length=10, seed=seed) for seed in (0, 0, 1))
    assert masked.to_list() == again.to_list()
    assert masked["labels"] != other["labels"]
    words, predicted, covered = 0, 0, 0
    for before, row in zip(plain, masked, strict=True):
        for token, now, label in zip(before, row["input_ids"], row["labels"], strict=True):
            words += token > 4
            predicted += label != -100
            covered += now == masking.mask_token_id
            assert label in (-100, token)
            assert now == token or label == token
            assert label == -100 or token > 4, "a special token is to be predicted"
    assert 0.1 < predicted / words < 0.2
    assert 0.65 < covered / predicted < 0.95


def test_nothing_to_mask_with(words, minilm_tokenizer):
    rows = Dataset.from_dict({"text": LINES})
    with pytest.raises(DataError, match="the tokenizer has no mask token, which masked language modelling needs"):
        encode_masked_language_model(rows, words)
    assert len(encode_masked_language_model(rows, minilm_tokenizer, length=8, seed=0)["labels"]) > 1


@pytest.mark.parametrize("seed", [None, 0])
def test_texts_without_a_token_are_reported(seed):
    bare = Tokenizer(models.WordLevel({"[UNK]": 0, "[MASK]": 1}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]", mask_token="[MASK]")
    with pytest.raises(DataError, match="the tokenizer returns no token for the 2 rows; expected text in some"):
        encode_masked_language_model(Dataset.from_dict({"text": ["", " "]}), tokenizer, length=4, seed=seed)
    with pytest.raises(DataError, match="no rows to encode"):
        encode_masked_language_model(Dataset.from_dict({"text": []}), tokenizer, length=4, seed=seed)
    actual = encode_masked_language_model(Dataset.from_dict({"text": ["", "a b", ""]}), tokenizer, length=4)
    assert actual["input_ids"][:] == [[0, 0]]
