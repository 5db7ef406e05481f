"""What a model family is: names of attributes, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFamily:
    """Where one family of Transformers models keeps the parts of its attention.

    Attribute paths are relative to the attention module; a leading `..` starts at its parent, as in relative imports.
    Adding a family is one instance of this class and one line in `collab_compress.architectures.FAMILIES`.

    Args:
        name: what people call it, for messages.
        model_types: `config.model_type` values it covers.
        attention_class: class name of the module that projects queries and keys and calls Transformers'
            attention interface.
        query: the `nn.Linear` projecting queries, D → H·d.
        key: the `nn.Linear` projecting keys, D → H·d.
        value: the `nn.Linear` projecting values, D → H·dv.
        output: the `nn.Linear` that reads all head outputs, H·dv → D.
        heads: integer attribute, number of heads H.
        head_width: integer attribute, width d of one head's keys.
        scaling: float attribute multiplying the scores (usually 1/√d).
        cross: name of the child that holds cross-attention, in the path of such a module; empty where there is none.
    """

    name: str
    model_types: tuple[str, ...]
    attention_class: str
    query: str
    key: str
    value: str
    output: str
    heads: str
    head_width: str
    scaling: str = "scaling"
    cross: str = ""
