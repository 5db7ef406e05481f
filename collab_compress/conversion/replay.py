"""Modules of a layer that do not run again while the layer is converted.

A conversion runs a layer once for each residual linear layer that it refits, and once more to go on. What attention
gives to its output projection changes in none of these passes but the first. So the projection's inputs are kept from
that pass, and later ones leave out the module that computes them.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from collab_compress.conversion.layers import HiddenStateStore, replaced_forward


class Producer(NamedTuple):
    """A module that computes the inputs of a linear layer, and may go on to call it."""

    path: str
    holds_linear: bool  # then it returns the outputs of the linear layer, else its inputs
    length: int | None  # of the tuple that it returns, whose others are None; None if it returns a tensor


class Replay:
    """Inputs (B, T, N) of linear layers of one layer, in place of which their producers would run.

    Used as a `with` block, after which all modules run again.
    """

    batch = 0
    """Number of the batch that runs next."""

    def __init__(self, model: nn.Module, layer: str, store: HiddenStateStore) -> None:
        self._model, self._layer, self._store = model, layer, store
        self._replaced = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()

    def recorder(self, linear: str, run: Callable[[], object]) -> Callable[[Tensor], None] | None:
        """Return a function that keeps the inputs of a linear layer in the current batch; `run` calls the layer.

        None if no module of the layer only computes these inputs.
        """
        producer = find_producer(self._model, self._layer, linear, run)
        if producer is None:
            return None
        kept: dict[int, Tensor] = {}
        module, linear_layer = self._model.get_submodule(producer.path), self._model.get_submodule(linear)
        stock = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.batch not in kept:
                return stock(*args, **kwargs)
            inputs = kept[self.batch].to(next(linear_layer.parameters()).device)
            value = linear_layer(inputs) if producer.holds_linear else inputs
            return value if producer.length is None else (value, *[None] * (producer.length - 1))

        self._replaced.enter_context(replaced_forward(module, forward))

        def keep(inputs: Tensor) -> None:
            kept[self.batch] = self._store.keep(inputs)

        return keep


def find_producer(model: nn.Module, layer: str, linear: str, run: Callable[[], object]) -> Producer | None:
    """Return the module of a layer, of most parameters, that computes the inputs of a linear layer and no more.

    It returns these inputs, or holds the linear layer and returns its outputs. `run` calls the layer.
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
