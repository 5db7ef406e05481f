"""The names that examples in docstrings find: `model`, a tiny BERT; `batch`, two padded rows of tokens; `torch`."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded: threads that wait leave cores to others

import pytest
import torch
from transformers import BertConfig, BertModel


@pytest.fixture(autouse=True)
def _names_in_examples(request: pytest.FixtureRequest) -> None:
    """Put them, new for each docstring, into the namespace of its example."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_hidden_layers": 2}
    model = BertModel(BertConfig(vocab_size=61, max_position_embeddings=40, initializer_range=0.4, **sizes)).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": torch.randint(5, 61, (2, 6)), "attention_mask": mask}
    request.getfixturevalue("doctest_namespace").update(torch=torch, model=model, batch=batch)
