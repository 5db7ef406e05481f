"""Compare a converted model with its dense model: how far outputs move, and what stays of what a user acts on.

That is nearest texts, labels or perplexity. For each kind of model one function reads what counts from a model's
outputs, and one compares it between both models (`KINDS`). Both models run once on the held-back sequences, for these
and for the output error.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from collab_compress.calibration import Batch
from collab_compress.calibration.batches import sample_sequences, sequence_count
from collab_compress.calibration.encode import is_one_of, vocabulary_size
from collab_compress.calibration.gather import Outputs, main_output, read_outputs, token_mask
from collab_compress.calibration.source import SplitData, reads_tokens_alone
from collab_compress.conversion.reading import POOLINGS, Reading, is_causal
from collab_compress.conversion.report import Agreement, OutputError
from collab_compress.devices import has_float64
from collab_compress.errors import CalibrationError

NEAREST = 10  # texts, of which some stay
SEARCHED = 256  # texts in all, at most; both models run on them
FEWEST_TEXTS = 20  # with fewer, most of the ten nearest would stay by chance
FEWEST_SCORES = 10  # for a correlation
MASKED_OF = 7  # one ordinary token in this many is masked for a masked language model
NOT_ACCURACY = "This is agreement with the dense model, not accuracy: score your task."


def measure(
    converted: PreTrainedModel, dense: PreTrainedModel, data: SplitData, reading: Reading
) -> tuple[OutputError | None, Agreement | None]:
    """Return the output error, and what of the dense model's results stays, both on held-back sequences.

    Args:
        converted: the model; it stays as it is.
        dense: the model before its conversion.
        data: the output error is measured on all held-back sequences, agreement on those that are no random tokens;
            where the nearest texts are searched, on calibration sequences too.
        reading: tokenizer and pooling.

    Returns:
        The output error, None without data; the agreement, None where it cannot be told.

    Raises:
        CalibrationError: outputs are not finite, or of different shapes.
    """
    kind: str | None = None
    rows: list[Sequence[Tensor | None]] = []  # of the dense and of the converted model, for each batch

    def watch(batch: Batch, before: Outputs, after: Outputs) -> None:
        nonlocal kind
        if not any(batch is real for real in data.real_held_back):
            return
        kind = kind or _kind(dense, batch, before, reading)
        if kind is not None and KINDS[kind].inputs is None:
            read = KINDS[kind].read
            rows.append((read(dense, batch, before, reading), read(converted, batch, after, reading)))

    output_error = measure_output_error(converted, dense, data.held_back, watch)
    if kind is None:
        return output_error, None
    sequences = sum(map(sequence_count, data.real_held_back))
    more: Sequence[Batch] = ()
    if KINDS[kind].inputs is not None:
        more = data.real_held_back
    elif kind == "nearest texts":
        more = _at_most(sample_sequences(data.real_used, SEARCHED - sequences), SEARCHED - sequences)
    for batch in more:
        rows.append([_run(kind, model, batch, reading) for model in (dense, converted)])
    one, other = (_joined(of_model) for of_model in zip(*rows, strict=True))
    return output_error, None if one is None or other is None else KINDS[kind].compare(one, other, sequences)


def _at_most(batches: Iterable[Batch], count: int) -> list[Batch]:
    """Return the first batches that hold no more than `count` sequences together."""
    chosen: list[Batch] = []
    for batch in batches:
        count -= sequence_count(batch)
        if count < 0:
            break
        chosen.append(batch)
    return chosen


def _run(kind: str, model: PreTrainedModel, batch: Batch, reading: Reading) -> Tensor | None:
    """Run a model on one batch, and return what counts of its outputs."""
    inputs = KINDS[kind].inputs
    return KINDS[kind].read(model, batch, read_outputs(model, inputs(batch, reading) if inputs else batch), reading)


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all batches; None if some output lacks them, is not finite, or if there is no row."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or len({row.shape[1:] for row in known}) != 1:
        return None
    joined = torch.cat(known)
    return joined if joined.numel() and bool(torch.isfinite(joined).all()) else None


# ---- Output error ----


def measure_output_error(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    batches: Sequence[Batch],
    watch: Callable[[Batch, Outputs, Outputs], None] | None = None,
) -> OutputError | None:
    """Return the relative error of the logits, as log probabilities, or of the first output; padding is left out.

    The outputs of one batch are in memory at a time. `watch` is called with the batch, and with the outputs of the
    dense and of the converted model.
    """
    shown = watch or (lambda *_: None)
    measured = [_squared_errors(model, dense, batch, shown) for batch in batches]
    if not any(norm for *_, norm in measured):
        return None
    names, sequences, differences, norms = zip(*measured, strict=True)
    return OutputError(names[0], (sum(differences) / sum(norms)) ** 0.5, sum(sequences))


def _squared_errors(
    model: PreTrainedModel, dense: PreTrainedModel, batch: Batch, watch: Callable[[Batch, Outputs, Outputs], None]
) -> tuple[str, int, float, float]:
    """Return an output's name, its number of sequences, and the squared norms of its change and of itself."""
    before, after = read_outputs(dense, batch), read_outputs(model, batch)
    (name, old), (_, new) = main_output(dense, before), main_output(model, after)
    if old.shape != new.shape:
        raise CalibrationError(
            f"{type(dense).__name__} gives {name} of shape {tuple(old.shape)}, {type(model).__name__} one of "
            f"{tuple(new.shape)}; pass the dense model that was converted"
        )
    watch(batch, before, after)
    mask = token_mask(dense, batch, name, old)
    has_classes = name.endswith("logits") and old.dim() <= 3 and old.shape[-1] > 1  # not pixels of images
    are_probabilities = has_classes and dense.config.problem_type not in ("regression", "multi_label_classification")
    difference = norm = 0.0
    for index in range(len(old)):  # one sequence at a time in float64
        tokens = slice(None) if mask is None else mask[index]
        one, other = (_float64(output[index][tokens]) for output in (old, new))
        if are_probabilities and one.numel():
            one, other = one.log_softmax(-1), other.log_softmax(-1)
        difference += float((other - one).square().sum())
        if are_probabilities and one.numel():
            one = one - one.mean(-1, keepdim=True)
        norm += float(one.square().sum())
    return "log probabilities" if are_probabilities else name, len(old), difference, norm


def _float64(values: Tensor) -> Tensor:
    return values.double() if has_float64(values.device) else values.cpu().double()


# ---- Which kind of model ----


def _kind(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> str | None:
    """Return the kind of a model by its class and its outputs; None if nothing can be said of it."""
    logits, of_tokens = outputs.get("logits"), isinstance(batch.get("input_ids"), Tensor)
    if reading.pooling is not None:
        return "nearest texts"
    if "start_logits" in outputs and "end_logits" in outputs:
        return "answers"
    if logits is None:
        return None
    if logits.dim() == 2:
        return _kind_of_classifier(model, logits.shape[1])
    if not of_tokens or not reads_tokens_alone(model):
        return None
    if is_one_of(model, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES):
        return "labels of tokens"
    if model.config.is_encoder_decoder:
        return "next tokens" if is_one_of(model, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) else None
    causal = is_causal(model)
    if causal is False and is_one_of(model, MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        token, size = getattr(reading.tokenizer, "mask_token_id", None), vocabulary_size(model)
        return None if token is None or (size is not None and token >= size) else "masked tokens"
    return "next tokens" if causal and is_one_of(model, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) else None


def _kind_of_classifier(model: PreTrainedModel, labels: int) -> str | None:
    problem = getattr(model.config, "problem_type", None)
    if problem == "multi_label_classification":
        return "labels"
    if labels == 1:
        return "scores"
    return None if problem == "regression" else "classes"


# ---- Nearest texts ----


def _read_embeddings(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return embeddings of length 1, (B, D) in float64."""
    hidden, ids = outputs.get("last_hidden_state"), batch.get("input_ids")
    if hidden is None or ids is None or hidden.dim() != 3 or hidden.shape[:2] != ids.shape or reading.pooling is None:
        return None
    pooled = POOLINGS[reading.pooling](hidden.float(), _mask(model, batch, "last_hidden_state", hidden))
    return nn.functional.normalize(pooled.cpu().double(), dim=1)


def _mask(model: PreTrainedModel, batch: Batch, name: str, output: Tensor) -> Tensor:
    """Return the attention mask of an output (B, T, …), all true if there is none."""
    mask = token_mask(model, batch, name, output)
    return torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if mask is None else mask


def _compare_nearest(dense: Tensor, converted: Tensor, queries: int) -> Agreement | None:
    """Compare the nearest of all texts (N, D) to each of the first ones; a text is not its own neighbour."""
    if len(dense) < FEWEST_TEXTS:
        return None

    def nearest(of_queries: Tensor, texts: Tensor) -> Tensor:
        cosines = of_queries[:queries] @ texts.T
        return cosines.fill_diagonal_(-math.inf).topk(NEAREST).indices  # (queries, 10)

    before = nearest(dense, dense).unsqueeze(2)
    rebuilt, kept = (_mean((before == nearest(converted, index).unsqueeze(1)).any(2)) for index in (converted, dense))
    return Agreement(
        kind="nearest texts",
        sequences=queries,
        numbers={"nearest_stay": rebuilt, "nearest_stay_in_dense_index": kept, "texts": len(dense)},
        finding=(
            f"For {queries} held-back texts {_percent(rebuilt)} of the ten nearest among {len(dense)} texts stay; "
            f"{_percent(kept)} where only queries are converted and the index stays the dense model's."
        ),
        meaning=(
            f"The dense model's index can stay for queries of this model ({_percent(kept)}), or be rebuilt "
            f"({_percent(rebuilt)}): docs/guides/embedding_model.md#keep-the-index."
        ),
    )


# ---- Labels and scores ----


def _read_logits(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return logits (B, C) in float64."""
    logits = outputs.get("logits")
    return None if logits is None or logits.dim() != 2 else logits.cpu().double()


def _compare_classes(dense: Tensor, converted: Tensor, rows: int) -> Agreement:
    stay = _mean(dense.argmax(1) == converted.argmax(1))
    change = _mean((dense.softmax(1) - converted.softmax(1)).abs())
    finding = f"The predicted class stays for {_percent(stay)} of {rows} held-back rows"
    return _predictions("classes", rows, {"classes_stay": stay, "probability_change": change}, finding)


def _compare_labels(dense: Tensor, converted: Tensor, rows: int) -> Agreement:
    """Compare independent labels, each predicted where its probability is above 0.5."""
    stay = _mean((dense > 0) == (converted > 0))
    change = _mean((dense.sigmoid() - converted.sigmoid()).abs())
    finding = f"Of the labels of {rows} held-back rows {_percent(stay)} stay, predicted above a probability of 0.5"
    return _predictions("labels", rows, {"labels_stay": stay, "probability_change": change}, finding)


def _predictions(kind: str, rows: int, numbers: dict[str, float], finding: str) -> Agreement:
    finding = f"{finding}; probabilities move by {numbers['probability_change']:.3f} on average."
    return Agreement(kind=kind, sequences=rows, numbers=numbers, finding=finding, meaning=NOT_ACCURACY)


def _compare_scores(dense: Tensor, converted: Tensor, rows: int) -> Agreement:
    """Compare scores (N, 1)."""
    change, deviation = _mean((dense - converted).abs()), float(dense.std(correction=0))
    numbers = {"score_change": change, "score_deviation": deviation}
    finding = f"Scores move by {change:.3g} on average on {rows} held-back rows"
    finding += f"; the dense ones have a standard deviation of {deviation:.3g}"
    if len(dense) >= FEWEST_SCORES and deviation and float(converted.std()):
        correlation = float(torch.corrcoef(torch.cat([dense, converted], 1).T)[0, 1])
        numbers = {"correlation": correlation, **numbers}
        finding += f", and both correlate by {correlation:.3f}"
    return Agreement(
        kind="scores",
        sequences=rows,
        numbers=numbers,
        finding=f"{finding}.",
        meaning="The nearer the correlation is to 1, the better rankings stay; set thresholds on scores again.",
    )


def _read_token_labels(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return the predicted label of each token that is no padding, (n,)."""
    logits = outputs.get("logits")
    if logits is None or logits.dim() != 3:
        return None
    return logits.argmax(2)[_mask(model, batch, "logits", logits)].cpu()


def _compare_token_labels(dense: Tensor, converted: Tensor, sequences: int) -> Agreement:
    stay = _mean(dense == converted)
    return Agreement(
        kind="labels of tokens",
        sequences=sequences,
        numbers={"labels_stay": stay, "tokens": len(dense)},
        finding=(
            f"The predicted label stays for {_percent(stay)} of {len(dense):,} tokens of {sequences} held-back texts."
        ),
        meaning=NOT_ACCURACY,
    )


def _read_answers(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return the most probable first and last token of each answer, (B, 2)."""
    if not {"start_logits", "end_logits"} <= outputs.keys():
        return None
    ends = []
    for name in ("start_logits", "end_logits"):
        logits = outputs[name]
        ends.append(logits.masked_fill(~_mask(model, batch, name, logits), -math.inf).argmax(1))
    return torch.stack(ends, 1).cpu()


def _compare_answers(dense: Tensor, converted: Tensor, sequences: int) -> Agreement:
    stay = _mean((dense == converted).all(1))
    return Agreement(
        kind="answers",
        sequences=sequences,
        numbers={"answers_stay": stay},
        finding=f"The answer, both its start and its end, stays for {_percent(stay)} of {sequences} held-back rows.",
        meaning=NOT_ACCURACY,
    )


# ---- Language models ----


def _read_next_tokens(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return −log p of each token but the first one, given those before it (and a source), padding left out, (n,).

    A decoder's inputs are its targets shifted by one token; if a batch has labels instead, these are the targets.
    """
    logits, shifted = outputs.get("logits"), True
    ids = batch.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    if ids is None and model.config.is_encoder_decoder:
        ids, shifted = batch.get("labels"), False
    if logits is None or ids is None or "input_ids" not in batch or logits.shape[:-1] != ids.shape:
        return None
    mask = _mask(model, batch, "logits", logits)
    if shifted:
        logits, ids, mask = logits[:, :-1], ids[:, 1:], mask[:, 1:] & mask[:, :-1]
    return _losses(logits, ids, mask)


def _read_masked_tokens(model: PreTrainedModel, batch: Batch, outputs: Outputs, reading: Reading) -> Tensor | None:
    """Return −log p of each masked token, (n,)."""
    logits, ids = outputs.get("logits"), batch.get("input_ids")
    if logits is None or ids is None or logits.shape[:-1] != ids.shape:
        return None
    return _losses(logits, ids, _to_mask(batch, reading))


def _losses(logits: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Return −log p of the counted targets (B, T) among logits (B, T, V), one sequence at a time, (n,) in float64."""
    targets, counted = targets.to(logits.device), counted.to(logits.device)
    counted = counted & (targets >= 0) & (targets < logits.shape[2])  # labels of -100 do not count
    losses = [
        nn.functional.cross_entropy(row[chosen].float(), target[chosen], reduction="none")
        for row, target, chosen in zip(logits, targets, counted, strict=True)
    ]
    return torch.cat(losses).cpu().double()


def _to_mask(batch: Batch, reading: Reading) -> Tensor:
    """Return which tokens (B, T) are masked: every seventh ordinary one of a sequence, beginning with the fourth."""
    ids = batch["input_ids"]
    special = torch.tensor(reading.tokenizer.all_special_ids if reading.tokenizer else [], device=ids.device)
    is_ordinary = ~torch.isin(ids, special.to(ids.dtype))
    if isinstance(mask := batch.get("attention_mask"), Tensor):
        is_ordinary &= mask.to(ids.device) != 0
    return is_ordinary & (is_ordinary.cumsum(1) % MASKED_OF == (MASKED_OF + 1) // 2)


def _with_masks(batch: Batch, reading: Reading) -> Batch:
    """Return a batch in which the tokens of `_to_mask` are masked."""
    token = reading.tokenizer.mask_token_id if reading.tokenizer else None
    return {**batch, "input_ids": batch["input_ids"].masked_fill(_to_mask(batch, reading), token or 0)}


def _compare_next_tokens(dense: Tensor, converted: Tensor, sequences: int) -> Agreement | None:
    return _compare_perplexity("next tokens", "Perplexity", dense, converted, sequences)


def _compare_masked_tokens(dense: Tensor, converted: Tensor, sequences: int) -> Agreement | None:
    what = "Perplexity of every seventh token, masked,"
    return _compare_perplexity("masked tokens", what, dense, converted, sequences)


def _compare_perplexity(kind: str, what: str, dense: Tensor, converted: Tensor, sequences: int) -> Agreement | None:
    """Compare exp(mean −log p)."""
    before, after = (float(losses.mean().exp()) for losses in (dense, converted))
    if not math.isfinite(before) or not math.isfinite(after):
        return None
    return Agreement(
        kind=kind,
        sequences=sequences,
        numbers={"perplexity": after, "dense_perplexity": before, "tokens": len(dense)},
        finding=f"{what} on {sequences} held-back texts: {_perplexity(after)}, dense {_perplexity(before)}.",
        meaning="Less is better; a task may lose more or less than that: score yours.",
    )


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _percent(share: float) -> str:
    """Return a share in percent, 0 % and 100 % only for none and all."""
    return f"{share if share in (0, 1) else min(max(share, 0.01), 0.99):.0%}"


class Kind(NamedTuple):
    """How results of one kind are compared."""

    read: Callable[[PreTrainedModel, Batch, Outputs, Reading], Tensor | None]
    """Rows that count of a model's outputs on a batch; None if the outputs lack them."""
    compare: Callable[[Tensor, Tensor, int], Agreement | None]
    """What stays, from the rows of the dense and of the converted model and the number of held-back sequences."""
    inputs: Callable[[Batch, Reading], Batch] | None = None
    """What the models read instead of a batch."""


KINDS = {
    "nearest texts": Kind(_read_embeddings, _compare_nearest),
    "classes": Kind(_read_logits, _compare_classes),
    "labels": Kind(_read_logits, _compare_labels),
    "scores": Kind(_read_logits, _compare_scores),
    "labels of tokens": Kind(_read_token_labels, _compare_token_labels),
    "answers": Kind(_read_answers, _compare_answers),
    "next tokens": Kind(_read_next_tokens, _compare_next_tokens),
    "masked tokens": Kind(_read_masked_tokens, _compare_masked_tokens, _with_masks),
}
