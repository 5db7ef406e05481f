"""Cost of attention and feed-forward blocks, dense and converted: parameters, operations, cache, latency."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from collab_compress.analysis.stream import Progress, random_tokens, with_progress
from collab_compress.architectures import KINDS, AttentionSite, DenseSite, Kind, ValueSite, find_attention
from collab_compress.attention import MapConfig, NarrowConfig, QKConfig, RotaryConfig, SharedConfig, maps_of
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.conversion.feed_forward import FeedForward, block_report
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import HeadError

STEADY = 0.15  # distance of the quartiles, over the ratio, up to which a ratio of times is meaningful

Inputs = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class FormCost:
    """The cost of a map of an attention module (its scores, or its values and outputs), or of a feed-forward block.

    Args:
        parameters: of scores, those of query and key projections, mixing matrix and content biases; of values, those
            of value and output projections, without the bias of the latter.
        macs: multiply-accumulates for one sequence.
        cache_bytes: size of a token's keys or values in the key-value cache, in the model's dtype, padded to whole
            heads; 0 in an encoder, which has no cache.

    Example:
        >>> module_costs(model, 128)[0].values.dense
        FormCost(parameters=1176, macs=540672, cache_bytes=0)
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

    Example:
        >>> scores = module_costs(model, 128, dk=12)[0].scores
        >>> scores.width, scores.converted.macs < scores.dense.macs
        (12, True)
    """

    width: int | None
    dense: FormCost
    converted: FormCost


@dataclass(frozen=True)
class ModuleCost:
    """The cost of one attention module's scores, and of its values with outputs.

    Args:
        name: path of the module.
        kind: attention type.
        length: tokens T for which multiply-accumulates are counted.
        scores: cost of scores.
        values: cost of values and outputs.

    Example:
        >>> cost = module_costs(model, 128)[1]
        >>> cost.name, cost.scores.dense.parameters, cost.values.width
        ('encoder.layer.1.attention.self', 1200, None)
    """

    name: str
    kind: Kind
    length: int
    scores: MapCost
    values: MapCost


def module_costs(
    model: PreTrainedModel,
    length: int = 128,
    *,
    dk: int | None = None,
    dv: int | None = None,
    kinds: Collection[Kind] = KINDS,
) -> list[ModuleCost]:
    """Return the cost of scores, values and outputs of every attention module, dense and converted.

    Args:
        model: stock or converted.
        length: tokens T.
        dk: channels R at which dense scores are counted, plus content biases where queries have a bias; converted
            scores keep their width.
        dv: channels at which dense values are counted; narrow values keep their width.
        kinds: attention types.

    Returns:
        One entry a module, in the model's order.

    Raises:
        HeadError: the length, dk or dv is not positive, or the form is unknown.
        UnsupportedModelError: the model's family is not known, or it has no attention of these types.

    Example:
        >>> costs = module_costs(model, length=128, dk=12)
        >>> [cost.scores.converted.parameters for cost in costs]
        [696, 696]
    """
    numbers = {"length": length, "dk": dk, "dv": dv}
    if any(number is not None and number < 1 for number in numbers.values()):
        got = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
        raise HeadError(f"got {got}; expected at least 1")
    return [_module_cost(site, length, dk, dv) for site in find_attention(model, kinds=kinds)]


def _module_cost(site: AttentionSite, length: int, dk: int | None, dv: int | None) -> ModuleCost:
    module: Any = site.module
    family = site.family
    paths = (family.query, family.key, family.value, family.output)
    parts = [site.part(path) for path in paths]
    query, key, value, output = (getattr(part, "proj", part) for part in parts)  # without padding to whole heads
    widths = DenseSite(**vars(site), query=query, key=key).widths
    value_widths = ValueSite(**vars(site), value=value, output=output).widths
    qk, ov = maps_of(module)
    value_bias = value.bias is not None
    biases = query.bias is not None, key.bias is not None
    scores: QKConfig | None = None
    if qk is not None:
        scores = qk.config
        biases = value_bias, value_bias and family.key_bias  # dense queries have a bias where values have one
    elif dk is not None:
        scores = RotaryConfig.of(site, dk) if family.rotary else SharedConfig.of(site, dk, None, biases[0])
    values: NarrowConfig | None = None
    if ov is not None:
        values = ov.config
    elif dv is not None:
        values = NarrowConfig.of(site, dv, value_bias)
    caches = site.kind != "encoder" and not (family.causal and not hasattr(module, "layer_idx"))
    number_bytes = query.weight.element_size() if caches else 0
    dense_width = site.key_value_width
    cached = _cached(site, scores.key_channels if scores else dense_width, values.dv if values else dense_width)

    def cost_of(config: MapConfig, cached: int) -> FormCost:
        read = widths if isinstance(config, QKConfig) else value_widths
        return FormCost(config.parameters(read), config.macs(read, length), cached * number_bytes)

    channels = site.width, dense_width
    dense = FormCost(
        dense_parameters(widths, channels, biases), dense_macs(widths, channels, length), dense_width * number_bytes
    )
    dense_values = cost_of(NarrowConfig.of(site, dense_width, value_bias), dense_width)
    score_cost = MapCost(None, dense, dense)
    if scores is not None:
        score_cost = MapCost(scores.rank, dense, cost_of(scores, cached[0]))
    value_cost = MapCost(None, dense_values, dense_values)
    if values is not None:
        value_cost = MapCost(values.dv, dense_values, cost_of(values, cached[1]))
    return ModuleCost(site.name, site.kind, length, scores=score_cost, values=value_cost)


def _cached(site: AttentionSite, key: int, value: int) -> tuple[int, int]:
    """Return the channels of keys and values that a cache holds, as the module lays them out."""
    family = site.family
    dense = site.key_value_width
    if family.forward != "stock":
        return key, value
    if family.pieces and key != dense and value != dense:  # laid out alike
        key = value = max(key, value)
    elif family.fixed_heads:
        return dense, dense
    key, value = (width + -width % site.head_width for width in (key, value))
    return (max(key, value),) * 2 if family.even else (key, value)


def feed_forward_costs(
    model: PreTrainedModel, blocks: Sequence[FeedForward], length: int = 128, *, dff: int | None = None
) -> dict[str, MapCost]:
    """Return the cost of feed-forward blocks, as they are and with fewer neurons.

    Args:
        model: stock or edited.
        blocks: its feed-forward blocks, from `find_feed_forward`.
        length: tokens T.
        dff: neurons to keep in each block; None for all.

    Returns:
        Path of the layer that reads the neurons → cost of all layers of the block, biases included.

    Raises:
        HeadError: the length or dff is not positive, or dff is beyond the width of a block.

    Example:
        >>> from collab_compress.conversion.feed_forward import find_feed_forward
        >>> costs = feed_forward_costs(model, find_feed_forward(model, batch), dff=16)
        >>> costs["encoder.layer.0.output.dense"].converted.parameters
        808
    """
    if length < 1 or (dff is not None and dff < 1):
        raise HeadError(f"got length {length}, dff {dff}; expected at least 1")
    costs = {}
    for block in blocks:
        if dff is not None and dff > block.width:
            raise HeadError(f"{block.down} reads {block.width} neurons, and dff is {dff}; pass up to {block.width}")
        report = block_report(model, block, dff or block.width, length)
        dense = FormCost(report.parameters_before, report.macs_before)
        narrower = FormCost(report.parameters_after, report.macs_after)
        costs[block.down] = MapCost(dff, dense, narrower)
    return costs


@dataclass(frozen=True)
class Latency:
    """The time that one attention module, or a whole model, takes for inputs of one length.

    On a CPU it is processor time of one thread, which other programs on the machine hardly change. Printed, it is the
    ratio, or why there is none.

    Args:
        name: path of the module in both models; empty for a whole model.
        length: tokens T.
        dense_ms: median time of the dense module and its output projection, in milliseconds.
        converted_ms: median time of the converted one.
        ratio: median over rounds of converted over dense time; below 1 the converted module is faster.
        low: lower quartile of this ratio.
        high: upper quartile.
        rounds: number of rounds.
        device: type of the device, as "cpu".

    Example:
        >>> print(Latency("", 128, 2.0, 1.5, ratio=0.75, low=0.74, high=0.77, rounds=20, device="cpu"))
        0.75 of the dense model's (processor time of one thread; half of 20 rounds between 0.74 and 0.77)
        >>> print(Latency("", 128, 2.0, 3.5, ratio=1.75, low=1.59, high=1.90, rounds=20, device="cpu"))
        not measurable beside other work on this machine: half of 20 rounds between 1.59 and 1.90 of the dense model's
    """

    name: str
    length: int
    dense_ms: float
    converted_ms: float
    ratio: float
    low: float
    high: float
    rounds: int
    device: str

    @property
    def is_steady(self) -> bool:
        """Whether the quartiles of the ratio are near each other; if not, the ratio means little."""
        return self.high - self.low <= STEADY * self.ratio

    def __str__(self) -> str:
        rounds = f"half of {self.rounds} rounds between {self.low:.2f} and {self.high:.2f}"
        if not self.is_steady:
            return f"not measurable beside other work on this machine: {rounds} of the dense model's"
        clock = "processor time of one thread" if self.device == "cpu" else f"time on {self.device}"
        return f"{self.ratio:.2f} of the dense model's ({clock}; {rounds})"


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

    Both modules get the inputs of the dense module and run in turns, in random order, on one thread of a CPU. Output
    projections count, also where they are outside the module.

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
        CalibrationError: the model does not take the inputs, as where a length is beyond its positions.
        UnsupportedModelError: a model's family is not known.

    Example:
        >>> [(latency.name, latency.length) for latency in module_latency(model, model, lengths=(8,), rounds=2)]
        [('encoder.layer.0.attention.self', 8), ('encoder.layer.1.attention.self', 8)]
    """
    if rounds < 2:
        raise HeadError(f"got {rounds} rounds; quartiles need 2 at least")
    counterparts = {site.name: site for site in find_attention(converted)}
    sites = [site for site in find_attention(dense) if site.name in counterparts]
    if not sites:
        raise HeadError("the two models have no attention module of the same path; pass a model and its conversion")
    draw, latencies = random.Random(seed), []
    with evaluation_mode(dense), evaluation_mode(converted), _one_thread():
        for length in with_progress(lengths, progress, "lengths"):
            batch = random_tokens(dense, batch_size, length, seed) if inputs is None else dict(inputs(length))
            for site, args, kwargs in _first_calls(dense, sites, batch):
                calls = [partial(_call, either, args, kwargs) for either in (site, counterparts[site.name])]
                timed = _timed(site.name, length, calls, device=dense.device, rounds=rounds, draw=draw)
                latencies.append(timed)
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

    On a CPU one thread runs them.

    Args:
        dense: the dense model.
        converted: its conversion, on the same device.
        length: tokens T of each sequence.
        batch_size: sequences in the batch.
        seconds: time to measure for; each model runs 10 to 40 times, because fewer can agree by chance.
        seed: of the order and the tokens.

    Raises:
        HeadError: the model does not read tokens.
        CalibrationError: the length is beyond the model's positions.

    Example:
        >>> latency = model_latency(model, model, length=8, batch_size=1, seconds=0.01)
        >>> latency.rounds >= 10, latency.dense_ms > 0
        (True, True)
    """
    batch = random_tokens(dense, batch_size, length, seed)
    with evaluation_mode(dense), evaluation_mode(converted), _one_thread():
        calls = [partial(run_batch, model, batch) for model in (dense, converted)]
        once = sum(_seconds(call, dense.device) for call in calls)
        rounds = min(40, max(10, int(seconds / once)))
        return _timed("", length, calls, device=dense.device, rounds=rounds, draw=random.Random(seed))


def _first_calls(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batch: dict[str, Any]
) -> list[tuple[AttentionSite, tuple[Any, ...], dict[str, Any]]]:
    """Return each module with the arguments of its first call while the model runs, without a cache.

    A cache would grow with every further call.
    """
    calls: dict[nn.Module, Any] = {}

    def keep_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = [None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
        calls.setdefault(module, (plain[: len(args)], dict(zip(kwargs, plain[len(args) :], strict=True))))

    with ExitStack() as hooks:
        for site in sites:
            hooks.enter_context(site.module.register_forward_pre_hook(keep_first, with_kwargs=True))
        run_batch(model, batch)
    return [(site, *calls[site.module]) for site in sites if site.module in calls]


def _call(site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a module, and its output projection where it is outside the module."""
    outputs = site.module(*args, **kwargs)
    if site.family.output.startswith(".."):
        site.part(site.family.output)(outputs[0])


def _timed(
    name: str,
    length: int,
    calls: Sequence[Callable[[], Any]],
    *,
    device: torch.device,
    rounds: int,
    draw: random.Random,
) -> Latency:
    """Return the latency of a dense and a converted call, timed in turns after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for which in draw.sample((0, 1), 2):
            times[which].append(1e3 * _seconds(calls[which], device))
    dense, converted = times[0][1:], times[1][1:]
    low, middle, high = statistics.quantiles([after / before for before, after in zip(dense, converted, strict=True)])
    medians = statistics.median(dense), statistics.median(converted)
    return Latency(name, length, *medians, middle, low, high, rounds, device.type)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run PyTorch's operations on one CPU thread: several wait for each other where other programs use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the processor time of one call on the CPU, or its time on another device."""
    clock: Callable[[], float] = thread_time if device.type == "cpu" else perf_counter
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = clock()
    call()
    wait()
    return clock() - started
