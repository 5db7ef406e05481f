"""One tiny model with a tokenizer, looked at once."""

import random
from collections.abc import Callable

import pytest
import torch
from tiny_words import WORDS, bert_config, word_tokenizer
from transformers import BertModel, PreTrainedModel

from collab_compress.calibration import calibration_batches
from collab_compress.report import Findings, Look, Study, look_at

LOOK = Look(dk=6, head_sequences=6, input_sequences=8, kernel_tokens=30, lengths=(4, 8, 500), rounds=2)


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
def study(bert, tokenizer, sentences) -> Study:
    model, other = bert(), bert(seed=1)
    batches = calibration_batches(sentences, model, tokenizer)
    return Study(
        model, batches, "<tiny> & small", "20 sentences", other, "other", tokenizer, "the red cat runs", look=LOOK
    )


@pytest.fixture(scope="session")
def findings(study) -> Findings:
    return look_at(study)
