"""Cost of attention, dense and converted: parameters, multiply-accumulates, T*, cache, measured latency."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Progress, with_progress
from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention import FORMS, NarrowValues, ScoreForm, SharedScores, form_for
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.calibration.gather import forward_arguments
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import HeadError
from collab_compress.options import Form

STEADY = 0.25  # spread of a ratio of times, beside itself, up to which it says something

Inputs = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class FormCost:
    """The cost of a map of an attention module (its scores, or its values and outputs) in one form, or of a layer.

    Args:
        parameters: of scores, those of query and key projections, mixing matrix and content biases included; of
            values, those of value and output projections, without the bias of the latter.
        macs: multiply-accumulates for one sequence.
        cache_bytes: size of a token's keys or values in a cache, in the model's dtype, padded to whole heads; 0 in
            an encoder, which has no cache.
    """

    parameters: int
    macs: int
    cache_bytes: int = 0


@dataclass(frozen=True)
class MapCost:
    """The cost of one map of an attention module, or of a feed-forward block, dense and converted.

    Args:
        width: channels of all heads together, dk or dv, or neurons dff; None where the map stays dense.
        dense: cost in dense form.
        converted: cost at that width, or in dense form without one.
        break_even_length: T*, the number of tokens beyond which the converted form costs more; infinite for values
            and feed-forward blocks, which cost less at any length. None without a width.
    """

    width: int | None
    dense: FormCost
    converted: FormCost
    break_even_length: float | None


@dataclass(frozen=True)
class ModuleCost:
    """The cost of one attention module's scores, and of its values with outputs.

    Args:
        name: path of the module.
        kind: kind of attention.
        length: tokens T for which multiply-accumulates are counted.
        form: whether heads share the channels of scores, or each has its own.
        scores: cost of scores.
        values: cost of values and outputs.
    """

    name: str
    kind: Kind
    length: int
    form: str
    scores: MapCost
    values: MapCost


@dataclass(frozen=True)
class PaperRow:
    """One comparison of Table 1 of "Multi-Head Attention: Collaborate Instead of Concatenate", at T = 128.

    Args:
        width: D, and dense query/key width H·d.
        heads: number of heads H.
        dk: shared width R.
        dense: computed here.
        collaborative: computed here, content biases not counted.
        printed: the paper's dense parameters, collaborative parameters (10⁶), dense and collaborative operations
            (10⁸).
    """

    width: int
    heads: int
    dk: int
    dense: FormCost
    collaborative: FormCost
    printed: tuple[float, float, float, float]


def module_costs(
    model: PreTrainedModel,
    length: int = 128,
    *,
    dk: int | None = None,
    dv: int | None = None,
    form: Form = "shared",
    kinds: Collection[Kind] = KINDS,
) -> list[ModuleCost]:
    """Return the cost of scores, values and outputs of every attention module, dense and converted.

    Args:
        model: stock or converted.
        length: tokens T.
        dk: channels R for dense scores, which content biases add to; converted scores have their own.
        dv: channels for dense values; narrow values have their own.
        form: form for dense scores; converted scores have their own.
        kinds: which kinds of attention.

    Returns:
        One entry a module, in the model's order.

    Raises:
        HeadError: the length, dk or dv is not positive, or the form is unknown.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    numbers = {"length": length, "dk": dk, "dv": dv}
    if any(number is not None and number < 1 for number in numbers.values()):
        got = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
        raise HeadError(f"got {got}; expected at least 1")
    if form not in FORMS:
        raise HeadError(f"unknown form {form!r}; expected one of {', '.join(FORMS)}")
    return [_module_cost(site, length, dk, dv, form) for site in find_attention(model, FAMILIES, kinds=kinds)]


def layer_cost(width: int, heads: int, dk: int | None = None, length: int = 128) -> FormCost:
    """Return the cost of a whole attention layer, without biases and cache (section 3.4 of the paper).

    Values and output take 2·D² parameters and 2·T·D² + T²·D multiply-accumulates.

    Args:
        width: D, and the dense width H·d of queries, keys and values.
        heads: number of heads H.
        dk: shared width R, or None for dense queries and keys.
        length: tokens T.

    Raises:
        HeadError: the width is no multiple of the number of heads.
    """
    if width % heads:
        raise HeadError(f"width {width} is no multiple of {heads} heads")
    parameters, macs = 2 * width**2, (2 * length * width + length**2) * width
    if dk is None:
        scores = FormCost(dense_parameters(width, width, width, False), dense_macs(width, width, width, length))
    else:
        form = SharedScores(heads, width // heads, "", "", dk, content_bias=False)
        scores = FormCost(form.parameters(width), form.macs(width, length))
    return FormCost(scores.parameters + parameters, scores.macs + macs)


def paper_table_1() -> list[PaperRow]:
    """Recompute Table 1 of "Multi-Head Attention: Collaborate Instead of Concatenate": FairSeq, then BERT-base."""
    return [
        PaperRow(width, heads, dk, layer_cost(width, heads), layer_cost(width, heads, dk), printed)
        for width, heads, dk, printed in (
            (512, 8, 128, (1.05, 0.66, 1.51, 1.09)),
            (768, 12, 256, (2.36, 1.58, 3.27, 2.65)),
        )
    ]


@dataclass(frozen=True)
class Latency:
    """The time that one attention module, or a whole model, takes for inputs of one length.

    Args:
        name: path of the module in both models; empty for a whole model.
        length: tokens T.
        dense_ms: median time of the dense module and its output projection, in milliseconds.
        converted_ms: median time of the converted one.
        ratio: median over rounds of converted over dense time; below 1 the converted module is faster.
        low: lower quartile of this ratio.
        high: upper quartile.
        rounds: number of rounds.
    """

    name: str
    length: int
    dense_ms: float
    converted_ms: float
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def is_steady(self) -> bool:
        """Whether the ratio says something: its quartiles are near each other, as beside other work they are not."""
        return self.high - self.low <= STEADY * self.ratio


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
    """Return the latency of every attention module, dense and converted, at several input lengths.

    Both modules get the inputs of the dense module and run in turns, in random order, so that other load on the
    machine falls on both alike. Output projections count, also where they are outside the module.

    Args:
        dense: the dense model; its mode does not change.
        converted: its conversion, on the same device.
        lengths: numbers of tokens T.
        inputs: function from a length to the models' arguments; random tokens by default.
        batch_size: sequences in a batch of random tokens.
        rounds: number of timed runs, after one for warming up; at least 2.
        seed: of the order and the tokens.
        progress: as for `with_progress`, over lengths.

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
    ours = {site.name: site for site in find_attention(converted, FAMILIES)}
    sites = [site for site in find_attention(dense, FAMILIES) if site.name in ours]
    if not sites:
        raise HeadError("the two models have no attention module of the same path; pass a model and its conversion")
    draw, latencies = random.Random(seed), []
    with evaluation_mode(dense), evaluation_mode(converted):
        for length in with_progress(lengths, progress, "lengths"):
            batch = _random_tokens(dense, batch_size, length, seed) if inputs is None else dict(inputs(length))
            for site, args, kwargs in _first_calls(dense, sites, batch):
                calls = [partial(_call, each, args, kwargs) for each in (site, ours[site.name])]
                latencies.append(_timed(site.name, length, calls, dense.device, rounds, draw))
    return latencies


def model_latency(
    dense: PreTrainedModel,
    converted: PreTrainedModel,
    length: int = 128,
    *,
    batch_size: int = 8,
    seconds: float = 0.5,
    seed: int = 0,
) -> Latency:
    """Return the latency of a whole model and of its conversion on random tokens, measured in turns.

    Args:
        dense: the dense model.
        converted: its conversion, on the same device.
        length: tokens T of each sequence.
        batch_size: sequences in the batch.
        seconds: time to measure for; each model runs 4 to 40 times.
        seed: of the order and the tokens.

    Returns:
        The times, with an empty module name; quartiles are of the ratio, round by round.

    Raises:
        HeadError: the model does not read tokens.
        CalibrationError: the length is beyond the model's positions.
    """
    batch = _random_tokens(dense, batch_size, length, seed)
    if "use_cache" in forward_arguments(dense):
        batch["use_cache"] = False
    with evaluation_mode(dense), evaluation_mode(converted):
        calls = [partial(run_batch, model, batch) for model in (dense, converted)]
        once = sum(_seconds(call, dense.device) for call in calls)
        rounds = min(40, max(4, int(seconds / once)))
        return _timed("", length, calls, dense.device, rounds, random.Random(seed))


def _module_cost(site: AttentionSite, length: int, dk: int | None, dv: int | None, option: Form) -> ModuleCost:
    module: Any = site.module
    family = site.family
    query, key, value = (_bare(site.part(path)) for path in (family.query, family.key, family.value))
    width, bias, value_bias = key.in_features, query.bias is not None, value.bias is not None
    scores: ScoreForm | None = None if dk is None else form_for(option, site).of(site, dk, content_bias=True)
    if hasattr(module, "score_form"):
        scores = module.score_form
        bias = value_bias  # as values have it, queries had it
    values = None if dv is None else NarrowValues.of(site, dv, value_bias)
    values = getattr(module, "value_form", values)
    cached_keys, cached_values = _cached(site, scores, values)
    caches = site.kind != "encoder" and not (family.causal and not hasattr(module, "layer_idx"))
    number = query.weight.element_size() if caches else 0

    def cost_of(form: ScoreForm | NarrowValues, cached: int) -> FormCost:
        return FormCost(form.parameters(width), form.macs(width, length), cached * number)

    dense = FormCost(
        dense_parameters(width, site.width, site.key_value_width, bias),
        dense_macs(width, site.width, site.key_value_width, length),
        site.key_value_width * number,
    )
    whole = NarrowValues.of(site, site.key_value_width, value_bias)
    dense_values = cost_of(whole, whole.value_width)
    score_cost = MapCost(None, dense, dense, None)
    if scores is not None:
        score_cost = MapCost(scores.rank, dense, cost_of(scores, cached_keys), scores.break_even(width))
    value_cost = MapCost(None, dense_values, dense_values, None)
    if values is not None:
        value_cost = MapCost(values.dv, dense_values, cost_of(values, cached_values), inf)
    form = option if scores is None else scores.option
    return ModuleCost(site.name, site.kind, length, form, score_cost, value_cost)


def _cached(site: AttentionSite, scores: ScoreForm | None, values: NarrowValues | None) -> tuple[int, int]:
    """Return the numbers that keys and values of a token take in a cache."""
    if site.family.pieces and scores is not None and values is not None:  # laid out alike
        widest = max(scores.rank + scores.content_channels, values.dv)
        return (widest + -widest % site.head_width,) * 2
    keys = site.width if scores is None else scores.key_width
    channels = site.width if values is None else values.value_width
    return (max(keys, channels),) * 2 if site.family.even else (keys, channels)


def _bare(part: Any) -> Any:
    """Return a projection without the padding of its channels to whole heads."""
    return getattr(part, "proj", part)


def _call(site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a module, and its output projection where it is outside the module."""
    outputs = site.module(*args, **kwargs)
    if site.family.output.startswith(".."):
        site.part(site.family.output)(outputs[0])


def _first_calls(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batch: dict[str, Any]
) -> list[tuple[AttentionSite, tuple[Any, ...], dict[str, Any]]]:
    """Return each module with the arguments of its first call while the model runs."""
    calls: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    if "use_cache" in forward_arguments(model):
        batch = {**batch, "use_cache": False}  # a cache would grow with every call
    with ExitStack() as hooks:
        for site in sites:
            hooks.enter_context(site.module.register_forward_pre_hook(note, with_kwargs=True))
        run_batch(model, batch)
    return [(site, *calls[site.module]) for site in sites if site.module in calls]


def _timed(
    name: str,
    length: int,
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    rounds: int,
    draw: random.Random,
) -> Latency:
    """Return the latency of a dense and a converted call, timed in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for count in range(rounds + 1):
        for which in draw.sample((0, 1), 2):
            seconds = _seconds(calls[which], device)
            if count:  # the first is for warming up
                times[which].append(1e3 * seconds)
    low, middle, high = statistics.quantiles([ours / dense for dense, ours in zip(*times, strict=True)], n=4)
    dense_ms, converted_ms = map(statistics.median, times)
    return Latency(name, length, dense_ms, converted_ms, middle, low, high, rounds)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the time of one call, its work on the GPU included."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = perf_counter()
    call()
    wait()
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
