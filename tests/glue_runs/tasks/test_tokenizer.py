import hashlib

import pytest
from collab_compress_glue_runs.tasks import train_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from collab_compress.errors import DataError

TEXTS = [
    "Two young, white males are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "A man in a blue shirt is standing on a ladder, cleaning a window.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem (1959)!",
] * 5
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
SIZES = {"bpe": 120, "unigram": 120, "word": None}

PROGRAM = """
import hashlib, sys
from collab_compress_glue_runs.tasks import train_tokenizer
texts = eval(sys.stdin.read())
tokenizers = [train_tokenizer(texts, 120, "bpe"), train_tokenizer(texts, 40, "word")]
print(hashlib.sha256("".join(t.backend_tokenizer.to_str() for t in tokenizers).encode()).hexdigest())
"""


@pytest.fixture(scope="module", params=sorted(SIZES))
def tokenizer(request):
    return train_tokenizer(TEXTS, SIZES[request.param], request.param)


def test_special_tokens_come_first_and_numbers_have_no_gaps(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.convert_ids_to_tokens(range(4)) == SPECIAL
    named = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token]
    assert named == SPECIAL


def test_texts_end_and_come_back(tokenizer):
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == 3
        assert min(ids[:-1]) > 3
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_vocabulary_is_as_large_as_asked():
    assert len(train_tokenizer(TEXTS, 100, "bpe")) == 100
    assert len(train_tokenizer(TEXTS, 10, "word")) == 10
    assert len(train_tokenizer(TEXTS, 80, "unigram")) <= 80
    assert len(train_tokenizer(["a b b", "c"], None, "word")) == 3 + 4


def test_words_come_by_frequency_and_rare_ones_are_unknown():
    tokenizer = train_tokenizer(["b a b", "a b c"], 6, "word")
    assert tokenizer.convert_ids_to_tokens([4, 5]) == ["b", "a"]
    assert tokenizer("c b <unk>")["input_ids"] == [1, 4, 1, 3]


def test_words_written_like_special_tokens_are_these(tmp_path):
    train_tokenizer(["<unk> <unk> N <unk> a </s> N a N"], None, "word").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == {token: number for number, token in enumerate([*SPECIAL, "N", "a"])}
    assert len(tokenizer) == 6
    assert tokenizer("<unk> N a b")["input_ids"] == [1, 4, 5, 1, 3]


def test_marks_in_a_text_are_text_to_subwords():
    tokenizer = train_tokenizer([*TEXTS, "</s> <s>"], 120, "bpe")
    ids = tokenizer("a </s> b")["input_ids"]
    assert ids.count(3) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a </s> b"


def test_start_lower_case_and_pairs():
    tokenizer = train_tokenizer(["One two"], None, "word", start=True, lowercase=True)
    one, two = tokenizer.convert_tokens_to_ids(["one", "two"])
    assert tokenizer("ONE")["input_ids"] == [2, one, 3]
    assert tokenizer("one", "two")["input_ids"] == [2, one, 3, two, 3]


def test_the_same_texts_give_the_same_tokenizer_in_another_process(python):
    tokenizers = [train_tokenizer(TEXTS, 120, "bpe"), train_tokenizer(TEXTS, 40, "word")]
    written = "".join(trained.backend_tokenizer.to_str() for trained in tokenizers)
    digest = hashlib.sha256(written.encode()).hexdigest()
    done = python(PROGRAM, stdin=repr(TEXTS), environment={"TOKENIZERS_PARALLELISM": "true"})
    assert done.stdout.strip() == digest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "char"}, "unknown kind of tokenizer 'char'; expected one of bpe, unigram, word"),
        ({"vocab_size": None}, "a tokenizer of kind 'bpe' needs a vocab_size"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; expected more than the 4 special tokens, up to 10,0"),
        ({"vocab_size": 4}, "vocab_size is 4; expected more than the 4 special tokens"),
        ({"texts": []}, "no text to train a tokenizer on"),
        ({"texts": [], "kind": "unigram"}, "no text to train a tokenizer on"),
    ],
)
def test_what_cannot_be_trained(options, match):
    with pytest.raises(DataError, match=match):
        train_tokenizer(**{"texts": TEXTS, "vocab_size": 100, **options})
