"""Twenty steps with a penalty of a tenth of the loss move what is penalised, against a plain run of the same seed."""

import pytest
import torch
from transformers import BertForSequenceClassification, TrainingArguments

from collab_compress.heads import alphas_of
from collab_compress.losses import nuclear_norm
from collab_compress.training import AlphasOptions, HeadTrainer, HeadTraining, PenaltyOptions
from collab_compress.training.penalties import LOSSES, HeadLosses

SHARE, LOSS = 0.1, 0.7


def rows():
    ids = torch.randint(5, 61, (32, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]


def batch():
    return {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "attention_mask")}


@torch.no_grad()
def measure(model, loss):
    with HeadLosses(model.eval(), {loss: (loss, LOSSES[loss].kinds)}, training=False) as losses:
        model(**batch())
        return float(losses.values()[loss])


def trained(make_tiny, folder, training):
    torch.manual_seed(0)
    model = BertForSequenceClassification(make_tiny("bert").config)
    arguments = TrainingArguments(
        str(folder),
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        seed=0,
    )
    HeadTrainer(model, arguments, train_dataset=rows(), head_training=training).train()
    return model


@pytest.fixture(scope="module")
def plain(make_tiny, tmp_path_factory):
    return trained(make_tiny, tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize(
    "loss", ["hsic", "orthogonality", "agreement", "agreement-values", "agreement-probs", "bhattacharyya"]
)
def test_a_penalty_lowers_what_it_penalises(loss, plain, make_tiny, tmp_path):
    torch.manual_seed(0)
    start = abs(measure(BertForSequenceClassification(make_tiny("bert").config), loss))
    unpenalised = measure(plain, loss)
    penalty = PenaltyOptions(loss, SHARE * LOSS / start)
    penalised = measure(trained(make_tiny, tmp_path, HeadTraining(penalties=(penalty,))), loss)
    assert penalised < unpenalised - 0.001 * abs(unpenalised)


def test_nuclear_growth_grows_the_norms(make_tiny, tmp_path):
    norms = []
    for weight in (0.0, SHARE * LOSS / (2 * 1e-3)):
        options = AlphasOptions(frozen_ratio=0.1, growth_weight=weight, growth=1e-3)
        model = trained(make_tiny, tmp_path, HeadTraining(alphas=options))
        norms.append(sum(float(nuclear_norm(matrix.detach())) for matrix in alphas_of(model).values()))
    assert norms[1] > norms[0]
    assert norms[1] > 6 + 1e-3
