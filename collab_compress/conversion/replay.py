"""Modules of a layer that do not run again while the layer is converted.

A conversion runs a layer once for each residual linear layer that it refits, and once more to go on. The inputs of
attention's output projection are the same in all of these passes. So they are kept from the first, and later passes
leave out the module that computes them, if the layer gives the same without it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from collab_compress.conversion.layers import HiddenStateStore, replaced_forward


class Producer(NamedTuple):
    """A module that computes the inputs of a linear layer, and may go on to call it."""

    path: str
    holds_linear: bool  # then it returns the outputs of the linear layer, else its inputs
    length: int | None  # of the tuple that it returns, whose other items are None; None if it returns a tensor


class Replay:
    """Inputs (B, T, N) of linear layers of one layer, in place of which their producers would run.

    Used as a `with` block, after which all modules run again.
    """

    def __init__(self, model: nn.Module, layer: str, store: HiddenStateStore) -> None:
        self._model, self._layer, self._store = model, layer, store
        self._batch: int | None = None  # the batch that runs; None where everything runs
        self._replaced = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()

    @contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """Leave out what is kept for a batch, which the layer is called on inside the `with` block."""
        self._batch = number
        try:
            yield
        finally:
            self._batch = None

    def keep(self, linear: str, inputs: Mapping[int, Tensor], run: Callable[[int], Tensor]) -> None:
        """Leave out what computes the inputs of a linear layer, which are given for each batch.

        `run` calls the layer on a batch. It has to give the same for the first and the last one: with hooks, changes
        in place or side effects a module may do more than compute these inputs.
        """
        numbers = min(inputs), max(inputs)
        producer = find_producer(self._model, self._layer, linear, partial(run, numbers[0]))
        if producer is None:
            return
        module, expected = self._model.get_submodule(producer.path), [run(number) for number in numbers]
        with ExitStack() as replaced:
            replaced.enter_context(replaced_forward(module, self._forward(module.forward, linear, producer, inputs)))
            found = []
            for number in numbers:
                with self.batch(number):
                    found.append(run(number))
            if all(map(torch.equal, found, expected)):
                self._replaced.enter_context(replaced.pop_all())

    def _forward(
        self, stock: Callable[..., Any], linear: str, producer: Producer, inputs: Mapping[int, Tensor]
    ) -> Callable[..., Any]:
        layer = self._model.get_submodule(linear)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._batch is None:
                return stock(*args, **kwargs)
            kept = inputs[self._batch].to(next(layer.parameters()).device)
            value = layer(kept) if producer.holds_linear else kept
            return value if producer.length is None else (value, *[None] * (producer.length - 1))

        return forward


def find_producer(model: nn.Module, layer: str, linear: str, run: Callable[[], object]) -> Producer | None:
    """Return the module of a layer, of most parameters, that returns the inputs of a linear layer as they are.

    Or it holds the linear layer and returns its outputs as they are. `run` calls the layer.
    """
    returned: list[tuple[str, Any]] = []
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def on_linear(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    def on_module(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if bool(outputs) == linear.startswith(f"{name}."):  # not what only follows the linear layer, as a dropout
            returned.append((name, output))

    with ExitStack() as hooks:
        hooks.enter_context(model.get_submodule(linear).register_forward_hook(on_linear))
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if name not in (layer, linear) and any(True for _ in module.parameters()):
                hooks.enter_context(module.register_forward_hook(partial(on_module, name)))
        run()
    found: list[Producer] = []
    for name, output in returned if len(outputs) == 1 else []:
        value, *others = output if type(output) is tuple else (output,)
        holds_linear = linear.startswith(f"{name}.")
        if value is (outputs if holds_linear else inputs)[0] and not any(other is not None for other in others):
            found.append(Producer(name, holds_linear, len(output) if type(output) is tuple else None))

    def size(producer: Producer) -> int:
        return sum(parameter.numel() for parameter in model.get_submodule(producer.path).parameters())

    return max(found, key=size, default=None)
