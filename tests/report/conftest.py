"""One tiny model with a tokenizer, looked at once."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_words import WORDS, bert_config, word_tokenizer
from transformers import BertModel, PreTrainedModel

from collab_compress.calibration import calibration_batches
from collab_compress.report import ReportOptions, ReportResult, make_report

OPTIONS = ReportOptions(dk=6, head_sequences=6, input_sequences=8, lengths=(4, 8, 500), rounds=2)


@pytest.fixture(scope="session")
def bert() -> Callable[..., PreTrainedModel]:
    def make(heads: int = 3, layers: int = 2, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = bert_config(word_tokenizer(), num_attention_heads=heads, num_hidden_layers=layers)
        model = BertModel(config).eval()
        with torch.no_grad():
            for layer in model.encoder.layer:
                layer.attention.self.query.bias.normal_(std=0.5)
        return model

    return make


@pytest.fixture(scope="session")
def model(bert) -> PreTrainedModel:
    return bert()


@pytest.fixture(scope="session")
def other(bert) -> PreTrainedModel:
    return bert(seed=1)


@pytest.fixture(scope="session")
def batches(model) -> Any:
    generator = random.Random(0)
    sentences = [" ".join(generator.choice(WORDS) for _ in range(generator.randint(2, 9))) for _ in range(20)]
    return calibration_batches(sentences, model, word_tokenizer())


@pytest.fixture(scope="session")
def result(model, other, batches) -> ReportResult:
    return make_report(
        model,
        batches,
        name="<tiny> & small",
        data="20 sentences",
        baseline=other,
        baseline_name="other",
        tokenizer=word_tokenizer(),
        sentence="the red cat runs",
        options=OPTIONS,
    )
