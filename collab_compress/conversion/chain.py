"""Run the numbered layers of a model one at a time, on hidden states that are kept between them.

One pass through the whole model captures what each layer is called with. A layer can then be called alone, on any
hidden states, with its other arguments as they were. Most layers read what the layer before them returned, so a stack
of them is a chain; where it begins (the embeddings, or a decoder behind its encoder) the model itself has to run.
`Room` keeps hidden states in memory or in files.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, TypeAlias
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.devices import free_memory
from collab_compress.errors import CalibrationError, UnsupportedModelError, one_line

ROOM = 2 * 2**30  # bytes of memory for hidden states
SHARE_OF_FREE = 0.25  # of a GPU's free memory, the most that one tensor may take; layers need the rest
PROBED = 2  # sequences that show how a model is built
SAME = 1e-4  # relative error of a layer that is called alone, which is rounding

SingleLayers: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Path of each numbered layer → a function that calls it alone, as its model does first on some batch."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a numbered layer in a forward pass.

    Args:
        name: path of the layer.
        args: positional arguments but the hidden states; without a cache.
        kwargs: keyword arguments but the hidden states; without a cache.
        hidden: hidden states (B, T, D) that it read; None if the call before it returned them.
        keyword: name of the argument of hidden states; empty if they are the first positional one.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden: Tensor | None
    keyword: str

    def run(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Call the layer of `model` on hidden states (B, T, D), and return those that it returns."""
        layer, hidden = model.get_submodule(self.name), hidden.to(model.device)
        if self.keyword:
            return _hidden_states(layer(*self.args, **{self.keyword: hidden}, **self.kwargs))
        return _hidden_states(layer(hidden, *self.args, **self.kwargs))


class Plain(NamedTuple):
    """Layers that pass on hidden states alone.

    Args:
        calls: number of calls in a forward pass.
        in_tuples: whether hidden states are returned as tuples of one.
    """

    calls: int
    in_tuples: bool


def layer_of(path: str) -> str:
    """Return the path of the numbered layer that holds the module at `path`; empty if none does."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def numbered_layers(model: PreTrainedModel) -> list[str]:
    """Return the paths of the numbered layers beside and among those with attention, in the model's order."""
    lists = {layer_of(site.name).rpartition(".")[0] for site in find_attention(model)} - {""}
    return [
        f"{path}.{name}"
        for path in dict.fromkeys(name for name, _ in model.named_modules() if name in lists)
        for name, _ in model.get_submodule(path).named_children()
    ]


@contextmanager
def undivided(model: nn.Module) -> Iterator[None]:
    """Run a model as in `evaluation_mode`, and each feed-forward block on all positions at once.

    With `chunk_size_feed_forward` a block is called for some positions at a time, which gives the same outputs.
    """
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
    """Run the model on a batch, in evaluation mode, and return the calls of its numbered layers in order.

    Args:
        model: as for `find_attention`; while layers are skipped, nothing else may run it.
        layers: of the model, as `numbered_layers` returns them.
        batch: keyword arguments for it.
        keep: copies hidden states to where they are kept.
        plain: how layers are skipped (`plain_stack`), so that nothing is computed behind the embeddings; None to run
            them.
    """
    calls: list[LayerCall] = []
    returned: list[Tensor] = []

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others, named = list(args), {key: _without_cache(value) for key, value in kwargs.items()}
        keyword = "" if args else "hidden_states" if "hidden_states" in named else next(iter(named))
        hidden = named.pop(keyword) if keyword else others.pop(0)
        follows = bool(calls) if plain else bool(returned) and hidden is returned[-1]
        reads_more = any(value is output for value in (*others, *named.values()) for output in returned)
        start = None if follows and not reads_more else hidden if keep is None else keep(hidden)
        calls.append(LayerCall(name, tuple(map(_without_cache, others)), named, start, keyword))
        if plain and len(calls) == plain.calls:
            raise _AllCaptured

    def after(_: nn.Module, __: Any, output: Any) -> None:
        returned.append(_hidden_states(output))

    with ExitStack() as hooks:
        for name in layers:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            if plain:
                hooks.enter_context(_skipped(layer, plain))
            else:
                hooks.enter_context(layer.register_forward_hook(after))
        with suppress(_AllCaptured):
            run_batch(model, batch)
    return calls


class _AllCaptured(Exception):
    """Raised in a model when all calls of its layers are captured."""


@contextmanager
def _skipped(layer: nn.Module, plain: Plain) -> Iterator[None]:
    """Make a layer return the hidden states that it reads."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
        return (hidden,) if plain.in_tuples else hidden

    own = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own


def plain_stack(model: PreTrainedModel, layers: Sequence[str], batch: Batch) -> Plain | None:
    """Return how the layers of a model can be skipped, or None if they cannot.

    They can if each returns hidden states alone, which the next one reads: what other arguments it gets then does not
    depend on the layers before it.
    """
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


def single_layers(model: PreTrainedModel, batch: Batch) -> SingleLayers:
    """Return the numbered layers of a model, to be called alone on the first sequences of a batch.

    Args:
        model: in evaluation mode.
        batch: keyword arguments for the model.

    Raises:
        UnsupportedModelError: a layer returns something else where it is called alone, or is called again after
            others.
        CalibrationError: the model does not take such batches.
    """
    if sequence_count(batch) > PROBED and is_divisible(batch):
        batch = slice_batch(batch, slice(PROBED))
    names, outputs = numbered_layers(model), list[Tensor]()

    def record(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(_hidden_states(output).clone())

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(record))
        calls = capture(model, names, batch)
    by_layer(calls)
    layers: dict[str, Callable[[], Tensor]] = {}
    hidden = torch.empty(0, device="cpu")
    for call, output in zip(calls, outputs, strict=True):
        hidden = hidden if call.hidden is None else call.hidden
        layers.setdefault(call.name, partial(call.run, model, hidden))
        hidden = call.run(model, hidden)
        if hidden.shape != output.shape or bool((hidden - output).norm() > SAME * output.norm()):
            raise UnsupportedModelError(
                f"{call.name} of {type(model).__name__} returns something else where it is called alone"
            )
    return layers


def by_layer(calls: Sequence[LayerCall]) -> dict[str, range]:
    """Return each layer with the numbers of its calls, several in turn where it serves as several (ALBERT).

    Raises:
        UnsupportedModelError: a layer is called again after others.
    """
    layers: dict[str, range] = {}
    for number, call in enumerate(calls):
        first = layers.get(call.name, range(number, number))
        if first.stop != number:
            raise UnsupportedModelError(f"{call.name} is called again after other layers")
        layers[call.name] = range(first.start, number + 1)
    return layers


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def _hidden_states(output: Any) -> Tensor:
    """Return the hidden states that a layer returns, alone or first."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output


class Room:
    """Room for tensors: `size` bytes of memory, and a temporary folder for those beyond it.

    Used as a context manager, which deletes the folder.
    """

    def __init__(self, size: int = ROOM) -> None:
        self.size, self.taken, self._files = size, 0, 0
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, on its device if it is in memory, on the CPU if it is in a file.

        Raises:
            CalibrationError: it cannot be written.
        """
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
