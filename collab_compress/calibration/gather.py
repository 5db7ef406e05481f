"""Gather the moments of every attention module's inputs while the model runs, keeping no tokens, padding left out."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from collab_compress.architectures import AttentionSite, DenseSite, Kind, ValueSite
from collab_compress.calibration.random_tokens import Batch
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.factorization import Moments
from collab_compress.factorization.moments import float64_device

FRAMES = "_get_feature_vector_attention_mask"  # method of models of sound: mask of samples → mask of positions


class RealTokens(NamedTuple):
    """Masks (True where a position is no padding) of one kind of attention; None where there is no padding.

    Args:
        query: (B, T), or (B, height, width) where only the pixels of an image are masked.
        key: (B, S), or (B, height, width).
    """

    query: Tensor | None
    key: Tensor | None


Masked: TypeAlias = Kind | Literal["images"]
"""Purpose of a mask: a kind of attention over tokens, or self-attention over parts of an image."""


def forward_arguments(model: nn.Module) -> list[str]:
    """Names of the arguments of `model.forward`, in order."""
    return list(inspect.signature(model.forward).parameters)


def real_tokens(
    model: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Masked, RealTokens]:
    """Return the padding masks of one call of `model`, for each kind of attention and for images.

    Without a mask every token counts. A decoder of an encoder-decoder that has none takes `decoder_input_ids`, where
    the pad token marks padding (except the first token, which starts the sequence), or else `labels` shifted to the
    right, where -100 marks padding.

    Args:
        model: a Transformers model.
        names: `forward_arguments(model)`.
        args: positional arguments of the call.
        kwargs: named arguments of the call.

    Raises:
        HeadError: a mask is not (B, T), so padding cannot be told from it.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def mask(name: str) -> Tensor | None:
        value = given.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2):
            got = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise HeadError(f"{name} {got}; padding can be told only from a mask (batch, tokens)")
        return None if value is None else value != 0

    source = _source_mask(model, given, mask("attention_mask"))
    memory = mask("encoder_attention_mask")
    target = source
    if model.config.is_encoder_decoder:
        target, memory = mask("decoder_attention_mask"), source
        target = _from_targets(model, given) if target is None else target
    elif model.config.model_type == "musicgen_melody_decoder":  # reads encoder states before its own tokens
        target = _joined((given.get("encoder_hidden_states"), memory), (given.get("input_ids"), source))
    pixels = source if "flattened_patches" in given else None
    for name in ("pixel_mask", "pixel_attention_mask", "patch_attention_mask"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            pixels = value != 0
    return {
        "encoder": RealTokens(source, source),
        "decoder": RealTokens(target, target),
        "cross": RealTokens(target, memory),
        "images": RealTokens(pixels, pixels),
    }


def _source_mask(model: Any, given: Mapping[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the mask of what the encoder reads, or the whole model where there is no decoder beside."""
    ids = given.get("input_ids")
    sounds = next((part for part in (model, getattr(model, "encoder", None)) if hasattr(part, FRAMES)), None)
    if mask is not None and sounds is not None:  # positions are fewer than samples
        length = int(sounds._get_feat_extract_output_lengths(torch.tensor(mask.shape[1])))
        resized: Tensor = getattr(sounds, FRAMES)(length, mask.long()).bool()
        return resized
    if "input_features" in given:
        return None  # models of spectrograms of one length attend to all of them
    if "visual_embeds" in given:  # VisualBERT reads them behind its tokens
        return _joined((ids, mask), (given["visual_embeds"], given.get("visual_attention_mask")))
    if mask is None and isinstance(ids, Tensor) and hasattr(model.config, "pad_index"):  # XLM and FlauBERT
        lengths = given.get("lengths")
        return ids != model.config.pad_index if lengths is None else _shorter_than(lengths, ids)
    return mask


def _shorter_than(lengths: Tensor, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def _joined(*parts: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Join masks (B, T) of inputs (B, T, …) that a model reads one behind the other; inputs may lack a mask."""
    if all(mask is None for _, mask in parts):
        return None
    masks = [
        torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device) if mask is None else mask.bool()
        for inputs, mask in parts
        if inputs is not None
    ]
    return torch.cat(masks, 1)


def masks_of(site: AttentionSite, real: Mapping[Masked, RealTokens]) -> RealTokens:
    """Return the padding masks of one module: those of its kind, or of images where its model reads no tokens."""
    if site.reads_tokens:
        return real[site.kind]
    pixels = real["images"]
    if site.kind == "cross":
        return RealTokens(None, pixels.key)
    decoder = site.family.cross and hasattr(site.parent, site.family.cross)  # of object queries, none of them padding
    return RealTokens(None, None) if decoder else pixels


def fitted(mask: Tensor | None, positions: int) -> Tensor | None:
    """Resize a mask to the positions that attention reads, where a model makes one position of several inputs.

    Args:
        mask: of tokens or frames (B, T), or of pixels (B, height, width).
        positions: how many positions attention reads.

    Returns:
        The mask (B, positions), or None where there is none, or where positions are no grid of pixels.
    """
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


def _from_targets(model: Any, given: Mapping[str, Any]) -> Tensor | None:
    labels, ids = given.get("labels"), given.get("decoder_input_ids")
    if ids is not None and model.config.pad_token_id is not None:
        real: Tensor = ids != model.config.pad_token_id
    elif ids is None and isinstance(labels, Tensor) and labels.dim() == 2:
        real = (labels != -100).roll(1, dims=1)
    else:
        return None
    real[:, 0] = True
    return real


def gather_moments(
    model: PreTrainedModel,
    sites: Sequence[DenseSite | ValueSite],
    batches: Iterable[Batch],
    on_batch: Callable[[], None] | None = None,
) -> list[tuple[Moments, ...]]:
    """Run the model on `batches` and gather first and second moments of what each site's projections read.

    Padding is left out. A module that serves several layers (ALBERT) pools them. Where queries and keys read the
    same tensor, as in self-attention, it is summed once. The first batch, and the first with other arguments, shows
    how often modules are reached; in later ones the model is stopped there, so that the rest of it does not run.

    Args:
        model: the dense model; left in the mode it was in.
        sites: attention modules of `model`.
        batches: keyword arguments for the model; its masks say what is padding.
        on_batch: called after each batch.

    Returns:
        For each site moments of query inputs and of key inputs, or of the output projection's inputs.

    Raises:
        CalibrationError: a module saw no token, an input was not finite, or a mask is none of (batch, tokens).
    """
    calls = _Calls()
    gathered = [_Gathered(site, calls) for site in sites]
    expected: dict[frozenset[str], int] = {}
    with evaluation_mode(model):
        try:
            for each in gathered:
                each.start()
            for batch in batches:
                real = batch_masks(model, batch)
                for each in gathered:
                    each.real = masks_of(each.site, real)
                names = frozenset(batch)
                calls.made, calls.enough = 0, expected.get(names)
                with suppress(_Enough):
                    run_batch(model, batch)
                expected[names] = max(calls.made, expected.get(names, 0))
                if on_batch is not None:
                    on_batch()
        finally:
            for each in gathered:
                each.stop()
    return [each.moments() for each in gathered]


class _Enough(Exception):
    """Raised in the model when all modules have seen what they read of a batch."""


@dataclass
class _Calls:
    """How often projections have read their inputs in this batch, and how often they will, where that is known."""

    made: int = 0
    enough: int | None = None

    def count(self) -> None:
        """Count one."""
        self.made += 1
        if self.made == self.enough:
            raise _Enough


class _Sums:
    """Sums over vectors, for their moments.

    Products are made in float32, or in float64 where the model is, of what is left of vectors less one near their
    mean, so that a large mean costs no digits; they are added up in float64.
    """

    def __init__(self, near: Tensor) -> None:
        self.near = near
        self.place = float64_device(near.device)
        self.first = torch.zeros(len(near), dtype=torch.float64, device=self.place)
        self.second = torch.zeros(len(near), len(near), dtype=torch.float64, device=self.place)
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Add vectors (N, D)."""
        left = vectors.to(self.near.dtype) - self.near
        self.first += left.to(self.place).sum(0, dtype=torch.float64)
        self.second += (left.mT @ left).to(self.place)
        self.count += len(left)

    def moments(self) -> Moments:
        """Return the moments in float64."""
        near, left = self.near.to(self.place).double(), self.first / self.count
        cross = torch.outer(near, left)
        second = self.second.div_(self.count).add_(cross).add_(cross.mT).addr_(near, near)
        return Moments(near + left, second, float(self.count))


class _Gathered:
    """Moments of one module's inputs, while they are gathered."""

    def __init__(self, site: DenseSite | ValueSite, calls: _Calls) -> None:
        self.site = site
        self.real = RealTokens(None, None)
        self._calls = calls
        self._sums: list[_Sums | None] = [None] * len(site.inputs)
        self._latest: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Watch the module."""
        for place, (projection, _) in enumerate(self.site.inputs):
            self._handles.append(projection.register_forward_pre_hook(partial(self._see, place)))

    def stop(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def _see(self, place: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        before, self._latest = self._latest, args[0] if place == 0 and len(self._sums) > 1 else None
        if not place or args[0] is not before:
            vectors = self._vectors(args[0], getattr(self.real, self.site.inputs[place][1]))
            sums = self._sums[place]
            if sums is None and len(vectors):
                wide = vectors if vectors.dtype == torch.float64 else vectors.float()
                sums = self._sums[place] = _Sums(wide.mean(0))
            if sums is not None:
                sums.add(vectors)
        self._calls.count()

    def _vectors(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Pick the tokens that are not padding from x (B, T, D), as (N, D)."""
        mask = fitted(mask, x.shape[1])
        if mask is None:
            return x.reshape(-1, x.shape[-1])
        if mask.shape != x.shape[:-1]:
            raise CalibrationError(
                f"{self.site.name} reads inputs of shape {tuple(x.shape)}, and the mask of the batch has shape "
                f"{tuple(mask.shape)}, so padding cannot be told; pass batches without padding and without a mask"
            )
        return x[mask.to(x.device)]

    def moments(self) -> tuple[Moments, ...]:
        """Return the moments; projections that always read the first one's input share its moments."""
        first = self._sums[0]
        if first is None:
            raise CalibrationError(
                f"{self.site.name} saw no token during calibration; are all positions padding, or do the batches "
                "lack what it reads (encoder_hidden_states, for cross-attention)?"
            )
        try:
            own = first.moments()
            others = [None if each is None else each.moments() for each in self._sums[1:]]
        except ValueError as error:
            raise CalibrationError(f"{self.site.name}: its inputs are not finite on the calibration data") from error
        return (own, *(own if each is None else each for each in others))


def unpadded(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the vectors of `values` (…, D) that are no padding, (n, D); all where the mask fits no positions.

    Args:
        values: what a layer reads or writes.
        mask: of its module, as `masks_of` returns it, or None where there is no padding.
    """
    vectors = values.reshape(-1, values.shape[-1])
    real = None if mask is None else fitted(mask, len(vectors) // len(mask))
    if real is None or real.numel() != len(vectors):
        return vectors
    return vectors[real.flatten().to(vectors.device)]


def batch_masks(model: PreTrainedModel, batch: Batch) -> dict[Masked, RealTokens]:
    """Return the padding masks of a batch, as `real_tokens`.

    Raises:
        CalibrationError: a mask is not (B, T).
    """
    try:
        return real_tokens(model, (), (), batch)
    except HeadError as error:
        raise CalibrationError(f"a calibration batch's {error}") from error


def run_batch(model: PreTrainedModel, batch: Batch) -> Any:
    """Run the model on one batch, moved to its device.

    Raises:
        CalibrationError: the model does not take such batches.
    """
    moved = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    try:
        return model(**moved, return_dict=True)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CalibrationError(
            f"{type(model).__name__} cannot run on the given batches ({reason}); pass batches made for it, or "
            "calibration 'none'"
        ) from error


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run `model` without gradients and without dropout, then put it back into the mode it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
