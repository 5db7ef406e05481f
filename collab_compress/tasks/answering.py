"""Questions answered by spans of a text: texts in windows that overlap, and what a model says of them as answers.

As in BERT (Devlin et al. 2019, arXiv 1810.04805, section 4.2): a context that is longer than a row is read in several
rows, and the answer is the span with the highest sum of its first token's start logit and its last token's end logit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

from collab_compress.errors import DataError
from collab_compress.tasks.tokenization import Data, check_length, each_split, map_rows

QUESTION = 64  # tokens of a question at most, as BERT's authors have it
NOWHERE = (-1, -1)  # offsets of a token that is not of the context


def encode_question_answering(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 384,
    stride: int | None = None,
    progress: bool = False,
    num_proc: int | None = None,
) -> Data:
    """Encode each question with its context, in as many windows as the context needs.

    Questions are cut after 64 tokens. The labels are those of the first answer; in a window that does not hold it
    whole, and where there is none, both are the null position, that of the classifier's token, or 0.

    Args:
        data: columns question, context and answers; a data set or one for each split.
        tokenizer: the model's, a fast one.
        max_length: tokens of a row: of the question, a window of the context, and special ones.
        stride: tokens that neighbouring windows share, as Transformers' tokenizers call it; a third of `max_length`
            if not given.
        progress: whether to show progress bars.
        num_proc: processes that share the work; one if not given.

    Returns:
        Columns input_ids, attention_mask, what else the tokenizer gives, start_positions and end_positions; and, for
        `answers_of`, row (which question), null, and offsets (of each token in the context, −1 where it is of none).

    Raises:
        DataError: columns are missing, the tokenizer is a slow one, or the lengths cannot be.
    """
    if not tokenizer.is_fast:
        raise DataError("the tokenizer is a slow one, which does not tell where its tokens are; load a fast one")
    stride = max_length // 3 if stride is None else stride
    special = tokenizer.num_special_tokens_to_add(pair=True)
    check_length(max_length, tokenizer, special + 2)
    room = max_length - special - stride - 1
    if stride < 0 or room < 1:
        raise DataError(
            f"stride {stride}: rows of {max_length} tokens leave no room for a question; expected 0 to "
            f"{max_length - special - 2}"
        )
    arguments = {
        "tokenizer": tokenizer, "max_length": max_length, "stride": stride, "question_length": min(QUESTION, room)
    }  # fmt: skip

    def encode(part: Dataset) -> Dataset:
        numbered = part.add_column("row", np.arange(len(part))) if "row" not in part.column_names else part
        return map_rows(numbered, _windows, ("question", "context", "answers"), arguments, progress, num_proc)

    return each_split(data, encode)


def answers_of(
    windows: Dataset | Sequence[Mapping[str, Any]],
    start: np.ndarray,
    end: np.ndarray,
    contexts: Sequence[str],
    *,
    max_length: int = 30,
    unanswerable: bool = False,
) -> list[str]:
    """Give the likeliest answer to each question: of all spans in all of its windows the one of the highest sum.

    Args:
        windows: as `encode_question_answering` gives them, (N).
        start: logits of a span's first token, (N, T); what stands after a window's own tokens does not count.
        end: logits of its last token, (N, T).
        contexts: of each question, (Q).
        max_length: tokens of an answer at most.
        unanswerable: whether there may be no answer: where the null position's sum, in the window where it is
            lowest, is above that of the best span.

    Returns:
        The answers, (Q); empty where there is none.
    """
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(contexts)
    null = [np.inf] * len(contexts)
    for place, window in enumerate(windows):
        row, offsets = window["row"], np.asarray(window["offsets"])
        first, last = start[place, : len(offsets)], end[place, : len(offsets)]
        null[row] = min(null[row], float(first[window["null"]] + last[window["null"]]))
        found = _best_span(first, last, offsets[:, 0] >= 0, max_length)
        if found is not None and found[0] > best[row][0]:
            score, one, other = found
            best[row] = score, contexts[row][offsets[one, 0] : offsets[other, 1]].strip()
    return [
        "" if unanswerable and nothing > score else text for (score, text), nothing in zip(best, null, strict=True)
    ]


def _best_span(
    start: np.ndarray, end: np.ndarray, allowed: np.ndarray, max_length: int
) -> tuple[float, int, int] | None:
    """Give the highest sum of a span's ends, and these; both are allowed, at most `max_length` apart."""
    first = np.where(allowed, start, -np.inf)
    last = np.concatenate([np.where(allowed, end, -np.inf), np.full(max_length - 1, -np.inf)])
    sums = first[:, None] + sliding_window_view(last, max_length)  # (T, L)
    place = int(sums.argmax())
    one, length = divmod(place, max_length)
    score = float(sums.flat[place])
    return None if score == -np.inf else (score, one, one + length)


def _windows(
    batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int, question_length: int
) -> dict[str, Any]:
    whole = tokenizer(batch["question"], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    questions = [
        question if len(offsets) <= question_length else question[: offsets[question_length - 1][1]]
        for question, offsets in zip(batch["question"], whole["offset_mapping"], strict=True)
    ]
    encoded = tokenizer(
        questions, batch["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    rows, found = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    offsets = [
        [pair if part == 1 else NOWHERE for pair, part in zip(pairs, encoded.sequence_ids(place), strict=True)]
        for place, pairs in enumerate(found)
    ]
    null = [ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0 for ids in encoded["input_ids"]]
    spans = [
        _span(pairs, batch["answers"][row]) or (nothing, nothing)
        for pairs, row, nothing in zip(offsets, rows, null, strict=True)
    ]
    return {
        **encoded, "start_positions": [one for one, _ in spans], "end_positions": [other for _, other in spans],
        "row": [batch["row"][row] for row in rows], "null": null, "offsets": offsets,
    }  # fmt: skip


def _span(offsets: Sequence[tuple[int, int]], answers: Mapping[str, Sequence[Any]]) -> tuple[int, int] | None:
    """Give the first and the last token of the first answer; None where a window does not hold it whole."""
    if not answers["text"]:
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    start += len(text) - len(text.lstrip())
    end = start + len(text.strip())
    context = [place for place, (first, _) in enumerate(offsets) if first >= 0]
    inside = [place for place in context if offsets[place][0] < end and offsets[place][1] > start]
    if not inside or offsets[context[0]][0] > start or offsets[context[-1]][1] < end:
        return None
    return inside[0], inside[-1]
