"""Find the feed-forward blocks of a model by running it, and make them narrower, as the model's own config can say.

A block is a layer that reads N neurons, and one or two layers that make them, neuron by neuron: act(W₁x), or
act(Gx) ⊙ Ux if it is gated. Both are found by running the model and then checked, so that families need no
description of them.
"""

import copy
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.projections import fill_, input_dim, remaining, width_in
from collab_compress.checkpoint.edits import built_shapes, configs_inside, shapes_of
from collab_compress.conversion.layers import SAME_RTOL, SingleLayers
from collab_compress.conversion.residual import ResidualLinear, width_out
from collab_compress.errors import UnsupportedModelError
from collab_compress.heads.sharding import refuse_computed

WIDTHS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
"""Attributes of configs that may be the width of feed-forward blocks where they hold none."""
RATIOS = re.compile("ratio|expan|mult|factor")
"""Parts of the names of attributes that may be that width, over another one."""


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward block.

    Args:
        linear: the layer that reads the neurons.
        ups: path of each layer that makes them → the neuron of each of its outputs.
        width: number of neurons N.
    """

    linear: ResidualLinear
    ups: dict[str, Tensor]
    width: int

    @property
    def down(self) -> str:
        """Path of the layer that reads the neurons."""
        return self.linear.name


def find_blocks(model: PreTrainedModel, linears: Sequence[ResidualLinear], layers: SingleLayers) -> list[FeedForward]:
    """Find the feed-forward blocks whose neurons do not depend on each other, in the order of calls."""
    blocks = []
    for linear in linears:
        ups = _find_ups(model, linear, layers[linear.layer])
        if ups:
            blocks.append(FeedForward(linear, ups, width_in(model.get_submodule(linear.name))))
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no feed-forward block of plain linear layers, one neuron beside "
            "the other and each token by itself (a mixture of experts is none, nor a convolution); leave out dff"
        )
    return blocks


def _find_ups(model: PreTrainedModel, linear: ResidualLinear, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the up and gate projections: layers whose output channel j affects neuron j of the same token alone.

    A value projection is none: a channel of a head's output depends on one channel of it, but at all tokens.
    """
    down = model.get_submodule(linear.name)
    width = width_in(down)
    changed = torch.rand(width, generator=torch.Generator().manual_seed(0), device="cpu") < 0.5
    before, _ = _neurons(down, run)
    tokens = torch.arange(len(before), device="cpu") % 2 == 0  # whose neurons are changed
    ups = {}
    for name, up in model.get_submodule(linear.layer).named_modules(prefix=linear.layer):
        outputs = width_out(up)
        if outputs not in (width, 2 * width) or name == linear.name:
            continue
        places = torch.arange(outputs, device="cpu")
        for neurons in (places % width, places.div(outputs // width, rounding_mode="floor")):
            after, calls = _neurons(down, run, (up, tokens[:, None] & changed[neurons]))
            moved = (after - before).abs() > 0
            if bool(moved.any()) and not bool(moved[:, ~changed].any()) and not bool(moved[~tokens].any()):
                if calls > 1:  # other blocks may read it too
                    raise UnsupportedModelError(
                        f"{name} is called {calls} times in its layer, so that its neurons are not those of one "
                        "block; leave out dff"
                    )
                ups[name] = neurons
                break
    return ups if ups and _are_all(model, down, run, ups) else {}


def _are_all(model: PreTrainedModel, down: nn.Module, run: Callable[[], Tensor], ups: Collection[str]) -> bool:
    """Return whether neurons depend on these layers alone: if all of them return ones, all neurons must be equal."""
    inputs: list[Tensor] = []
    with ExitStack() as hooks:
        hooks.enter_context(down.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone())))
        for name in ups:
            up = model.get_submodule(name)
            hooks.enter_context(up.register_forward_hook(lambda _, __, output: torch.ones_like(output)))
        run()
    neurons = inputs[0].float().flatten(0, -2)
    return bool((neurons - neurons[:1]).norm() <= SAME_RTOL * neurons.norm())


def _neurons(
    down: nn.Module, run: Callable[[], Tensor], change: tuple[nn.Module, Tensor] | None = None
) -> tuple[Tensor, int]:
    """Return the inputs (n, N) of a layer, with some outputs of another one changed, and how often that is called.

    Outputs to change are a mask (n, M); outputs of another number of vectors stay.
    """
    inputs: list[Tensor] = []
    calls = 0

    def record(_: nn.Module, args: Any) -> None:
        inputs.append(args[0].reshape(-1, args[0].shape[-1]).clone())

    def alter(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if change is None or output.numel() != change[1].numel():
            return None
        return torch.where(change[1].to(output.device).view(output.shape), output * -1.5 + 1, output)

    up = down if change is None else change[0]
    with down.register_forward_pre_hook(record), up.register_forward_hook(alter):
        run()
    return inputs[0].float().cpu(), calls


def narrower_config(model: PreTrainedModel, blocks: Sequence[FeedForward], width: int) -> PretrainedConfig:
    """Return a copy of the dense model's config in which all feed-forward blocks have this width."""
    wanted = shapes_of(model)
    for block in blocks:
        for name, shapes in block_shapes(model, block, width).items():
            refuse_computed(name, model.get_submodule(name))
            wanted |= {f"{name}.{part}": shape for part, shape in shapes.items()}
    to_change = {name for name, shape in shapes_of(model).items() if wanted[name] != shape}
    config = copy.deepcopy(model.config)
    before = now = built_shapes(model, config)
    other = ""
    for part in configs_inside(config):
        for attribute, value in part.to_dict().items():
            for narrower in _narrower(attribute, value, {block.width for block in blocks}, width):
                with suppress(Exception):  # of another type than the config allows
                    setattr(part, attribute, narrower)
                built = built_shapes(model, config)
                changed = {name for name in now if name in built and built[name] != now[name]}  # by this attribute
                fits = changed <= to_change and all(built[name] == wanted[name] for name in changed)
                if changed and fits and len(built) == len(before):
                    now = built
                    break
                setattr(part, attribute, value)
                if changed & to_change:
                    name = min(changed - to_change, default="")
                    other = f" ({attribute} sets that of {name} too, which was found in no block)" if name else ""
    built = built_shapes(model, type(config).from_dict(config.to_dict()))  # as it is loaded
    changed = {name for name, shape in built.items() if shape != before.get(name)}
    if changed != to_change or any(built[name] != wanted[name] for name in to_change):
        absent = sorted(set(before) - set(wanted))
        cause = f" (its {absent[0]} is missing, or shared with another layer)" if absent else ""
        raise UnsupportedModelError(
            f"no attribute of {type(model.config).__name__} sets the width of all {len(blocks)} feed-forward blocks "
            f"of {type(model).__name__}, and of nothing else{cause or other}; leave out dff"
        )
    return config


def _narrower(attribute: str, value: Any, widths: Collection[int], width: int) -> list[Any]:
    """Return what an attribute of a config may become if it says how wide blocks are; empty if it cannot be."""
    if isinstance(value, bool):
        return []
    if (value is None and attribute in WIDTHS) or (isinstance(value, int) and value in widths):
        return [width]
    if isinstance(value, list) and value and all(isinstance(one, int) and one in widths for one in value):
        return [[width] * len(value)]
    is_factor = attribute in WIDTHS or RATIOS.search(attribute)
    if isinstance(value, int | float) and value > 0 and is_factor and len(widths) == 1:
        factor = value * width / next(iter(widths))
        whole = [int(factor)] if factor.is_integer() else []
        return [*whole, factor, math.nextafter(factor, math.inf)]  # that models round down
    return []


def block_shapes(model: PreTrainedModel, block: FeedForward, width: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of a block's parameters with another number of neurons: path of a layer → its shapes."""
    shapes = {}
    for name in (*block.ups, block.down):
        layer: Any = model.get_submodule(name)
        if name == block.down:
            inputs, outputs = width, width_out(layer)
        else:
            inputs, outputs = width_in(layer), len(block.ups[name]) // block.width * width
        weight: tuple[int, ...] = (inputs, outputs) if isinstance(layer, Conv1D) else (outputs, inputs)
        shapes[name] = {"weight": weight} if layer.bias is None else {"weight": weight, "bias": (outputs,)}
    return shapes


def cut_(model: PreTrainedModel, block: FeedForward, kept: Tensor) -> None:
    """Keep only some neurons of a block, ascending, in place; models that share its parameters keep theirs."""
    for name, neurons in block.ups.items():
        up: Any = model.get_submodule(name)
        outputs = torch.isin(neurons, kept.cpu()).nonzero()[:, 0].tolist()
        up.weight = remaining(up.weight, 1 - input_dim(up), outputs)
        if up.bias is not None:
            up.bias = remaining(up.bias, 0, outputs)
        setattr(up, "out_features" if input_dim(up) else "nf", len(outputs))
    down: Any = model.get_submodule(block.down)
    fill_(down, remaining(down.weight, input_dim(down), kept.tolist()), None)


def adopt_(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Set the widths of `config`, a changed copy of the model's, in the attributes of its modules, in place."""
    with torch.device("meta"):
        narrower, dense = (type(model)(copy.deepcopy(width_config)) for width_config in (config, model.config))
    modules, before = dict(model.named_modules()), dict(dense.named_modules())
    for name, module in narrower.named_modules():
        for attribute, value in vars(module).items():
            old = vars(before[name]).get(attribute)
            numbers = isinstance(value, int | float) and isinstance(old, int | float)
            if name in modules and numbers and value != old:
                setattr(modules[name], attribute, value)
