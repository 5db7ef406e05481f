"""Run a model on calibration batches: its attention masks, its outputs, and moments of the inputs of attention."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.architectures import AttentionSite, DenseSite, Kind, ValueSite
from collab_compress.attention.forward import named_arguments
from collab_compress.attention.relative import PositionCounts, read_positions
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.factorization import Moments
from collab_compress.factorization.least_squares import ResidualMoments
from collab_compress.transformers_parts import UNLABELLED

Batch: TypeAlias = dict[str, Tensor]
"""Keyword arguments of a model."""

Outputs: TypeAlias = dict[str, Tensor]
"""Outputs of a model on one batch by their names, without the loss; the first is the main one but for logits."""

MaskKind: TypeAlias = Kind | Literal["images"]
"""A kind of attention over tokens, or self-attention over parts of an image."""

SOUND_MASK = "_get_feature_vector_attention_mask"  # method of sound models: mask of samples → mask of positions


class AttentionMasks(NamedTuple):
    """Masks of one kind of attention, True where a position is no padding; None if nothing is padding."""

    query: Tensor | None  # (B, T), or (B, height, width) for pixels
    key: Tensor | None  # (B, S), or (B, height, width)


def forward_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments of `model.forward`, in order."""
    return list(inspect.signature(model.forward).parameters)


def takes_argument(model: nn.Module, name: str) -> bool:
    """Return whether `model.forward` takes an argument of that name, if only among further keyword arguments."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())


def attention_masks(
    model: PreTrainedModel, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[MaskKind, AttentionMasks]:
    """Return the attention masks of one call of `model`, whose arguments have these names, by kind of attention.

    A decoder without one has padding at the pad tokens of `decoder_input_ids`, or behind -100 in `labels`.
    """
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}

    def mask(name: str) -> Tensor | None:
        value = inputs.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2):
            got = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise HeadError(f"{name} {got}; expected an attention mask (batch, tokens)")
        return None if value is None else value != 0

    source = _source_mask(model, inputs, mask("attention_mask"))
    memory = mask("encoder_attention_mask")
    target = source
    if model.config.is_encoder_decoder:
        target, memory = mask("decoder_attention_mask"), source
        labels, ids = inputs.get("labels"), inputs.get("decoder_input_ids")
        pad_token = _decoder_pad_token(model.config)
        if target is None and ids is not None and pad_token is not None:
            target = ids != pad_token
            target[:, 0] = True
        elif target is None and ids is None and isinstance(labels, Tensor) and labels.dim() == 2:
            target = (labels != UNLABELLED).roll(1, dims=1)
            target[:, 0] = True
    elif model.config.model_type == "musicgen_melody_decoder":  # reads encoder states before its own tokens
        target = _concatenated((inputs.get("encoder_hidden_states"), memory), (inputs.get("input_ids"), source))
    pixels = source if "flattened_patches" in inputs else None
    for name in ("pixel_mask", "pixel_attention_mask", "patch_attention_mask"):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            pixels = value != 0
    return {
        "encoder": AttentionMasks(source, source),
        "decoder": AttentionMasks(target, target),
        "cross": AttentionMasks(target, memory),
        "images": AttentionMasks(pixels, pixels),
    }


def _decoder_pad_token(config: PretrainedConfig) -> int | None:
    """Return the pad token of an encoder–decoder's targets; a model of two configs has it in its decoder's."""
    token: int | None = getattr(config, "pad_token_id", None)
    return getattr(config.get_text_config(decoder=True), "pad_token_id", None) if token is None else token


def _source_mask(model: PreTrainedModel, inputs: Mapping[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the mask of the encoder's tokens, or of all tokens of a model without a decoder."""
    ids = inputs.get("input_ids")
    sounds = next((part for part in (model, getattr(model, "encoder", None)) if hasattr(part, SOUND_MASK)), None)
    if mask is not None and sounds is not None:  # positions are fewer than samples
        length = int(sounds._get_feat_extract_output_lengths(torch.tensor(mask.shape[1], device="cpu")))
        resized: Tensor = getattr(sounds, SOUND_MASK)(length, mask.long()).bool()
        return resized
    if "input_features" in inputs:
        return None  # models of spectrograms of one length attend to all of them
    if "visual_embeds" in inputs:  # VisualBERT appends them to its tokens
        return _concatenated((ids, mask), (inputs["visual_embeds"], inputs.get("visual_attention_mask")))
    return mask


def _concatenated(*parts: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Concatenate the masks (B, T) of inputs (B, T, …), each given as (inputs, mask or None)."""
    if all(mask is None for _, mask in parts):
        return None
    masks = [
        torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device) if mask is None else mask.bool()
        for inputs, mask in parts
        if inputs is not None
    ]
    return torch.cat(masks, 1)


def batch_masks(model: PreTrainedModel, batch: Batch) -> dict[MaskKind, AttentionMasks]:
    """Return the attention masks of a batch, or raise a CalibrationError if one is not (B, T)."""
    try:
        return attention_masks(model, (), (), batch)
    except HeadError as error:
        raise CalibrationError(f"a calibration batch's {error}") from error


def masks_of(site: AttentionSite, masks: Mapping[MaskKind, AttentionMasks]) -> AttentionMasks:
    """Return the attention masks of one module: of its kind, or of images if its model reads no tokens."""
    if site.reads_tokens:
        return masks[site.kind]
    pixels = masks["images"]
    if site.kind == "cross":
        return AttentionMasks(None, pixels.key)
    is_decoder = site.paths.cross and hasattr(site.parent, site.paths.cross)  # of object queries, none is padding
    return AttentionMasks(None, None) if is_decoder else pixels


def resize_mask(mask: Tensor | None, positions: int) -> Tensor | None:
    """Pool a mask (B, T) or (B, height, width) to (B, positions); None if those are no grid of the pixels."""
    if mask is None:
        return None
    if mask.dim() == 2:
        pooled = mask.shape[1] // positions  # SEW averages several frames
        return mask if pooled < 2 else torch.arange(positions, device=mask.device) < (mask.sum(1, True) // pooled)
    height, width = mask.shape[1:]
    for stride in range(1, max(height, width) + 1):
        grid = (-(-height // stride), -(-width // stride))
        if grid[0] * grid[1] == positions:
            return nn.functional.interpolate(mask[None].float(), size=grid)[0].bool().flatten(1)
    return None


def unpadded(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the vectors of `values` (…, D) that are no padding, (n, D)."""
    vectors = values.reshape(-1, values.shape[-1])
    resized = None if mask is None else resize_mask(mask, max(1, len(vectors) // len(mask)))
    if resized is None or bool(resized.all()):
        return vectors
    if resized.numel() != len(vectors):
        raise CalibrationError(
            f"hidden states have shape {tuple(values.shape)}, and the mask of the batch has shape "
            f"{tuple(resized.shape)}, so it does not say what is padding; pass batches without padding"
        )
    return vectors[resized.flatten().to(vectors.device)]


def as_batch(batch: Any) -> Batch:
    """Return a batch as a dict, or raise a CalibrationError: iterating over a single batch yields its names.

    Example:
        >>> as_batch("a text")
        Traceback (most recent call last):
            ...
        collab_compress.errors.CalibrationError: a batch is 'a text'; expected keyword arguments of the model, ...
    """
    if not isinstance(batch, Mapping):
        raise CalibrationError(
            f"a batch is {batch!r:.80}; expected keyword arguments of the model, as {{'input_ids': …}}; pass several "
            "batches, or [batch] for a single one"
        )
    return dict(batch)


def run_batch(model: PreTrainedModel, batch: Batch) -> Any:
    """Run the model on one batch, moved to its device, without a key-value cache.

    Raises:
        CalibrationError: the model does not take such batches.

    Example:
        >>> run_batch(model, batch).last_hidden_state.shape
        torch.Size([2, 6, 24])
    """
    moved: dict[str, Any] = {
        name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()
    }
    if "use_cache" in forward_arguments(model):
        moved.setdefault("use_cache", False)
    if takes_argument(model, "return_dict"):
        moved["return_dict"] = True
    try:
        return model(**moved)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CalibrationError(
            f"{type(model).__name__} cannot run on the given batches ({reason}); {_cause(model, batch, reason)}"
        ) from error


def _cause(model: PreTrainedModel, batch: Batch, reason: str) -> str:
    """Return what is known to be wrong with a batch that a model failed on, or what it holds."""
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    contents = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no tensors"
    tokens = [shape for name, shape in shapes.items() if name.endswith(("input_ids", "attention_mask"))]
    length = max((shape[-1] for shape in tokens), default=0)
    positions = getattr(model.config, "max_position_embeddings", None)
    if len({shape[0] for shape in tokens}) > 1:
        return f"its tensors have different numbers of sequences: {contents}"
    if isinstance(positions, int) and length > positions:
        return f"its sequences have {length} tokens, and the model has {positions} positions; pass shorter ones"
    if "padding token" in reason:
        return "set model.config.pad_token_id to the token that the batches are padded with"
    if model.main_input_name not in batch and "inputs_embeds" not in batch:
        return f"it reads {model.main_input_name}, and the batch holds {contents}; pass batches made for it"
    return f"the batch holds {contents}"


class ForwardEnded(Exception):
    """Raised by a hook to end a forward pass once all that is asked for is recorded."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run `model` without gradients and dropout, then restore its mode.

    Example:
        >>> with evaluation_mode(model.train()):
        ...     model.training, torch.is_grad_enabled()
        (False, False)
        >>> model.training
        True
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def read_outputs(model: PreTrainedModel, batch: Batch) -> Outputs:
    """Run the model on one batch, and return its outputs."""
    with evaluation_mode(model):
        output = run_batch(model, batch)
    if not isinstance(output, Mapping):  # of a class that takes no return_dict
        values = output if isinstance(output, tuple) else (output,)
        output = {f"output {number}": value for number, value in enumerate(values)}
    return {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}


def main_output(model: PreTrainedModel, outputs: Outputs) -> tuple[str, Tensor]:
    """Return the name and value of the logits, or of the first output, or raise if they are not finite."""
    name = "logits" if "logits" in outputs else next(iter(outputs))
    if not bool(torch.isfinite(outputs[name]).all()):
        raise CalibrationError(f"{name} of {type(model).__name__} is not finite on the calibration data")
    return name, outputs[name]


def token_mask(model: PreTrainedModel, batch: Batch, name: str, output: Tensor) -> Tensor | None:
    """Return the attention mask of an output (B, T, …); None if there is none, or no token dimension."""
    mask = batch_masks(model, batch)["decoder"].query  # of the only tokens, if there is no decoder
    by_token = output.dim() > 2 or name in ("start_logits", "end_logits")
    if mask is None or not by_token or mask.shape != output.shape[:2]:
        return None
    return mask.to(output.device)


def gather_moments(
    model: PreTrainedModel, sites: Sequence[DenseSite | ValueSite], batches: Iterable[Batch]
) -> list[tuple[Moments, ...]]:
    """Run the model on `batches` and gather first and second moments of the inputs of each site's projections.

    Args:
        model: dense; left in the mode it was in.
        sites: attention modules of `model`.
        batches: keyword arguments for the model, masks included.

    Returns:
        For each site moments of query inputs and of key inputs, or of the output projection's inputs.

    Raises:
        CalibrationError: a module saw no token, an input was not finite, or a mask is not (batch, tokens).

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> query, key = gather_moments(model, find_dense_attention(model), [batch])[0]
        >>> query.width, query.count  # without padding
        (24, 10.0)
    """
    with evaluation_mode(model), InputMoments(sites) as gathered:
        for batch in batches:
            gathered.masks = batch_masks(model, batch)
            run_batch(model, batch)
    return gathered.moments()


class InputMoments:
    """Moments of unpadded inputs of projections, pooled over all calls of a module inside a `with` block."""

    masks: Mapping[MaskKind, AttentionMasks] = {}
    """Masks of the batch that runs next."""

    def __init__(self, sites: Sequence[DenseSite | ValueSite]) -> None:
        self._sites = sites
        self._sums = [[ResidualMoments() for _ in site.inputs] for site in sites]
        self._query_inputs: list[Tensor | None] = [None] * len(sites)  # of calls whose key projection is still to run
        self._positions = {  # of sites whose projections read relative embeddings too
            number: PositionCounts()
            for number, site in enumerate(sites)
            if isinstance(site, DenseSite) and site.has_positions
        }
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for number, site in enumerate(self._sites):
            if number in self._positions:
                add_call = partial(self._add_call, number)
                self._hooks.enter_context(site.module.register_forward_pre_hook(add_call, with_kwargs=True))
                continue
            for place, (projection, _) in enumerate(site.inputs):
                self._hooks.enter_context(projection.register_forward_pre_hook(partial(self._add, number, place)))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _add_call(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the inputs (B, T, D) of one call of a module, and its relative embeddings."""
        call = named_arguments(module, args, kwargs)
        x, positions = call["hidden_states"], read_positions(module, call)
        self._add(number, 0, module, (x,))
        if positions is not None:
            mask = resize_mask(masks_of(self._sites[number], self.masks).query, x.shape[1])
            with torch.autocast(x.device.type, enabled=False):  # counts are exact in float32
                self._positions[number].add(positions, len(x), mask)

    def _add(self, number: int, place: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Add the inputs (B, T, D) of one call of a projection."""
        site, x, query_input = self._sites[number], args[0], self._query_inputs[number]
        self._query_inputs[number] = x if place == 0 and len(site.inputs) > 1 else None
        if place and x is query_input:
            return
        mask = resize_mask(getattr(masks_of(site, self.masks), site.inputs[place][1]), x.shape[1])
        if mask is not None and mask.shape != x.shape[:-1]:
            raise CalibrationError(
                f"{site.name} reads inputs of shape {tuple(x.shape)}, and the mask of the batch has shape "
                f"{tuple(mask.shape)}, so it does not say what is padding; pass batches without padding and mask"
            )
        self._sums[number][place].add(x.reshape(-1, x.shape[-1]) if mask is None else x[mask.to(x.device)])

    def moments(self) -> list[tuple[Moments, ...]]:
        """Return the moments of each site, as `gather_moments`; projections without sums share those of the first."""
        moments: list[tuple[Moments, ...]] = []
        for number, (site, (first, *others)) in enumerate(zip(self._sites, self._sums, strict=True)):
            if not first.count:
                raise CalibrationError(
                    f"{site.name} saw no token during calibration; are all positions padding, or do the batches "
                    "lack what it reads (encoder_hidden_states, for cross-attention)?"
                )
            try:
                inputs = first.input_moments()
                if number in self._positions:
                    moments.append(self._positions[number].pooled(inputs))
                    continue
                moments.append((inputs, *(sums.input_moments() if sums.count else inputs for sums in others)))
            except ValueError as error:
                raise CalibrationError(f"{site.name}: its inputs are not finite on the calibration data") from error
        return moments
