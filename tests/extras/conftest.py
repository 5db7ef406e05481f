"""Converted models of every kind that differs to the outside, and batches of several shapes for them."""

from collections.abc import Callable

import pytest
import torch
from tiny_families import build
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress import Compression, compress

SHAPES = [(1, 9), (3, 9), (2, 14), (4, 30)]  # batch, length; rows of a batch end in padding
# Relative embeddings; heads in one layer with values; a position bias and no content bias; images.
OTHERS = ("deberta-v2", "gpt2", "t5", "vit")
OF_BERT = {
    "some channels": Compression(dk=13, head_dim=5),
    "narrow": Compression(dk=8, dv=12),
    "values": Compression(dv=9),
}
KINDS = ["albert", "bert", "distilbert", "marian", *OF_BERT, *OTHERS]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def converted(kind: str, make_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Return a tiny converted model in evaluation mode, without a cache."""
    torch.manual_seed(0)
    model = build(kind) if kind in OTHERS else make_tiny("bert" if kind in OF_BERT else kind)
    compress(model, OF_BERT.get(kind, Compression(dk=8)), calibration=None)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # T5's decoder has a config of its own
            part.config.use_cache = False
    return model.eval()


@pytest.fixture
def batches(kind: str, make_batch: Callable[..., dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return batches of different shapes; any but the first can be used for the export."""
    if kind == "vit":
        return [{"pixel_values": torch.randn(batch, 3, 8, 8)} for batch, _ in SHAPES]
    family = "marian" if kind in ("marian", "t5") else "bert"
    return [make_batch(family, seed=seed, batch=b, length=t) for seed, (b, t) in enumerate(SHAPES)]


@pytest.fixture
def dynamic() -> Callable[..., dict[str, dict[int, object]]]:
    def dynamic(batch: dict[str, Tensor]) -> dict[str, dict[int, object]]:
        """Return dynamic shapes in which the batch size and the length of every sequence may vary."""
        free = torch.export.Dim.DYNAMIC  # up to what the model allows; a named `Dim` must be told that maximum
        return {name: {0: free, 1: free} if tensor.ndim == 2 else {0: free} for name, tensor in batch.items()}

    return dynamic
