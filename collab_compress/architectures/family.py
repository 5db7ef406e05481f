"""What a model family is: names of attributes, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AttentionFamily:
    """Where one family of Transformers models keeps the parts of its attention.

    Attribute paths are relative to the attention module; a leading `..` starts at its parent, as in relative imports.
    Adding a family is one instance of this class and one line in `collab_compress.architectures.FAMILIES`.

    Args:
        name: what people call it, for messages.
        model_types: `config.model_type` values it covers.
        attention_classes: class names of the modules that project queries and keys and call Transformers' attention
            interface.
        query: the `nn.Linear` projecting queries, D → H·d.
        key: the `nn.Linear` projecting keys, D → H·d.
        value: the `nn.Linear` projecting values, D → H·dv.
        output: the `nn.Linear` that reads all head outputs, H·dv → D.
        heads: integer attribute, number of heads H.
        head_width: integer attribute, width d of one head's keys.
        scaling: float attribute multiplying the scores (usually 1/√d).
        cross: name of the child that holds cross-attention, in the path of such a module; empty where there is none.
        fused: the `Conv1D` (D → 3·H·d, weight transposed) that holds query, key and value side by side in a stock
            model; in a converted one it has them as children, at the paths `query`, `key` and `value`. Empty where
            there are three layers to begin with.
        fixed_heads: whether the module views what its projections return as exactly H heads, instead of as many as
            there are; shared projections are then H·d wide, zeros included, and save nothing in a key cache.
        keeps_heads: why heads cannot be removed from it; empty where they can.
        undescribed: kind of attention that these paths do not fit → how it differs.
    """

    name: str
    model_types: tuple[str, ...]
    attention_classes: tuple[str, ...]
    query: str
    key: str
    value: str
    output: str
    heads: str
    head_width: str
    scaling: str = "scaling"
    cross: str = ""
    fused: str = ""
    fixed_heads: bool = False
    keeps_heads: str = ""
    undescribed: Mapping[str, str] = field(default_factory=dict)
