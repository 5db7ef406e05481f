"""Calibration data as a conversion takes them: read, split, and with the moments of a model on them if asked for."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import (
    DenseSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
    transformers_model,
)
from collab_compress.calibration import Batch, Calibration, evaluation_mode, gather_moments, run_batch
from collab_compress.calibration.batches import noted_batches, sample_sequences
from collab_compress.calibration.gather import batch_masks
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.writers import probe_batch
from collab_compress.errors import CalibrationError, UnsupportedModelError, check_type
from collab_compress.factorization import Moments
from collab_compress.options import CalibrationOptions, Solver

TYPICAL = 128  # tokens, if nothing says how long inputs are
COMMON = 0.9  # share of the calibration sequences that are no longer than the length that counts


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Calibration data as one model has read them, for a plan and conversions of that model.

    Args:
        used: batches to calibrate on.
        held_back: batches to measure drift on.
        notes: sentences on data that were left out.
        refit: whether layers are refitted by default: not to random tokens.
        length: tokens for which costs count.
        options: with which the data were read.
        seed: of the sample and of random tokens.
        moments: (path of a module, class of its map) → moments of its inputs on `used`; gathered if they are missing.
        digest: of the model that the moments are of, or "".
    """

    used: Sequence[Batch]
    held_back: Sequence[Batch]
    notes: Sequence[str]
    refit: bool
    length: int
    options: CalibrationOptions
    seed: int
    moments: Mapping[tuple[str, type], tuple[Moments, ...]]
    digest: str = ""

    def sample(self, sequences: int) -> "Calibrated":
        """Return about so many of the sequences, evenly spaced, an eighth of them held back; moments stay."""
        return replace(
            self,
            used=sample_sequences(self.used, sequences * 7 // 8),
            held_back=sample_sequences(self.held_back, sequences // 8),
            notes=(),
        )

    def check(self, model: PreTrainedModel, options: CalibrationOptions | None, seed: int) -> None:
        """Refuse another model, other options, or another seed.

        Raises:
            CalibrationError: the data would be read otherwise, or the moments are those of another model.
        """
        if options is not None and options != self.options:
            raise CalibrationError(
                f"the model was calibrated with {self.options}, got {options}; pass the same, or calibrate again"
            )
        if seed != self.seed:
            raise CalibrationError(f"the model was calibrated with seed {self.seed}, got {seed}; pass the same")
        if self.digest and self.digest != model_digest(model):
            raise CalibrationError(
                f"{type(model).__name__} is not the model that was calibrated, or has changed since; calibrate it"
            )


def read(
    model: PreTrainedModel,
    calibration: Calibration | Calibrated,
    tokenizer: Any,
    options: CalibrationOptions | None,
    seed: int,
) -> Calibrated:
    """Return calibration data for `model`, without moments unless they come with the data."""
    if isinstance(calibration, Calibrated):
        calibration.check(model, options, seed)
        return calibration
    options = CalibrationOptions() if options is None else options
    check_type("calibration_options", options, CalibrationOptions, CalibrationError)
    batches, notes, given = noted_batches(
        calibration, model, tokenizer, sequences=options.sequences, length=options.length, seed=seed
    )
    return Calibrated(
        *split_held_back(batches),
        notes=notes,
        refit=bool(given),
        length=typical_length(options, model, given if model.main_input_name == "input_ids" else batches),
        options=options,
        seed=seed,
        moments={},
    )


def typical_length(options: CalibrationOptions, model: PreTrainedModel, batches: Sequence[Batch] = ()) -> int:
    """Return the number of tokens, or positions of an image or a sound, for which costs count.

    That is `length` if given, else the length that nine in ten calibration sequences do not exceed, else the
    positions of an image or a sound of the first batch, else 128.

    Args:
        batches: of texts, or of images or sounds, noise included.
    """
    given = [batch for batch in batches if isinstance(batch.get("attention_mask"), Tensor)]
    masks = [batch_masks(model, batch)["encoder"].query for batch in given if batch["attention_mask"].dim() == 2]
    lengths = [mask.sum(1).float().cpu() for mask in masks if mask is not None]
    if options.length is None and lengths:
        return max(1, int(torch.cat(lengths).quantile(COMMON, interpolation="lower")))
    if options.length is None and batches and model.main_input_name != "input_ids":
        return _positions(model, batches[0])
    return options.length or TYPICAL


@torch.inference_mode(False)
def calibrate(
    model: PreTrainedModel,
    calibration: Calibration = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
    seed: int = 0,
) -> Calibrated:
    """Run the model once on calibration data; plans and conversions then reuse its moments.

    Pass the result to `plan` and `compress` in place of the data. The conversion is the same, bit for bit, for the
    model itself before it changes, and for equal models. The moments take 8·D² bytes for each map of each attention
    module with inputs of width D.

    Args:
        model: dense.
        calibration: as for `compress`, but not None.
        tokenizer: as for `compress`.
        calibration_options: as for `compress`.
        seed: `Solver.seed` of the conversions.

    Raises:
        UnsupportedModelError: the model's family is not known.
        CompressionError: the seed is unusable.
        CalibrationError: calibration data is missing or unusable.
    """
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    model = transformers_model(model)
    find_attention(model)  # refuses unknown families before any data are read
    model = sharing_copy(model)  # so that other threads may run the model meanwhile
    data = read(model, calibration, tokenizer, calibration_options, Solver(seed=seed).seed)
    if not data.used:
        raise CalibrationError("calibration is none, so there is nothing to run the model on; pass data")
    sites: list[DenseSite | ValueSite] = []
    for find in (find_dense_attention, find_dense_values):
        with suppress(UnsupportedModelError):  # a conversion of that map says why
            sites += find(model)
    with torch.autocast(model.device.type, enabled=False):
        gathered = gather_moments(model, sites, data.used)
    moments = {(site.name, type(site)): part for site, part in zip(sites, gathered, strict=True)}
    return replace(data, moments=moments, digest=model_digest(model))


def model_digest(model: PreTrainedModel) -> str:
    """Return the SHA-256 of a model's class, attention implementation, and tensors in memory."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.config._attn_implementation}".encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_meta:
            values = tensor.detach().cpu().contiguous().flatten()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


def _positions(model: PreTrainedModel, batch: Batch) -> int:
    """Return the number of positions that the first attention module of a model reads."""
    positions: list[int] = []

    def read_shape(_: Any, args: Any, kwargs: Any) -> None:
        positions.append((args[0] if args else kwargs["hidden_states"]).shape[-2])

    model = sharing_copy(model)
    first = find_attention(model)[0].module
    with evaluation_mode(model), first.register_forward_pre_hook(read_shape, with_kwargs=True):
        run_batch(model, probe_batch(batch))
    return positions[0]
