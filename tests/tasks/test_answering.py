"""Windows of contexts, and answers out of them, against slow searches."""

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_compress.errors import DataError
from collab_compress.tasks import TASKS, answers_of, encode_question_answering, train_tokenizer

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
CONTEXT = " ".join(WORDS)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer([CONTEXT], kind="word", vocab_size=None, start=True)
    tokenizer.model_max_length = 64
    return tokenizer


def questions(*rows):
    """Rows of a question, a context, and answers by where they start."""
    found = [
        {
            "question": question, "context": context, "id": str(place),
            "answers": {"text": [text for _, text in answers], "answer_start": [start for start, _ in answers]},
        }
        for place, (question, context, answers) in enumerate(rows)
    ]  # fmt: skip
    return Dataset.from_list(found, features=TASKS["squad"].features)


def texts_of(window):
    """What a window's tokens are of the context, None where they are not of it."""
    return [None if first < 0 else CONTEXT[first:last] for first, last in window["offsets"]]


def test_windows_overlap_and_hold_the_whole_context(tokenizer):
    encoded = encode_question_answering(questions(("one two", CONTEXT, [])), tokenizer, max_length=10, stride=2)
    # <s> one two </s> … </s> leaves five places for the context
    expected = [WORDS[0:5], WORDS[3:8], WORDS[6:11], WORDS[9:13]]
    assert [[text for text in texts_of(window) if text] for window in encoded] == expected
    assert [texts_of(window)[:4] for window in encoded] == [[None] * 4] * 4
    assert encoded["row"][:] == [0] * 4
    assert max(map(len, encoded["input_ids"])) == 10


def test_an_answer_that_windows_split(tokenizer):
    """Only where all of it is, it is to be found; elsewhere there is no answer."""
    start = CONTEXT.index("four")
    encoded = encode_question_answering(
        questions(("one two", CONTEXT, [(start, "four five")])), tokenizer, max_length=10, stride=2
    )
    labels = list(zip(encoded["start_positions"], encoded["end_positions"], strict=True))
    assert labels == [(0, 0), (5, 6), (0, 0), (0, 0)]  # the first window ends in "four"
    assert texts_of(encoded[1])[5:7] == ["four", "five"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(8, 20), st.integers(0, 2))
def test_labels_point_at_the_answer_in_every_window_that_holds_it(tokenizer, first, count, max_length, stride):
    words = WORDS[first : first + count]
    answer, start = " ".join(words), len(" ".join([*WORDS[:first], ""]))
    encoded = encode_question_answering(
        questions(("one", CONTEXT, [(start, answer)])), tokenizer, max_length=max_length, stride=stride
    )
    for window in encoded:
        texts, labels = texts_of(window), (window["start_positions"], window["end_positions"])
        held = set(words) <= set(texts)
        assert labels == ((texts.index(words[0]), texts.index(words[-1])) if held else (0, 0))


def test_the_usual_stride_is_a_third(tokenizer):
    data = questions(("one two", CONTEXT, []))
    usual, given = (encode_question_answering(data, tokenizer, max_length=12, stride=stride) for stride in (None, 4))
    assert usual.to_list() == given.to_list()


def test_long_questions_are_cut(tokenizer):
    encoded = encode_question_answering(
        questions((" ".join(WORDS * 9), CONTEXT, [])), tokenizer, max_length=24, stride=4
    )
    words = tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"])
    assert words[1 : words.index("</s>")] == [*WORDS, *WORDS][: 24 - 3 - 4 - 1]
    assert words[-2] in WORDS


def test_spaces_around_an_answer_are_not_of_it(tokenizer):
    [window] = encode_question_answering(questions(("one", "  one  two ", [(4, " two ")])), tokenizer, max_length=20)
    assert (window["start_positions"], window["end_positions"]) == (4, 4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_length": 4}, "length 4: expected 5 tokens or more, 64 at most"),
        (
            {"max_length": 10, "stride": 6},
            "stride 6: rows of 10 tokens leave no room for a question; expected 0 to 5",
        ),
        ({"max_length": 10, "stride": -1}, "stride -1: rows of 10 tokens"),
    ],
)
def test_lengths_that_cannot_be(tokenizer, options, match):
    with pytest.raises(DataError, match=match):
        encode_question_answering(questions(("one", CONTEXT, [])), tokenizer, **options)


def search(windows, start, end, contexts, max_length, unanswerable):
    """Try every span of every window of every question."""
    answers = []
    for row, context in enumerate(contexts):
        spans, nothing = [], []
        for place, window in enumerate(windows):
            if window["row"] != row:
                continue
            nothing.append(start[place, window["null"]] + end[place, window["null"]])
            for one, (first, _) in enumerate(window["offsets"]):
                for other in range(one, len(window["offsets"])):
                    last = window["offsets"][other][1]
                    if first >= 0 and last >= 0 and other - one + 1 <= max_length:
                        spans.append((start[place, one] + end[place, other], context[first:last]))
        score, text = max(spans, key=lambda span: span[0])
        answers.append("" if unanswerable and min(nothing) > score else text)
    return answers


@pytest.mark.parametrize("unanswerable", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_a_slow_search(tokenizer, seed, unanswerable):
    generator = np.random.default_rng(seed)
    contexts = [" ".join(generator.choice(WORDS, 5 + 4 * place)) for place in range(4)]
    data = questions(*(("one two", context, []) for context in contexts))
    windows = encode_question_answering(data, tokenizer, max_length=14, stride=3)
    start, end = generator.normal(size=(2, len(windows), 20))  # as wide as the widest batch
    start[:, 0] += 1.5 * unanswerable
    for max_length in (1, 3, 30):
        found = answers_of(windows, start, end, contexts, max_length=max_length, unanswerable=unanswerable)
        assert found == search(windows, start, end, contexts, max_length, unanswerable)
    assert ("" in found) <= unanswerable


def test_a_context_without_words_has_no_answer(tokenizer):
    windows = encode_question_answering(questions(("one", "", [])), tokenizer, max_length=14)
    zeros = np.zeros((1, 14))
    assert answers_of(windows, zeros, zeros, [""]) == [""]
