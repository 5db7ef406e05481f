"""Scores of a finished stage, where its training is logged."""

import pytest
import torch
from collab_compress_glue_runs.experiments import Recipe
from collab_compress_glue_runs.experiments.tuning import log_scores
from transformers import Trainer, TrainingArguments

METRICS = {"validation": {"f1": 0.5}, "validation_matched": {"accuracy": 0.25}, "test": {"bleu": 30.0}}


@pytest.fixture
def make_trainer(tmp_path):
    def make(*trackers):
        arguments = TrainingArguments(str(tmp_path / "out"), report_to=list(trackers) or "none", use_cpu=True)
        return Trainer(torch.nn.Linear(1, 1), arguments)

    return make


@pytest.fixture
def recipe(tmp_path):
    return Recipe(task="mrpc", output=tmp_path, method="hsic", seed=3, model="minilm")


def test_scores_stand_beside_the_training(make_trainer, recipe, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer("tensorboard")
    log_scores(trainer, recipe, tmp_path / "dk8-again", METRICS)
    assert trainer.args.run_name == "mrpc-hsic-seed3-dk8-again"
    logs = reader.EventAccumulator(str(tmp_path / "dk8-again" / "logs")).Reload()
    scalars = {name: logs.Scalars(name)[0].value for name in logs.Tags()["scalars"]}
    assert scalars == {"eval/f1": 0.5, "eval/matched_accuracy": 0.25, "test/bleu": 30.0}
