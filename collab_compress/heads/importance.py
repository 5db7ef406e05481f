"""Importance of attention heads: confidence, distance from the layer's other heads, gradient of the loss."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind, transformers_model
from collab_compress.calibration import as_batch, evaluation_mode, run_batch
from collab_compress.errors import HeadError, check_number
from collab_compress.heads.hooks import HeadMask, HeadRecord, Part, Recorder


def confidence(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    exclude: Collection[int] | None = None,
    kinds: Collection[Kind] = KINDS,
    across_processes: bool = False,
) -> dict[str, Tensor]:
    """Return the mean over queries of each head's largest attention probability (Multi-Head Rotation, equation 5).

    Padding does not count, nor do the tokens in `exclude`, neither as queries nor as keys: the paper's "maximal
    attention weight that the head assigns for each word, excluding the eos token" (section 2.4, after Voita et al.,
    2019) is a weight from word to word. The other weights are not rescaled. A module that serves several layers
    (ALBERT) pools them.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; held-out data, in the paper.
        exclude: ids of tokens that do not count; the end-of-sequence tokens of the model's config if not given. Add
            the tokenizer's end where the config names none, as `tokenizer.sep_token_id`.
        across_processes: measure on the batches of all processes of a distributed training, each of which must call
            this and gets the same result. Where FSDP shards the model, each must pass as many batches.

    Returns:
        Path of each module → (H,) in float64, between 0 and 1.

    Raises:
        HeadError: there are no batches, a module saw no token that counts, or its attention is not finite; with
            `across_processes`, in every process.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.

    Example:
        >>> sure = confidence(model, [batch])["encoder.layer.0.attention.self"]
        >>> sure.shape, bool((sure > 1 / 6).all())
        (torch.Size([3]), True)
    """
    return _mean_over_queries(
        model, batches, "probs", _largest, exclude=exclude, kinds=kinds, across_processes=across_processes
    )


def average_distance(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    of: Literal["outputs", "probs"] = "outputs",
    exclude: Collection[int] | None = None,
    kinds: Collection[Kind] = KINDS,
    across_processes: bool = False,
) -> dict[str, Tensor]:
    """Return the mean distance of each head from the layer's other heads, AVG_L2 (Multi-Head Rotation, equation 6).

    The mean over queries of Σ_{j≠i} ‖H_j − H_i‖₂ / (H − 1), without padding and the tokens in `exclude`.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; held-out data, in the paper.
        of: what H_i is: the head's output (dv numbers), or its attention probabilities (S numbers).
        exclude: as for `confidence`.
        across_processes: as for `confidence`.

    Returns:
        Path of each module → (H,) in float64, not negative.

    Raises:
        HeadError: as `confidence`; or a module has a single head, or `of` is neither.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.

    Example:
        >>> average_distance(model, [batch])["encoder.layer.0.attention.self"].shape
        torch.Size([3])
        >>> average_distance(model, [batch], of="probs").keys()
        dict_keys(['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self'])
    """
    if of not in ("outputs", "probs"):
        raise HeadError(f"cannot measure distances between heads' {of!r}; expected 'outputs' or 'probs'")
    return _mean_over_queries(
        model, batches, of, _distances, exclude=exclude, kinds=kinds, across_processes=across_processes
    )


Measure: TypeAlias = Callable[[HeadRecord, Tensor | None, list[int]], Tensor]
"""Function of a record, its keys' token ids (B, S) and excluded ids, to one number a query and head, (B, T, H)."""


def _largest(record: HeadRecord, key_ids: Tensor | None, excluded: list[int]) -> Tensor:
    probs = record.probs
    assert probs is not None
    hidden = _is_excluded(record, key_ids, (len(probs), probs.shape[3]), excluded)
    if hidden is not None:
        probs = probs.masked_fill(hidden[:, None, None].to(probs.device), 0.0)
    return probs.amax(-1).transpose(1, 2)


def _distances(record: HeadRecord, *_: object) -> Tensor:
    heads = record.site.heads
    if heads < 2:
        raise HeadError(f"{record.site.name} has a single head, which has no distance to others; leave its kind out")
    vectors = record.outputs if record.probs is None else record.probs.transpose(1, 2)  # (B, T, H, dv or S)
    assert vectors is not None
    # By differences: by products, rounding alone would separate heads that nearly agree.
    distances = torch.cdist(vectors.float(), vectors.float(), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum(-1) / (heads - 1)


def _mean_over_queries(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    part: Part,
    measure: Measure,
    *,
    exclude: Collection[int] | None,
    kinds: Collection[Kind],
    across_processes: bool,
) -> dict[str, Tensor]:
    """Average a measure over the queries that count, of all processes if `across_processes`."""
    model = transformers_model(model)
    excluded = sorted(end_tokens(model) if exclude is None else exclude)
    across_processes = across_processes and distributed.is_initialized()
    results: list[Any] = [None] * (distributed.get_world_size() if across_processes else 1)
    try:
        results[0] = _sum_over_queries(model, batches, part, measure, kinds, excluded)
    except Exception as error:
        if across_processes:
            distributed.all_gather_object(results, f"{type(error).__name__}: {error}")  # the others wait for it
        raise
    if across_processes:
        distributed.all_gather_object(results, results[0])
    for rank, message in enumerate(results):
        if isinstance(message, str):
            raise HeadError(f"process {rank} could not measure the importance of heads: {message}")
    measured = [of_process for of_process in results if of_process]
    if not measured:
        raise HeadError("no batches to measure the importance of heads on; pass some, of held-out data")
    means = {}
    for name in measured[0]:
        total = torch.stack([of_process[name] for of_process in measured]).sum(0)
        if total[-1] == 0:
            raise HeadError(
                f"{name} saw no token that counts: all are padding or excluded, or nothing calls it; pass batches "
                "with unpadded tokens, or leave its kind out"
            )
        if not total.isfinite().all():
            raise HeadError(
                f"{name}: the importance of its heads is not finite; look for NaN or infinity in its weights"
            )
        means[name] = total[:-1] / total[-1]
    return means


def _sum_over_queries(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    part: Part,
    measure: Measure,
    kinds: Collection[Kind],
    excluded: list[int],
) -> dict[str, Tensor]:
    """Return the sum of a measure for each head and the number of queries that count, (H + 1,), of each module."""
    sums: dict[str, Tensor] = {}
    with Recorder(model, [part], kinds) as recorder, evaluation_mode(model):
        for batch in batches:
            for site in recorder.sites:
                sums.setdefault(site.name, torch.zeros(site.heads + 1, dtype=torch.float64, device="cpu"))
            run_batch(model, as_batch(batch))
            token_ids = _token_ids(model, batch) if excluded else {}
            for record in recorder.take():
                query_ids, key_ids = token_ids.get(record.site.kind, (None, None))
                values = measure(record, key_ids, excluded)  # (B, T, H)
                shape, mask = values.shape[:2], record.masks.query
                counts = torch.ones(shape, dtype=torch.bool, device="cpu") if mask is None else mask
                hidden = _is_excluded(record, query_ids, tuple(shape), excluded)
                counts = counts if hidden is None else counts & ~hidden.to(counts.device)
                values = values[counts.to(values.device)]  # (N, H)
                sums[record.site.name][:-1] += values.cpu().double().sum(0)
                sums[record.site.name][-1] += len(values)
    return sums


def end_tokens(model: PreTrainedModel, tokenizer: Any = None) -> set[int]:
    """Return the ids of tokens that end a sequence: of the config, and of a tokenizer or a processor that has one."""
    of_config = getattr(model.config, "eos_token_id", None)  # some configs, as MobileBERT's, name none
    ends = {of_config} if isinstance(of_config, int | None) else set(of_config)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    ends |= {getattr(tokenizer, name, None) for name in ("eos_token_id", "sep_token_id")}
    return {token for token in ends if token is not None}


def _token_ids(
    model: PreTrainedModel, batch: Mapping[str, Tensor]
) -> dict[Kind, tuple[Tensor | None, Tensor | None]]:
    """Return the token ids of queries (B, T) and keys (B, S) of each kind of attention, where they are known."""
    source = batch.get("input_ids")
    if not model.config.is_encoder_decoder:
        return {"encoder": (source, source), "decoder": (source, source), "cross": (source, None)}
    target = batch.get("decoder_input_ids")
    if target is None and "labels" in batch and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}


def _is_excluded(
    record: HeadRecord, ids: Tensor | None, shape: tuple[int, ...], excluded: list[int]
) -> Tensor | None:
    """Return which queries (B, T) or keys (B, S) are excluded tokens; None where token ids are not known."""
    if ids is None:
        return None
    if ids.shape != shape:
        raise HeadError(
            f"{record.site.name} attends at {shape} positions, and token ids are of shape {tuple(ids.shape)}, so "
            "tokens to exclude cannot be found; pass exclude=()"
        )
    return torch.isin(ids, torch.tensor(excluded, device=ids.device))


Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def head_importance(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], loss: Loss | None = None
) -> dict[str, Tensor]:
    """Return how much the loss would change if the outputs of a head were scaled.

        I_h = E_x |∂L(x)/∂ξ_h| at ξ = 1,   then I ← I / ‖I‖₂ within each module

    where ξ_h multiplies the output of head h (Michel et al., "Are Sixteen Heads Really Better than One?", 2019,
    eq. 2 and section 4.1; "Scheduled DropHead" prunes by it). Each sample has its own masks, so one backward pass
    gives the gradients of all samples: the loss of a batch is the mean over its B samples, so the gradient in the
    mask of sample b is ∂L_b/∂ξ / B, and is multiplied by B. Where a loss is a mean over tokens instead, a sample
    counts by its share of tokens. Runs in evaluation mode; gradients of parameters are neither needed nor changed.

    Args:
        model: stock or edited, with or without other masks on it.
        batches: arguments of `model` by name, tensors (B, …); read once, one at a time.
        loss: function of the model's outputs and the batch: a mean over samples, or one loss a sample (B,). If not
            given, the model's loss, for which batches need labels.

    Returns:
        Path of the attention module → (H,) on the CPU, of norm 1, or all 0 in a module on which the loss does not
        depend. A module that serves several layers (ALBERT) sums them before the absolute value.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: no batches, no loss or one without gradient, a gradient that is not finite or 0 for all heads.

    Example:
        >>> importance = head_importance(model, [batch], lambda outputs, batch: outputs[0].square().mean())
        >>> importance["encoder.layer.0.attention.self"].norm()
        tensor(1.)
    """
    model = transformers_model(model)
    with HeadMask(model) as mask, evaluation_mode(model), torch.enable_grad():
        sums = {name: torch.zeros(heads, dtype=torch.float64, device="cpu") for name, heads in mask.heads.items()}
        samples = 0
        for batch in map(as_batch, batches):
            inputs = {
                key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()
            }
            sizes = {len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()}
            if len(sizes) != 1:
                raise HeadError(
                    f"cannot tell how many samples a batch has: its tensors begin with sizes {sorted(sizes)}; "
                    "expected tensors (batch, …)"
                )
            size = sizes.pop()
            gates = {
                name: torch.ones(size, heads, device=model.device, requires_grad=True)
                for name, heads in mask.heads.items()
            }
            mask.set(gates)
            total = _summed_loss(model, inputs, size, loss)
            gradients = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
            for name, gradient in zip(gates, gradients, strict=True):
                if gradient is not None:  # else this batch did not go through the module
                    sums[name] += gradient.cpu().double().abs().sum(0)
            samples += size
    if not samples:
        raise HeadError("head importance needs at least one batch, got none")
    if not any(values.any() for values in sums.values()):
        raise HeadError(
            "the gradient of the loss is 0 in all heads, so none is more important than another; check that batches "
            "have labels other than -100 (in masked language modelling, some masked tokens)"
        )
    importance = {}
    for name, values in sums.items():
        if not values.isfinite().all():
            raise HeadError(f"{name}: the gradient of the loss in its heads is not finite; check weights and batches")
        mean = values / samples
        norm = mean.norm()
        importance[name] = (mean / norm if norm > 0 else mean).float()
    return importance


def _summed_loss(model: PreTrainedModel, batch: Mapping[str, Any], size: int, loss: Loss | None) -> Tensor:
    """Return the sum of the losses of all samples."""
    outputs = model(**batch, return_dict=True)
    value = getattr(outputs, "loss", None) if loss is None else loss(outputs, batch)
    if value is None:
        raise HeadError(
            f"{type(model).__name__} returned no loss; put labels into the batches, or pass loss=, a function of the "
            "outputs and the batch"
        )
    if not isinstance(value, Tensor) or value.shape not in ((), (1,), (size,)):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise HeadError(f"the loss is of {got}; expected a mean over samples (), or one loss a sample ({size},)")
    if not value.requires_grad:
        raise HeadError("the loss has no gradient in the heads; compute it from the outputs, without detaching them")
    return value.sum() if value.shape == (size,) else value.sum() * size


def least_important(
    importance: Mapping[str, Tensor], share: float, *, keep_one: bool = False
) -> dict[str, list[int]]:
    """Return the least important heads of all modules.

    Args:
        importance: module path → (H,), as `head_importance` returns.
        share: share of all heads to pick, 0 to 1; rounded to whole heads, halves up. Of equal heads the first are
            picked.
        keep_one: spare the most important head of each module, as removal must; may pick fewer heads.

    Returns:
        Module path → heads in ascending order, for modules that have any.

    Raises:
        HeadError: the share is not between 0 and 1, or an importance is no vector of finite numbers.

    Example:
        >>> importance = {"a": torch.tensor([0.1, 0.5, 0.2]), "b": torch.tensor([0.3, 0.4, 0.9])}
        >>> least_important(importance, share=0.5)
        {'a': [0, 2], 'b': [0]}
        >>> least_important(importance, share=1, keep_one=True)
        {'a': [0, 2], 'b': [0, 1]}
    """
    check_number("share of heads", share, 0, 1)
    candidates: list[tuple[float, str, int]] = []
    for name, values in importance.items():
        if values.dim() != 1 or not len(values) or not values.isfinite().all():
            raise HeadError(f"importance of {name}: got {values}; expected one finite number a head")
        spared = int(values.argmax()) if keep_one else None
        candidates += [(value, name, head) for head, value in enumerate(values.tolist()) if head != spared]
    candidates.sort(key=lambda candidate: candidate[0])
    picked: dict[str, list[int]] = {name: [] for name in importance}
    count = int(share * sum(map(len, importance.values())) + 0.5)
    for _, name, head in candidates[:count]:
        picked[name].append(head)
    return {name: sorted(heads) for name, heads in picked.items() if heads}
