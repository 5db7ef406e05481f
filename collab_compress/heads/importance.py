"""How important attention heads are: confidence, distance from the others of the layer, gradient of the loss."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind, transformers_model
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.errors import HeadError
from collab_compress.heads.mask import HeadMask
from collab_compress.heads.tap import Part, Reading, Tap


def confidence(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    exclude: Collection[int] | None = None,
    kinds: Collection[Kind] = KINDS,
    together: bool = False,
) -> dict[str, Tensor]:
    """Measure how much of its attention each head gives to a single token (Multi-Head Rotation, equation 5).

    The mean over query positions of the row's largest attention weight. Padding does not count, nor do the tokens in
    `exclude`, neither as queries nor as keys: the paper's "maximal attention weight that the head assigns for each
    word, excluding the eos token" (section 2.4, after Voita et al., 2019) is a weight from word to word, and the end
    of a sequence is none; heads that look for nothing attend to it. The other weights stay as they are. A module that
    serves several layers (ALBERT) pools them.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; held-out data, in the paper.
        exclude: ids of tokens that do not count; the end-of-sequence tokens of the model's config if not given. Add
            what the tokenizer ends sequences with where the config does not say, as `tokenizer.sep_token_id`.
        kinds: which kinds of attention.
        together: measure on the batches of all processes of a distributed training, each of which must make the call,
            and give all of them the same. Where FSDP shards the model, with as many batches each.

    Returns:
        Path of each module → (H,) in float64, between 0 and 1.

    Raises:
        HeadError: there are no batches, a module saw no token that counts, or its attention is not finite; with
            `together`, in every process.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    return _streamed(model, batches, "probs", _largest, exclude, kinds, together)


def average_distance(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    of: Literal["outputs", "probs"] = "outputs",
    exclude: Collection[int] | None = None,
    kinds: Collection[Kind] = KINDS,
    together: bool = False,
) -> dict[str, Tensor]:
    """Measure how far each head lies from the others of its layer, AVG_L2 (Multi-Head Rotation, equation 6).

    The mean over query positions of Σ_{j≠i} ‖H_j − H_i‖₂ / (H − 1). Padding does not count, nor do positions whose
    tokens are in `exclude`.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; held-out data, in the paper.
        of: what H_i is: the head's output (dv numbers a position), or its attention row (S numbers).
        exclude: as for `confidence`.
        kinds: which kinds of attention.
        together: as for `confidence`.

    Returns:
        Path of each module → (H,) in float64, not negative.

    Raises:
        HeadError: as `confidence`; or a module has a single head, or `of` is neither.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    if of not in ("outputs", "probs"):
        raise HeadError(f"cannot measure distances between heads' {of!r}; expected 'outputs' or 'probs'")
    return _streamed(model, batches, of, _distances, exclude, kinds, together)


def _largest(reading: Reading, left_out: Tensor | None) -> Tensor:
    """Largest weight of each attention row on a key that is not left out, (B, T, H)."""
    assert reading.probs is not None
    probs = (
        reading.probs
        if left_out is None
        else reading.probs.masked_fill(left_out[:, None, None].to(reading.probs.device), 0.0)
    )
    return probs.amax(-1).transpose(1, 2)


def _distances(reading: Reading, left_out: Tensor | None = None) -> Tensor:
    """Mean distance of each head from the others at each position, (B, T, H)."""
    heads = reading.site.heads
    if heads < 2:
        raise HeadError(f"{reading.site.name} has a single head, which has no distance to others; leave its kind out")
    vectors = reading.outputs if reading.probs is None else reading.probs.transpose(1, 2)  # (B, T, H, dv or S)
    assert vectors is not None
    # by differences: through products, heads that nearly agree would lie apart by rounding alone
    each = torch.cdist(vectors.float(), vectors.float(), compute_mode="donot_use_mm_for_euclid_dist")
    return each.sum(-1) / (heads - 1)


def _streamed(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    part: Part,
    measure: Callable[[Reading, Tensor | None], Tensor],
    exclude: Collection[int] | None,
    kinds: Collection[Kind],
    together: bool,
) -> dict[str, Tensor]:
    """Average `measure` (B, T, H) over all positions that count, keeping only sums.

    It gets a reading, and which of its keys are excluded, (B, S), or None where none is.
    """
    model = transformers_model(model)
    excluded = _end_tokens(model) if exclude is None else sorted(exclude)
    if not (together and distributed.is_available() and distributed.is_initialized()):
        return _means([_sums(model, batches, part, measure, excluded, kinds)])
    told: list[Any] = [None] * distributed.get_world_size()
    try:
        own: Any = _sums(model, batches, part, measure, excluded, kinds)
    except Exception as error:
        distributed.all_gather_object(told, f"{type(error).__name__}: {error}")  # the others wait for an answer
        raise
    distributed.all_gather_object(told, own)
    for rank, each in enumerate(told):
        if isinstance(each, str):
            raise HeadError(f"process {rank} could not measure the importance of heads: {each}")
    return _means(told)


Sums: TypeAlias = dict[str, tuple[Tensor, int]]
"""Path of each module → sum (H,) over positions that count, and their number; empty where there were no batches."""


def _sums(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    part: Part,
    measure: Callable[[Reading, Tensor | None], Tensor],
    excluded: list[int],
    kinds: Collection[Kind],
) -> Sums:
    """Add up `measure` (B, T, H) over all positions that count."""
    given = False
    with Tap(model, [part], kinds) as tap, evaluation_mode(model):
        sums = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in tap.sites}
        counts = dict.fromkeys(sums, 0)
        for batch in batches:
            given = True
            run_batch(model, dict(batch))
            ids = _token_ids(model, batch) if excluded else {}
            for reading in tap.take():
                queries, keys = ids.get(reading.site.kind, (None, None))
                probs = reading.probs
                left_out = None if probs is None else _excluded(reading, keys, (len(probs), probs.shape[3]), excluded)
                values = measure(reading, left_out)  # (B, T, H)
                values = values[_counting(reading, values, queries, excluded)]  # (N, H)
                sums[reading.site.name] += values.double().sum(0).cpu()
                counts[reading.site.name] += len(values)
    return {name: (sums[name], counts[name]) for name in sums} if given else {}


def _means(sums: list[Sums]) -> dict[str, Tensor]:
    """Divide the sums of all processes by their counts."""
    given = [each for each in sums if each]
    if not given:
        raise HeadError("no batches to measure the importance of heads on; pass some, of held-out data")
    return {
        name: _mean(name, torch.stack([each[name][0] for each in given]).sum(0), sum(each[name][1] for each in given))
        for name in given[0]
    }


def _mean(name: str, total: Tensor, count: int) -> Tensor:
    if count == 0:
        raise HeadError(
            f"{name} saw no token that counts; are all positions padding or excluded, or does nothing call it? "
            "pass batches with real tokens, or leave its kind out"
        )
    if not total.isfinite().all():
        raise HeadError(f"{name}: the importance of its heads is not finite; look for NaN or infinity in its weights")
    return total / count


def _end_tokens(model: PreTrainedModel) -> list[int]:
    end = getattr(model.config, "eos_token_id", None)
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _token_ids(model: Any, batch: Mapping[str, Tensor]) -> dict[Kind, tuple[Tensor | None, Tensor | None]]:
    """Ids of the tokens that are queries and keys of each kind of attention, (B, T) and (B, S), as far as known."""
    own = batch.get("input_ids")
    if not model.config.is_encoder_decoder:
        return {"encoder": (own, own), "decoder": (own, own), "cross": (own, None)}
    target = batch.get("decoder_input_ids")
    if target is None and "labels" in batch and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return {"encoder": (own, own), "decoder": (target, target), "cross": (target, own)}


def _counting(reading: Reading, values: Tensor, ids: Tensor | None, excluded: list[int]) -> Tensor:
    """Which of the positions of `values` (B, T, H) count, (B, T)."""
    shape, device, real = values.shape[:2], values.device, reading.real.query
    keep = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real.to(device)
    left_out = _excluded(reading, ids, tuple(shape), excluded)
    return keep if left_out is None else keep & ~left_out.to(device)


def _excluded(reading: Reading, ids: Tensor | None, shape: tuple[int, ...], excluded: list[int]) -> Tensor | None:
    """Which positions of queries or keys hold excluded tokens, (B, T) or (B, S); None where tokens are not known."""
    if ids is None:
        return None
    if ids.shape != shape:
        raise HeadError(
            f"{reading.site.name} attends at {shape} positions, and token ids are of shape {tuple(ids.shape)}, so "
            "what to exclude cannot be told; pass exclude=()"
        )
    return torch.isin(ids, torch.tensor(excluded, device=ids.device))


Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def head_importance(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], loss: Loss | None = None
) -> dict[str, Tensor]:
    """Score heads by how much the loss would change if their outputs were scaled.

        I_h = E_x |∂L(x)/∂ξ_h| at ξ = 1,   then I ← I / ‖I‖₂ within each module

    where ξ_h multiplies the output of head h (Michel et al., "Are Sixteen Heads Really Better than One?", 2019,
    eq. 2 and section 4.1; "Scheduled DropHead" prunes by it). Each sample has masks of its own, so that one backward
    pass gives the gradient of every sample: the loss of a batch is the mean over its B samples, so the gradient in
    the mask of sample b is ∂L_b/∂ξ / B, and is multiplied by B again. Where a loss is a mean over tokens instead, a
    sample counts by its share of tokens. Runs in evaluation mode; gradients of parameters are neither needed nor
    touched.

    Args:
        model: stock or edited, with or without other masks on it.
        batches: arguments of `model` by name, one mapping of tensors (B, …) a batch; read once, one at a time.
        loss: gives the loss from the model's outputs and the batch: a mean over samples, or one loss a sample (B,).
            The model's own loss, for which batches need labels, if not given.

    Returns:
        Path of the attention module → (H,) on the CPU, of norm 1, or all 0 where the loss does not depend on any
        head. A module that serves several layers (ALBERT) sums them before the absolute value.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: no batches, no loss or one without gradient, a gradient that is not finite.
    """
    model = transformers_model(model)
    with HeadMask(model) as mask, evaluation_mode(model), torch.enable_grad():
        sums = {name: torch.zeros(heads, dtype=torch.float64) for name, heads in mask.heads.items()}
        samples = 0
        for batch in batches:
            moved = {
                key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()
            }
            size = _samples(moved)
            gates = {
                name: torch.ones(size, heads, device=model.device, requires_grad=True)
                for name, heads in mask.heads.items()
            }
            mask.set(gates)
            total = _total(model, moved, size, loss)
            gradients = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
            for name, gradient in zip(gates, gradients, strict=True):
                if gradient is not None:  # else this batch did not go through the module
                    sums[name] += gradient.double().abs().sum(0).cpu()
            samples += size
    if not samples:
        raise HeadError("head importance needs at least one batch, got none")
    return {name: _normalised(name, values / samples) for name, values in sums.items()}


def _total(model: PreTrainedModel, batch: Mapping[str, Any], size: int, loss: Loss | None) -> Tensor:
    """Sum of the losses of all samples."""
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


def _samples(batch: Mapping[str, Any]) -> int:
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if len(sizes) != 1:
        raise HeadError(
            f"cannot tell how many samples a batch has: its tensors begin with sizes {sorted(sizes)}; "
            "expected tensors (batch, …)"
        )
    return sizes.pop()


def _normalised(name: str, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise HeadError(f"{name}: the gradient of the loss in its heads is not finite; check weights and batches")
    norm = values.norm()
    return (values / norm if norm > 0 else values).float()
