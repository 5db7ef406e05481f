"""Gather the moments of every attention module's inputs while the model runs, keeping no tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from collab_compress.architectures import DenseSite, Kind
from collab_compress.calibration.batches import Batch
from collab_compress.calibration.padding import RealTokens, real_tokens
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.factorization import Moments


def gather_moments(
    model: PreTrainedModel,
    sites: Sequence[DenseSite],
    batches: Iterable[Batch],
    on_batch: Callable[[], None] | None = None,
) -> dict[str, tuple[Moments, Moments]]:
    """Run the model on `batches` and gather first and second moments of each site's query and key inputs.

    Padding is left out. A module that serves several layers (ALBERT) pools them. Where queries and keys read the
    same tensor, as in self-attention, it is summed once.

    Args:
        model: the dense model; left in the mode it was in.
        sites: attention modules of `model`.
        batches: keyword arguments for the model; its masks say what is padding.
        on_batch: called after each batch.

    Returns:
        Site name → moments of query inputs, moments of key inputs.

    Raises:
        CalibrationError: a module saw no token, an input was not finite, or a mask is none of (batch, tokens).
    """
    queries: dict[str, Moments | None] = {site.name: None for site in sites}
    keys: dict[str, Moments | None] = dict(queries)
    latest: dict[str, Tensor] = {}
    real: dict[Kind, RealTokens] = {}
    handles: list[RemovableHandle] = []

    def watch(site: DenseSite) -> None:
        name = site.name

        def on_query(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            latest[name] = args[0]
            queries[name] = _pooled(name, queries[name], _real_tokens(args[0], real[site.kind].query))

        def on_key(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0] is not latest.pop(name, None):
                keys[name] = _pooled(name, keys[name], _real_tokens(args[0], real[site.kind].key))

        handles.append(site.query.register_forward_pre_hook(on_query))
        handles.append(site.key.register_forward_pre_hook(on_key))

    with evaluation_mode(model):
        try:
            for site in sites:
                watch(site)
            for batch in batches:
                real = _masks(model, batch)
                run_batch(model, batch)
                if on_batch is not None:
                    on_batch()
        finally:
            for handle in handles:
                handle.remove()
    return {name: _both(name, queries[name], keys[name]) for name in queries}


def _masks(model: PreTrainedModel, batch: Batch) -> dict[Kind, RealTokens]:
    """Read the masks of a batch."""
    try:
        return real_tokens(model, (), (), batch)
    except HeadError as error:
        raise CalibrationError(f"a calibration batch's {error}") from error


def _pooled(name: str, so_far: Moments | None, tokens: Tensor) -> Moments | None:
    """Add tokens (N, D) to the moments of those before."""
    if not len(tokens):
        return so_far
    try:
        moments = Moments.of(tokens)
    except ValueError as error:
        raise CalibrationError(f"{name}: its inputs are not finite on the calibration data") from error
    return moments if so_far is None else Moments.pool([so_far, moments])


def _both(name: str, query: Moments | None, key: Moments | None) -> tuple[Moments, Moments]:
    """Give the moments of queries and of keys; keys that always read the queries' tensor have none of their own."""
    if query is None:
        raise CalibrationError(
            f"{name} saw no token during calibration; are all positions padding, or do the batches lack what it "
            "reads (encoder_hidden_states, for cross-attention)?"
        )
    return query, query if key is None else key


def run_batch(model: PreTrainedModel, batch: Batch) -> Any:
    """Run the model on one batch, moved to its device.

    Raises:
        CalibrationError: the model does not take such batches.
    """
    moved = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    try:
        return model(**moved, return_dict=True)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise CalibrationError(
            f"{type(model).__name__} cannot run on the given batches ({str(error).splitlines()[0]}); pass "
            "batches made for it, or calibration 'none'"
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


def _real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Pick the tokens that are not padding from x (B, T, D), as (N, D)."""
    if mask is None or mask.shape != x.shape[:-1]:
        return x.reshape(-1, x.shape[-1])
    return x[mask.to(x.device)]
