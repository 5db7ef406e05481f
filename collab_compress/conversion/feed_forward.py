"""Feed-forward blocks of a live model: found by trying, made narrower as the model's own config can say.

A block is a layer that reads N neurons, and one or two layers that make them, neuron by neuron: act(W₁x), or
act(Gx) ⊙ Ux where it is gated. Both are found by running the model, and what they are taken for is checked, so that a
family needs no description of them.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.form import remaining
from collab_compress.attention.projections import width_in
from collab_compress.attention.values import fill_, output_dim
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.conversion.report import FeedForwardReport
from collab_compress.conversion.writers import Writer, find_writers, first_rows, width_out
from collab_compress.errors import UnsupportedModelError

WIDTHS = (
    "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim",
    "ffn_hidden_size", "intermediate_dim", "mlp_dim", "ffn_size", "dim_feedforward",
)  # fmt: skip
"""Attributes of configs that may be the width of feed-forward blocks; which of them is, a model of it says."""


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward block.

    Args:
        writer: the layer that reads the neurons.
        ups: paths of the layers that make them → for each of a layer's outputs, which neuron it is for.
        width: number of neurons N.
    """

    writer: Writer
    ups: dict[str, Tensor]
    width: int

    @property
    def down(self) -> str:
        """Path of the layer that reads the neurons."""
        return self.writer.name


def find_feed_forward(model: PreTrainedModel, batch: Batch) -> list[FeedForward]:
    """Find the feed-forward blocks of a model whose neurons can be told apart, in the order in which they are called.

    Args:
        model: stock or edited; left in the mode it was in.
        batch: keyword arguments for the model, of which two sequences are run.

    Raises:
        UnsupportedModelError: the model has no such block, or its family is not known.
        CalibrationError: the model does not take such batches.
    """
    batch = first_rows(batch)
    blocks = []
    with evaluation_mode(model):
        writers = find_writers(model, batch)
        outputs = {writer.site.path(writer.site.family.output) for writer in writers}
        for writer in writers:
            if writer.name not in outputs and writer.name.removesuffix(".proj") not in outputs:  # of heads, or mixed
                ups = _ups(model, writer.name, batch)
                if ups:
                    blocks.append(FeedForward(writer, ups, width_in(model.get_submodule(writer.name))))
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no feed-forward block of plain linear layers, one neuron beside the other "
            "(a mixture of experts is none); leave out dff"
        )
    return blocks


def _ups(model: PreTrainedModel, down: str, batch: Batch) -> dict[str, Tensor]:
    """Find the layers each of whose outputs one neuron of `down` depends on, and no other one does."""
    layer = model.get_submodule(down)
    width = width_in(layer)
    near = down.split(".")[:2]
    candidates = [
        name
        for name, module in model.named_modules()
        if width_out(module) in (width, 2 * width) and name != down and name.split(".")[: len(near)] == near
    ]
    before = _neurons(model, layer, batch)
    found = {}
    for name in candidates:
        up = model.get_submodule(name)
        outputs = width_out(up)
        places = torch.arange(outputs)
        for neurons in (places % width, places.div(outputs // width, rounding_mode="floor")):
            chosen = _drawn(width)  # the outputs for these neurons are changed
            with _changed(up, chosen[neurons]):
                moved = (_neurons(model, layer, batch) - before).abs().amax(0) > 0
            if bool(moved.any()) and not bool(moved[~chosen].any()):
                found[name] = neurons
                break
    return found


def _drawn(width: int) -> Tensor:
    """Draw half of the neurons, always the same."""
    return torch.rand(width, generator=torch.Generator().manual_seed(0), device="cpu") < 0.5


def _neurons(model: PreTrainedModel, layer: nn.Module, batch: Batch) -> Tensor:
    """Return what a layer reads in its first call, (n, N)."""
    seen: list[Tensor] = []

    def note(_: nn.Module, args: Any) -> None:
        if not seen:
            seen.append(args[0].reshape(-1, args[0].shape[-1]).clone())

    handle = layer.register_forward_pre_hook(note)
    try:
        run_batch(model, batch)
    finally:
        handle.remove()
    return seen[0].float().cpu()


@contextmanager
def _changed(layer: nn.Module, places: Tensor) -> Iterator[None]:
    """Change some outputs of a layer's first call."""
    calls: list[None] = []

    def change(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        calls.append(None)
        if len(calls) > 1:
            return None
        return torch.where(places.to(output.device), output * -1.5 + 1, output)

    handle = layer.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def narrower_config(model: PreTrainedModel, blocks: Sequence[FeedForward], width: int) -> PretrainedConfig:
    """Return a copy of the dense model's config in which all feed-forward blocks have this width.

    Raises:
        UnsupportedModelError: no attribute of the config sets the width of all blocks, and of nothing else.
    """
    wanted = dict(_shapes(model))
    for block in blocks:
        for name in (*block.ups, block.down):
            layer = model.get_submodule(name)
            narrower = _cut_shapes(layer, None if name == block.down else block.ups[name], block.width, width)
            wanted.update((f"{name}.{part}", shape) for part, shape in narrower.items())
    changing = {name for name, shape in _shapes(model) if wanted[name] != shape}
    config = copy.deepcopy(model.config)
    before = _built(model, config)
    for part in _parts(config):
        for attribute in WIDTHS:
            value = getattr(part, attribute, None)
            if attribute in part.to_dict() and value in (None, *(block.width for block in blocks)):
                setattr(part, attribute, width)
                built = _built(model, config)
                changed = {name for name in before if name in built and built[name] != before[name]}
                if not changed or not changed <= changing or len(built) != len(before):
                    setattr(part, attribute, value)
    built = _built(model, config)
    changed = {name for name, shape in built.items() if shape != before.get(name)}
    if changed != changing or any(built[name] != wanted[name] for name in changing):
        raise UnsupportedModelError(
            f"no attribute of {type(model.config).__name__} sets the width of all {len(blocks)} feed-forward blocks "
            f"of {type(model).__name__}, and of nothing else; leave out dff"
        )
    return config


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a config and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def _built(model: PreTrainedModel, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a stock model of this config; none where there can be none."""
    try:
        with torch.device("meta"):
            return dict(_shapes(type(model)(copy.deepcopy(config))))
    except (ValueError, TypeError, RuntimeError):
        return {}


def _cut_shapes(layer: Any, neurons: Tensor | None, width: int, narrower: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's parameters in a narrower block: it reads neurons, or makes `neurons`."""
    inputs = width_in(layer) if neurons is not None else narrower
    outputs = width_out(layer) if neurons is None else len(neurons) // width * narrower
    weight = (inputs, outputs) if isinstance(layer, Conv1D) else (outputs, inputs)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": (outputs,)}


def block_report(model: PreTrainedModel, block: FeedForward, width: int, length: int) -> FeedForwardReport:
    """Return the costs of a dense block and of what it becomes.

    Args:
        model: dense.
        block: one of its feed-forward blocks.
        width: neurons that are to stay.
        length: tokens T for which multiply-accumulates are counted.
    """
    parameters, macs = [0, 0], [0, 0]
    for name in (*block.ups, block.down):
        for place, to in enumerate((block.width, width)):
            shapes = _cut_shapes(model.get_submodule(name), block.ups.get(name), block.width, to)
            parameters[place] += sum(prod(shape) for shape in shapes.values())
            macs[place] += length * prod(shapes["weight"])
    return FeedForwardReport(
        name=block.down,
        dff=width,
        parameters_before=parameters[0],
        parameters_after=parameters[1],
        macs_before=macs[0],
        macs_after=macs[1],
    )


def cut_(model: PreTrainedModel, block: FeedForward, kept: Tensor) -> None:
    """Leave these neurons in a block, in place; parameters are replaced, so that those of others stay.

    Args:
        model: the model.
        block: one of its feed-forward blocks.
        kept: neurons to keep, in ascending order.
    """
    for name, neurons in block.ups.items():
        rows = torch.isin(neurons, kept.cpu()).nonzero()[:, 0].tolist()
        _cut_outputs_(model.get_submodule(name), rows)
    down: Any = model.get_submodule(block.down)
    fill_(down, remaining(down.weight, output_dim(down), kept.tolist()), None)


def _cut_outputs_(layer: Any, rows: list[int]) -> None:
    layer.weight = remaining(layer.weight, 1 - output_dim(layer), rows)
    if layer.bias is not None:
        layer.bias = remaining(layer.bias, 0, rows)
    setattr(layer, "out_features" if output_dim(layer) else "nf", len(rows))


def adopt_(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Set the widths of `config` in the model's own, and in the numbers that its modules keep of them, in place."""
    with torch.device("meta"):
        stock, dense = (type(model)(copy.deepcopy(each)) for each in (config, model.config))
    own, before = dict(model.named_modules()), dict(dense.named_modules())
    for name, module in stock.named_modules():
        for attribute, value in vars(module).items():
            was = vars(before[name]).get(attribute)
            if name in own and isinstance(value, int) and isinstance(was, int) and value != was:
                setattr(own[name], attribute, value)
    for part, narrower in list(zip(_parts(model.config), _parts(config), strict=True)):
        for held in _held_by(model, part):
            for attribute in WIDTHS:
                if attribute in part.to_dict():
                    setattr(held, attribute, getattr(narrower, attribute))


def _held_by(model: PreTrainedModel, part: PretrainedConfig) -> list[PretrainedConfig]:
    """Return a config and its copies that models inside hold."""
    inside = [getattr(module, "config", None) for module in model.modules()]
    copies = {id(each): each for each in inside if type(each) is type(part)}
    return list({id(part): part, **copies}.values())
