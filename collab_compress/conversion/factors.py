"""Read the factors of a converted model."""

from transformers import PreTrainedModel

from collab_compress.architectures import transformers_model
from collab_compress.attention import is_collaborative, read_parts
from collab_compress.checkpoint import edits_of
from collab_compress.factorization import Factors


def read_factors(model: PreTrainedModel) -> dict[str, Factors]:
    """Read the factors of every collaborative attention module.

    Args:
        model: a converted model.

    Returns:
        Module path → factors: query (D, R), mixing (H, R), key (D, R), content_bias (H, D) or None. The tensors
        share memory with the parameters; empty for a stock model.

    Raises:
        UnsupportedModelError: a projection carries an adapter, is quantized or offloaded.
        CheckpointError: the model was loaded before this package was imported.
    """
    model = transformers_model(model)
    edits_of(model)  # refuses a model whose modules are not this package's
    factors = {}
    for name, module in model.named_modules():
        if is_collaborative(module):
            query, mixing, key, content = read_parts(name, module)
            factors[name] = Factors(query=query, mixing=mixing, key=key, content_bias=content)
    return factors
