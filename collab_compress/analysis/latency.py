"""How long attention modules take, dense against converted, measured in turns over several lengths."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Progress, with_progress
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.calibration.padding import forward_arguments
from collab_compress.errors import HeadError

Inputs = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Latency:
    """How long one attention module takes for inputs of one length.

    Args:
        name: path of the module in both models.
        length: tokens T.
        dense_ms: median time of the dense module, in milliseconds.
        converted_ms: median time of the converted one.
        ratio: median of converted over dense, round by round; below 1 the converted one is faster.
        low: lower quartile of that.
        high: upper quartile.
        rounds: how many rounds.
    """

    name: str
    length: int
    dense_ms: float
    converted_ms: float
    ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class _Call:
    """A module and what it was called with."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def module_latency(
    dense: PreTrainedModel,
    converted: PreTrainedModel,
    lengths: Sequence[int] = (32, 128, 512),
    *,
    inputs: Inputs | None = None,
    batch_size: int = 1,
    rounds: int = 20,
    seed: int = 0,
    progress: Progress = False,
) -> list[Latency]:
    """Time every attention module of a dense model against the converted one's, over the length of the input.

    Both modules are called with what the dense model calls its own with, one after the other and in random order, so
    that what else the machine does falls on both alike. A module is what the model has as one: in some families the
    output projection is in it. The times are of this machine, device and number of threads.

    Args:
        dense: the dense model; left in the mode it was in.
        converted: the same, converted; on the same device.
        lengths: numbers of tokens T.
        inputs: gives the models' arguments for a length; random tokens if not given.
        batch_size: sequences in a batch of random tokens.
        rounds: how often each is timed, after one that is not; at least 2.
        seed: of the order and the tokens.
        progress: True for a bar, or a function of how many lengths are done and how many there are.

    Returns:
        One entry for each length and each module that both models have. Of a module that serves several layers the
        first use is timed.

    Raises:
        HeadError: too few rounds, no common module, or a model that does not read tokens and got no inputs.
        CalibrationError: the model does not take such inputs, as where a length is beyond its positions.
        UnsupportedModelError: a model's family is not known.
    """
    if rounds < 2:
        raise HeadError(f"got {rounds} rounds; quartiles need 2 at least")
    ours = {site.name: site.module for site in find_attention(converted, FAMILIES)}
    names = [site.name for site in find_attention(dense, FAMILIES) if site.name in ours]
    if not names:
        raise HeadError("the two models have no attention module of the same path; pass a model and its conversion")
    draw, found = random.Random(seed), []
    with evaluation_mode(dense), evaluation_mode(converted):
        for length in with_progress(lengths, progress, "lengths"):
            batch = _random_tokens(dense, batch_size, length, seed) if inputs is None else dict(inputs(length))
            calls = _calls(dense, names, batch)
            for name, call in calls.items():
                found.append(_timed(name, length, call, _Call(ours[name], call.args, call.kwargs), rounds, draw))
    return found


def _calls(model: PreTrainedModel, names: Sequence[str], batch: dict[str, Any]) -> dict[str, _Call]:
    """Note what each module is called with while the model runs."""
    calls: dict[str, _Call] = {}

    def watch(name: str, module: Any) -> Any:
        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, _Call(module, args, kwargs))

        return module.register_forward_pre_hook(note, with_kwargs=True)

    handles = [watch(name, model.get_submodule(name)) for name in names]
    if "use_cache" in forward_arguments(model):
        batch = {**batch, "use_cache": False}  # a cache would grow with every call
    try:
        run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _timed(name: str, length: int, dense: _Call, converted: _Call, rounds: int, draw: random.Random) -> Latency:
    times: dict[str, list[float]] = {"dense": [], "converted": []}
    calls = {"dense": dense, "converted": converted}
    for count in range(rounds + 1):
        for which in draw.sample(sorted(calls), 2):
            seconds = _seconds(calls[which])
            if count:  # the first is for warming up
                times[which].append(seconds)
    ratios = [ours / theirs for ours, theirs in zip(times["converted"], times["dense"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {which: 1e3 * statistics.median(found) for which, found in times.items()}
    return Latency(name, length, medians["dense"], medians["converted"], middle, low, high, rounds)


def _seconds(call: _Call) -> float:
    """Time one call, all of what it puts on a GPU included."""
    on_gpu = torch.cuda.is_available() and next(call.module.parameters()).is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    started = perf_counter()
    call.module(*call.args, **call.kwargs)
    if on_gpu:
        torch.cuda.synchronize()
    return perf_counter() - started


def _random_tokens(model: Any, batch_size: int, length: int, seed: int) -> dict[str, Any]:
    size = getattr(model.config, "vocab_size", None)
    if size is None or "input_ids" not in forward_arguments(model):
        raise HeadError(f"{type(model).__name__} reads no tokens; pass inputs=, a function of the length")
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(size, (batch_size, length), generator=generator)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(size, (batch_size, length), generator=generator)
    return batch
