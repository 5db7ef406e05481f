"""What a model family is: names of attributes, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFamily:
    """Where one family of Transformers models keeps the parts of its attention.

    Every field but the first two is an attribute path relative to the attention module. Adding a family is one
    instance of this class and one line in `collab_compress.architectures.FAMILIES`.

    Args:
        name: what people call it, for messages.
        model_types: `config.model_type` values it covers.
        attention_class: class name of the module that projects queries and keys and calls Transformers'
            attention interface.
        query: the `nn.Linear` projecting queries, D → H·d.
        key: the `nn.Linear` projecting keys, D → H·d.
        heads: integer attribute, number of heads H.
        head_width: integer attribute, width d of one head's keys.
        scaling: float attribute multiplying the scores (usually 1/√d).
    """

    name: str
    model_types: tuple[str, ...]
    attention_class: str
    query: str
    key: str
    heads: str
    head_width: str
    scaling: str = "scaling"
