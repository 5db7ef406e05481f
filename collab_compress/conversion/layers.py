"""Run the numbered layers of a model one at a time, on hidden states that are kept between them.

One pass through the whole model captures what each layer is called with. A layer can then be called alone, on any
hidden states, with its other arguments as they were. Most layers read what the layer before them returned; they form
a stack. Where a stack begins (after the embeddings, or at a decoder after its encoder), the model itself has to run.
`HiddenStateStore` keeps hidden states in memory or in files.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, TypeAlias
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.calibration.gather import AttentionMasks, ForwardEnded, MaskKind, batch_masks
from collab_compress.calibration.stacks import HiddenArgument, Stack, probe_of, returned_states
from collab_compress.devices import free_memory
from collab_compress.errors import CalibrationError, UnsupportedModelError, one_line

STORE_BYTES = 2 * 2**30  # of memory for hidden states
SHARE_OF_FREE = 0.25  # of a GPU's free memory, the most that one tensor may take; layers need the rest
SAME_RTOL = 1e-4  # relative error of a layer that is called alone, which is rounding

SingleLayers: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Path of each numbered layer → a function that calls it alone, as its model does first on some batch."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a numbered layer in a forward pass."""

    name: str  # path of the layer
    args: tuple[Any, ...]  # positional arguments but the hidden states; without a cache
    kwargs: Mapping[str, Any]  # keyword arguments but the hidden states; without a cache
    hidden: Tensor | None  # hidden states (B, T, D) that it read; None if the call before it returned them
    keyword: str  # name of the argument of hidden states; empty if they are the first positional one

    def run(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Call the layer of `model` on hidden states (B, T, D), and return those that it returns."""
        states: Tensor = returned_states(self.output(model, hidden))
        return states

    def output(self, model: PreTrainedModel, hidden: Tensor) -> Any:
        """Call the layer of `model` on hidden states (B, T, D), and return all that it returns."""
        layer, hidden = model.get_submodule(self.name), hidden.to(model.device)
        args = self.args if self.keyword else (hidden, *self.args)
        named = {self.keyword: hidden} if self.keyword else {}
        return layer(*args, **named, **self.kwargs)


class Plain(NamedTuple):
    """Layers that pass on hidden states alone."""

    calls: int  # number of calls in a forward pass
    in_tuples: bool  # whether hidden states are returned as tuples of one


@contextmanager
def undivided(model: nn.Module) -> Iterator[None]:
    """Run a model as in `evaluation_mode`, and feed-forward blocks on all positions at once, not in chunks."""
    name = "chunk_size_feed_forward"
    sizes = {module: vars(module)[name] for module in model.modules() if name in vars(module)}
    with evaluation_mode(model):
        for module in sizes:
            setattr(module, name, 0)
        try:
            yield
        finally:
            for module, size in sizes.items():
                setattr(module, name, size)


def capture(
    model: PreTrainedModel,
    layers: Sequence[str],
    batch: Batch,
    keep: Callable[[Tensor], Tensor] | None = None,
    plain: Plain | None = None,
) -> list[LayerCall]:
    """Run the model on a batch, and return the calls of its numbered layers; with `plain`, skip these layers."""
    calls: list[LayerCall] = []
    returned: list[Tensor] = []

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others, named = list(args), {key: _drop_cache(value) for key, value in kwargs.items()}
        hidden, keyword = HiddenArgument.of(args, kwargs)
        if keyword:
            named.pop(keyword)
        else:
            others.pop(0)
        follows = bool(calls) if plain else bool(returned) and hidden is returned[-1]
        reads_more = any(value is output for value in (*others, *named.values()) for output in returned)
        start = None if follows and not reads_more else hidden if keep is None else keep(hidden)
        calls.append(LayerCall(name, tuple(map(_drop_cache, others)), named, start, keyword))
        if plain and len(calls) == plain.calls:
            raise ForwardEnded

    def after(_: nn.Module, __: Any, output: Any) -> None:
        returned.append(returned_states(output))

    with ExitStack() as hooks:
        for name in layers:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            if plain:
                hooks.enter_context(_skipped(layer, plain))
            else:
                hooks.enter_context(layer.register_forward_hook(after))
        with suppress(ForwardEnded):
            run_batch(model, batch)
    return calls


@dataclass(frozen=True, eq=False)
class LayerCalls:
    """The calls of a model's numbered layers on calibration batches: those to fit to, then those held back."""

    batches: Sequence[Batch]  # keyword arguments of the model
    used: range  # numbers of the batches to fit to
    masks: Sequence[Mapping[MaskKind, AttentionMasks]]  # attention masks of each batch
    by_batch: list[list[LayerCall]]  # for each batch, the calls in order
    layers: Mapping[str, range]  # path of each layer → the numbers of its calls
    plain: Plain | None  # how layers are skipped, as for `capture`

    @property
    def held_back(self) -> range:
        """Numbers of the batches to measure errors on."""
        return range(len(self.used), len(self.batches))

    @property
    def sequences(self) -> int:
        """Number of sequences to fit to."""
        return sum(sequence_count(self.batches[number]) for number in self.used)

    def begins_stack(self, number: int) -> bool:
        """Return whether no layer reads what the call before this one returned."""
        calls = self.by_batch[0]
        return number == len(calls) or calls[number].hidden is not None

    def read_by(self, number: int) -> list[Tensor]:
        """Return, for each batch, the hidden states that the first call of a stack reads."""
        read = [calls[number].hidden for calls in self.by_batch]
        return [hidden for hidden in read if hidden is not None]

    def capture_again(
        self, model: PreTrainedModel, removed: Collection[str], store: "HiddenStateStore"
    ) -> list[list[LayerCall]]:
        """Capture the calls of another model, which lacks layers; those keep the calls of the first, never made."""
        lists = dict.fromkeys(name.rpartition(".")[0] for name in self.layers)
        layers = [f"{path}.{name}" for path in lists for name, _ in model.get_submodule(path).named_children()]
        captured = _capture_batches(model, layers, self.batches, store, self.plain)
        return [
            [call if call.name in removed else replace(next(others), name=call.name) for call in calls]
            for calls, others in zip(self.by_batch, map(iter, captured), strict=True)
        ]


def capture_calls(
    model: PreTrainedModel,
    layers: Sequence[str],
    used: Sequence[Batch],
    held_back: Sequence[Batch],
    store: "HiddenStateStore",
) -> LayerCalls:
    """Run a model on calibration batches, and return the calls of its numbered layers."""
    batches = [*used, *held_back]
    plain = plain_stack(model, layers, batches[0])
    calls = _capture_batches(model, layers, batches, store, plain)
    masks = [batch_masks(model, batch) for batch in batches]
    return LayerCalls(batches, range(len(used)), masks, calls, by_layer(calls[0]), plain)


def _capture_batches(
    model: PreTrainedModel,
    layers: Sequence[str],
    batches: Sequence[Batch],
    store: "HiddenStateStore",
    plain: Plain | None,
) -> list[list[LayerCall]]:
    calls = [capture(model, layers, batch, store.keep, plain) for batch in batches]
    if len({tuple(call.name for call in of_batch) for of_batch in calls}) > 1:
        raise CalibrationError("batches take different ways through the model; pass batches of one kind")
    return calls


@contextmanager
def _skipped(layer: nn.Module, plain: Plain) -> Iterator[None]:
    """Make a layer return the hidden states that it reads."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = HiddenArgument.of(args, kwargs).value
        return (hidden,) if plain.in_tuples else hidden

    with replaced_forward(layer, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call another function in place of a module's forward pass."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def plain_stack(model: PreTrainedModel, layers: Sequence[str], batch: Batch) -> Plain | None:
    """Return how layers can be skipped; None unless each returns hidden states alone, which the next one reads."""
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for name in layers:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(lambda _, __, output: outputs.append(output)))
        calls = capture(model, layers, batch)
    start, *others = [call.hidden for call in calls]
    if start is None or any(hidden is not None for hidden in others):
        return None
    in_tuples = isinstance(outputs[0], tuple)
    if in_tuples and all(isinstance(output, tuple) and len(output) == 1 for output in outputs):
        outputs = [output[0] for output in outputs]
    same = all(isinstance(output, Tensor) and output.shape == start.shape for output in outputs)
    return Plain(len(calls), in_tuples) if same else None


def single_layers(model: PreTrainedModel, stacks: Sequence[Stack], batch: Batch) -> SingleLayers:
    """Return the numbered layers of a model, to be called alone on the first sequences of a batch."""
    names, outputs = [name for stack in stacks for name in stack.layers], list[Tensor]()

    more: list[Sequence[Tensor]] = []  # what each call returns besides hidden states

    def record(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(returned_states(output).clone())
        more.append(_others(output))

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(record))
        calls = capture(model, names, probe_of(batch))
    by_layer(calls)
    layers: dict[str, Callable[[], Tensor]] = {}
    hidden = torch.empty(0, device="cpu")
    for number, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        hidden = hidden if call.hidden is None else call.hidden
        layers.setdefault(call.name, partial(call.run, model, hidden))
        read = [value for later in calls[number + 1 :] for value in (*later.args, *later.kwargs.values())]
        passed_on = [index for index, one in enumerate(more[number]) if any(one is value for value in read)]
        if passed_on:
            others = _others(call.output(model, hidden / 2))
            if not all(torch.equal(more[number][index], others[index]) for index in passed_on):
                raise UnsupportedModelError(
                    f"{call.name} of {type(model).__name__} passes on more than hidden states to later layers, and "
                    "that depends on hidden states too, so that layers cannot be called alone"
                )
        hidden = call.run(model, hidden)
        if hidden.shape != output.shape or bool((hidden - output).norm() > SAME_RTOL * output.norm()):
            raise UnsupportedModelError(
                f"{call.name} of {type(model).__name__} returns something else where it is called alone"
            )
    return layers


def _others(output: Any) -> list[Tensor]:
    """Return the tensors that a layer returns besides hidden states."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [value for value in values if isinstance(value, Tensor)][1:]


def by_layer(calls: Sequence[LayerCall]) -> dict[str, range]:
    """Return each layer with the numbers of its calls, one after the other if there are several (ALBERT)."""
    layers: dict[str, range] = {}
    for number, call in enumerate(calls):
        first = layers.get(call.name, range(number, number))
        if first.stop != number:
            raise UnsupportedModelError(f"{call.name} is called again after other layers")
        layers[call.name] = range(first.start, number + 1)
    return layers


def _drop_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


class HiddenStateStore:
    """Keeps up to `size` bytes of tensors in memory, the others in a folder that goes after the `with` block."""

    def __init__(self, size: int = STORE_BYTES) -> None:
        self.size, self.taken, self._files = size, 0, 0
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, on its device if it is in memory, on the CPU if it is in a file."""
        if self.taken + tensor.nbytes <= self.size and tensor.nbytes <= free_memory(tensor.device) * SHARE_OF_FREE:
            kept = tensor.clone()
            self.taken += tensor.nbytes
            finalize(kept.untyped_storage(), self._give_back, tensor.nbytes)  # which views of it hold too
            return kept
        try:
            return self._in_file(tensor)
        except OSError as error:
            raise CalibrationError(
                f"hidden states of calibration data cannot be written to temporary files ({one_line(error)}); "
                "pass fewer sequences, or set TMPDIR to a folder with more room"
            ) from error

    def _in_file(self, tensor: Tensor) -> Tensor:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="collab-compress-", ignore_cleanup_errors=True)
        self._files += 1
        path = os.path.join(self._folder.name, str(self._files))
        # Written, not only mapped: a disk that is full raises an error here, and ends the process in a mapped file.
        with open(path, "wb") as file:
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        mapped = torch.from_file(path, shared=False, size=tensor.numel(), dtype=tensor.dtype)
        with suppress(OSError):  # systems that keep a mapped file until the folder goes
            os.unlink(path)
        return mapped.view(tensor.shape)

    def _give_back(self, size: int) -> None:
        self.taken -= size
