"""Time attention modules and whole models, dense and converted, in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from collab_compress.analysis.stream import Progress, random_tokens, with_progress
from collab_compress.architectures import AttentionSite, find_attention
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.errors import HeadError

STEADY_SPREAD = 0.15  # distance of the quartiles, over the ratio, up to which a ratio of times is meaningful

Inputs = Callable[[int], Mapping[str, Tensor]]


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
        not measurable while other programs run: half of 20 rounds between 1.59 and 1.90 of the dense model's
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
        return self.high - self.low <= STEADY_SPREAD * self.ratio

    def __str__(self) -> str:
        rounds = f"half of {self.rounds} rounds between {self.low:.2f} and {self.high:.2f}"
        if not self.is_steady:
            return f"not measurable while other programs run: {rounds} of the dense model's"
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
    progress: Progress | None = None,
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
        progress: called with the number of finished lengths and their total.

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
        for length in with_progress(lengths, progress):
            batch = random_tokens(dense, batch_size, length, seed) if inputs is None else dict(inputs(length))
            for site, args, kwargs in _first_calls(dense, sites, batch):
                calls = [partial(_run, either, args, kwargs) for either in (site, counterparts[site.name])]
                timed = _time_in_turns(site.name, length, calls, device=dense.device, rounds=rounds, draw=draw)
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

    Example:
        >>> latency = model_latency(model, model, length=8, batch_size=1, seconds=0.01)
        >>> latency.rounds >= 10, latency.dense_ms > 0
        (True, True)
    """
    batch = random_tokens(dense, batch_size, length, seed)
    with evaluation_mode(dense), evaluation_mode(converted), _one_thread():
        calls = [partial(run_batch, model, batch) for model in (dense, converted)]
        once = sum(_measure_seconds(call, dense.device) for call in calls)
        rounds = min(40, max(10, int(seconds / once)))
        return _time_in_turns("", length, calls, device=dense.device, rounds=rounds, draw=random.Random(seed))


def _first_calls(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batch: dict[str, Any]
) -> list[tuple[AttentionSite, tuple[Any, ...], dict[str, Any]]]:
    """Return each module with the arguments of its first call, without a cache, which grows with each call."""
    calls: dict[nn.Module, Any] = {}

    def keep_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = [None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
        calls.setdefault(module, (plain[: len(args)], dict(zip(kwargs, plain[len(args) :], strict=True))))

    with ExitStack() as hooks:
        for site in sites:
            hooks.enter_context(site.module.register_forward_pre_hook(keep_first, with_kwargs=True))
        run_batch(model, batch)
    return [(site, *calls[site.module]) for site in sites if site.module in calls]


def _run(site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a module, and its output projection where it is outside the module."""
    outputs = site.module(*args, **kwargs)
    if site.paths.output.startswith(".."):
        site.part(site.paths.output)(outputs[0])


def _time_in_turns(
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
            times[which].append(1e3 * _measure_seconds(calls[which], device))
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


def _measure_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the processor time of one call on the CPU, or its time on another device."""
    clock: Callable[[], float] = thread_time if device.type == "cpu" else perf_counter
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = clock()
    call()
    wait()
    return clock() - started
