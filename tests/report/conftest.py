"""One tiny model with a tokenizer, looked at once."""

import random
from collections.abc import Callable

import pytest
import torch
from tiny_words import WORDS, bert_config, word_tokenizer
from transformers import BertModel, PreTrainedModel

from collab_compress.calibration import calibration_batches
from collab_compress.report import ReportContext, ReportOptions, ReportResult, make_report

OPTIONS = ReportOptions(dk=6, head_sequences=6, input_sequences=8, kernel_tokens=30, lengths=(4, 8, 500), rounds=2)


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="session")
def bert(tokenizer) -> Callable[..., PreTrainedModel]:
    def make(heads: int = 3, layers: int = 2, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = BertModel(bert_config(tokenizer, num_attention_heads=heads, num_hidden_layers=layers)).eval()
        with torch.no_grad():
            for layer in model.encoder.layer:
                layer.attention.self.query.bias.normal_(std=0.5)
        return model

    return make


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choice(WORDS) for _ in range(generator.randint(2, 9))) for _ in range(20)]


@pytest.fixture(scope="session")
def context(bert, tokenizer, sentences) -> ReportContext:
    model, other = bert(), bert(seed=1)
    batches = calibration_batches(sentences, model, tokenizer)
    return ReportContext(
        model,
        batches,
        "<tiny> & small",
        "20 sentences",
        other,
        "other",
        tokenizer,
        "the red cat runs",
        options=OPTIONS,
    )


@pytest.fixture(scope="session")
def result(context) -> ReportResult:
    return make_report(context)
