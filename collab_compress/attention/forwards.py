"""Forward passes for attention modules whose stock one computes its scores itself.

While such a module is edited, its class is a subclass of the stock one, of the same name, with the forward pass here.
It does what modules on Transformers' attention interface do: project, lay out as key groups, write to the cache,
attend by `collab_sdpa`, or `collab_eager` where probabilities are needed, and project the outputs. It returns what
the stock forward pass returns. A further family is a row of `FORWARDS`, and a subclass of `Forward` if its arguments
need more than names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers import EncoderDecoderCache

from collab_compress.attention.projections import Layout, QKVProjection
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS

Call = dict[str, Any]
"""Arguments of one forward pass, by the names that the stock class gives them."""


@dataclass(frozen=True)
class Forward:
    """How a class of attention modules attends while it is edited.

    Args:
        layers: attributes of the query, key and value projections, or of a fused layer.
        output: attribute of the output projection; empty if another module projects the outputs.
        scaling: returns the factor of the scores; None if the module has it as `scaling`.
        p: attribute path of the dropout probability.
        hidden_states: argument: the tokens.
        encoder_states: argument: tokens of an encoder to attend to instead, or None.
        cache: argument: the key-value cache.
        layer_index: attribute: index of the layer in the cache.
        interleaved: whether the fused layer holds each head's queries, keys and values together.
        needs_probs: whether the module always returns probabilities.
        may_omit_probs: whether it returns no None in their place.
    """

    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "out_proj"
    scaling: Callable[[Any], float] | None = None
    p: str = "dropout"
    hidden_states: str = "hidden_states"
    encoder_states: str = "key_value_states"
    cache: str = "past_key_values"
    layer_index: str = "layer_idx"
    interleaved: bool = False
    needs_probs: bool = False
    may_omit_probs: bool = False

    def inputs(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the query, key and value projections."""
        states = call.get(self.encoder_states)
        states = call[self.hidden_states] if states is None else states
        return call[self.hidden_states], states, states

    def mask(self, call: Call) -> Tensor | None:
        """Return the attention mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None."""
        return call.get("attention_mask")

    def bias(self, module: Any, call: Call, keys: int) -> Tensor | None:
        """Return a bias to add to the scores of this many keys, broadcastable to (B, H, T, S), or None."""
        return call.get("position_bias")

    def result(self, module: Any, call: Call, outputs: Tensor, probs: Tensor | None) -> tuple[Any, ...]:
        """Return what the stock forward pass returns."""
        return (outputs,) if self.may_omit_probs and probs is None else (outputs, probs)

    def project(self, module: Any, call: Call) -> list[Tensor]:
        """Return queries, keys and values with those that the cache holds, as key groups (B, n, S, d)."""
        width = module.head_dim if hasattr(module, "head_dim") else module.attention_head_size
        past, index = call.get(self.cache), getattr(module, self.layer_index, None)
        layers, inputs = [getattr(module, name) for name in self.layers], self.inputs(call)
        if isinstance(past, EncoderDecoderCache):
            is_cross = call.get(self.encoder_states) is not None
            is_updated = is_cross and past.is_updated.get(index)
            if is_cross:  # the encoder's keys and values are kept from the first call on
                past.is_updated[index] = True
            past = past.cross_attention_cache if is_cross else past.self_attention_cache
            if is_updated:
                layer = past.layers[index]
                return [_key_groups(layers[0](inputs[0]), width), layer.keys, layer.values]
        if len(layers) == 3:
            projected = [layer(part) for layer, part in zip(layers, inputs, strict=True)]
        elif isinstance(layers[0], QKVProjection):
            projected = [part(inputs[0]) for part in layers[0].parts]
        else:
            fused = layers[0](inputs[0])  # (B, T, 3·H·d)
            projected = Layout(fused.shape[-1] // (3 * width), width, self.interleaved).split(fused, -1)
        query, key, value = (_key_groups(part, width) for part in projected)
        if past is not None:
            key, value = past.update(key, value, index)
        return [query, key, value]


def _root_of_width(module: Any) -> float:
    width = module.head_dim if hasattr(module, "head_dim") else module.attention_head_size
    return float(width**-0.5)


@dataclass(frozen=True)
class BertForward(Forward):
    """Attention of encoders and decoders like BERT's, whose outputs another module projects."""

    layers: tuple[str, ...] = ("query", "key", "value")
    output: str = ""
    scaling: Callable[[Any], float] | None = _root_of_width
    p: str = "dropout.p"
    encoder_states: str = "encoder_hidden_states"


class TapasForward(BertForward):
    """A decoder also returns its cache."""

    def result(self, module: Any, call: Call, outputs: Tensor, probs: Tensor | None) -> tuple[Any, ...]:
        """Return outputs, probabilities if asked for, and the cache of a decoder."""
        results = super().result(module, call, outputs, probs)
        return (*results, call.get(self.cache)) if module.is_decoder else results


class BlipTextForward(BertForward):
    """The encoder's hidden states have their own mask."""

    def mask(self, call: Call) -> Tensor | None:
        """Return the mask of the tokens that are attended to."""
        return call.get("attention_mask" if call.get(self.encoder_states) is None else "encoder_attention_mask")


class BloomForward(Forward):
    """Biases linear in the key's position (ALiBi), (B·H, 1, S), and a residual."""

    def bias(self, module: Any, call: Call, keys: int) -> Tensor | None:
        """Return the ALiBi bias (B, H, 1, S)."""
        alibi: Tensor = call["alibi"].unflatten(0, (-1, module.num_heads))
        return alibi

    def result(self, module: Any, call: Call, outputs: Tensor, probs: Tensor | None) -> tuple[Any, ...]:
        """Return the sum of outputs and residual, and the probabilities."""
        return call["residual"] + dropout(outputs, module.hidden_dropout, module.training), probs


class MptForward(Forward):
    """ALiBi biases (H, 1, longest length), whose last columns belong to the keys.

    In the attention mask, True means hidden.
    """

    def mask(self, call: Call) -> Tensor | None:
        """Return the mask, True = attend."""
        mask = call.get("attention_mask")
        return None if mask is None else mask.logical_not()

    def bias(self, module: Any, call: Call, keys: int) -> Tensor | None:
        """Return the ALiBi bias (1, H, 1, S)."""
        bias: Tensor | None = call.get("position_bias")
        return None if bias is None else bias[None, :, :, -keys:].to(call["hidden_states"].dtype)


class TableTransformerForward(Forward):
    """Positions are added to the inputs of queries and keys, not of values.

    In a boolean attention mask, True means hidden.
    """

    def inputs(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs with positions for queries and keys, and without for values."""
        tokens, positions = call["hidden_states"], call.get("object_queries")
        placed = tokens if positions is None else tokens + positions
        states, positions = call.get("key_value_states"), call.get("spatial_position_embeddings")
        if states is None:
            return placed, placed, tokens
        return placed, states if positions is None else states + positions, states

    def mask(self, call: Call) -> Tensor | None:
        """Return the mask, True = attend."""
        mask: Tensor | None = call.get("attention_mask")
        return mask.logical_not() if mask is not None and mask.dtype == torch.bool else mask


class MvpForward(Forward):
    """Prompts, which are keys and values of dense heads, are refused."""

    def inputs(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the projections.

        Raises:
            UnsupportedModelError: there are prompts.
        """
        if call.get("attn_prompt") is not None:
            raise UnsupportedModelError(
                "edited MvpAttention cannot read prompts (use_prompt=True), which are keys and values of dense "
                "heads; use the model without them"
            )
        return super().inputs(call)


class XlmForward(Forward):
    """The mask is (B, S) or (B, T, S)."""

    def mask(self, call: Call) -> Tensor | None:
        """Return the mask (B, 1, 1, S) or (B, 1, T, S), True = attend."""
        mask: Tensor = call["mask"] != 0
        return mask[:, None] if mask.dim() == 3 else mask[:, None, None]


def _key_groups(projected: Tensor, head_width: int) -> Tensor:
    """Lay projected tokens (B, T, n·d) out as key groups of the head width, (B, n, T, d)."""
    groups: Tensor = projected.unflatten(-1, (-1, head_width))
    return groups.transpose(1, 2)


FORWARDS: dict[str, Forward] = {
    "BlipAttention": Forward(("qkv",), "projection", attrgetter("scale"), "dropout.p"),
    "BlipTextSelfAttention": BlipTextForward(needs_probs=True),
    "BloomAttention": BloomForward(
        ("query_key_value",),
        "dense",
        attrgetter("inv_norm_factor"),
        "attention_dropout.p",
        cache="layer_past",
        interleaved=True,
    ),
    "MegatronBertSelfAttention": BertForward(),
    "MPNetSelfAttention": Forward(("q", "k", "v"), "o", _root_of_width, "dropout.p", may_omit_probs=True),
    "MptAttention": MptForward(("Wqkv",), scaling=attrgetter("softmax_scale"), p="attn_dropout_p", needs_probs=True),
    "MultiHeadAttention": XlmForward(  # of XLM and FlauBERT
        ("q_lin", "k_lin", "v_lin"),
        "out_lin",
        _root_of_width,
        hidden_states="input",
        encoder_states="kv",
        cache="cache",
        layer_index="layer_id",
        may_omit_probs=True,
    ),
    "MvpAttention": MvpForward(),
    "RemBertSelfAttention": BertForward(),
    "TableTransformerAttention": TableTransformerForward(),
    "TapasSelfAttention": TapasForward(may_omit_probs=True),
    "TrOCRAttention": Forward(),
    "VisualBertSelfAttention": BertForward(may_omit_probs=True),
    "XGLMAttention": Forward(),
}
"""Name of the stock class → its forward pass."""


def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Attend as the stock forward pass of the module, by this package's attention functions."""
    row: Forward = FORWARDS[module.stock_class.__name__]
    call = {**dict(zip(module.argument_names, args, strict=False)), **kwargs}
    query, key, value = row.project(module, call)
    needs_probs = row.needs_probs or bool(call.get("output_attentions"))
    outputs, probs = ALL_ATTENTION_FUNCTIONS["collab_eager" if needs_probs else "collab_sdpa"](
        module,
        query,
        key,
        value,
        row.mask(call),
        dropout=attrgetter(row.p)(module) if module.training else 0.0,
        scaling=module.scaling,
        is_causal=False,
        position_bias=row.bias(module, call, key.shape[2]),
    )
    outputs = outputs.flatten(2)
    if row.output:
        outputs = getattr(module, row.output)(outputs)
    return row.result(module, call, outputs, probs)


def has_own_forward(module: Any) -> bool:
    """Return whether the stock forward pass of a module computes scores itself."""
    return type(module).__name__ in FORWARDS


def take_over_(module: Any) -> None:
    """Replace the forward pass of a module that computes scores itself, in place, if that is not done yet."""
    stock: Any = type(module)
    if not hasattr(stock, "stock_class"):
        row = FORWARDS[stock.__name__]
        _change_class_(module, edited_class(stock))
        if row.scaling is not None:
            module.scaling = float(row.scaling(module))


def hand_back_(module: Any) -> None:
    """Undo `take_over_`, in place."""
    stock = getattr(type(module), "stock_class", None)
    if stock is not None:
        _change_class_(module, stock)
        if FORWARDS[stock.__name__].scaling is not None:
            del module.scaling


def _change_class_(module: Any, new: Any) -> None:
    """Change the class of a module in place, also under Accelerate's wrapper of its forward pass."""
    module.__class__ = new
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(new.forward, module)


@cache
def edited_class(stock: Any) -> Any:
    """Return a subclass of a stock class, of the same name, with our forward pass."""
    attributes = {
        "forward": forward,
        "argument_names": tuple(inspect.signature(stock.forward).parameters)[1:],
        "stock_class": stock,
        "__reduce_ex__": _reduce,
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), attributes)


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy by the stock class, because no file defines the subclass."""
    _, _, *rest = tuple(object.__reduce_ex__(module, protocol))
    return _blank, (module.stock_class,), *rest


def _blank(stock: Any) -> Any:
    """Return an edited module without attributes, which a pickle or copy then fills."""
    kind = edited_class(stock)
    return kind.__new__(kind)
