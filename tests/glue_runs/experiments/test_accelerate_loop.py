"""The example of a bare loop: alone, in two processes, and against the Trainer."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from collab_compress_glue_runs.experiments import read_recipe
from collab_compress_glue_runs.tasks import encode_classification, load_task
from safetensors.torch import load_file
from tiny_recipes import mrpc
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)

from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.heads import alphas_of
from collab_compress.training import HeadSession, HeadTrainer

SCRIPT = Path(__file__).parents[3] / "glue_runs" / "accelerate_loop.py"
PENALTY = "heads.penalties=[{name: agreement, weight: 0.3}]"
ALPHAS = "heads.alphas={frozen_ratio: 0.3, growth_weight: 1.0, growth: 0.01}"
DROPHEAD = "heads.drophead=[{p: 0.3, schedule: scheduled}]"
ROTATION = "heads.rotation={strategy: hard, epochs: [0, 1], exclude: []}"


def settings(start, data_dir, output, *more):
    tuning = "tuning={epochs: 3, learning_rate: 1.0e-3, batch_size: 8}"
    return mrpc(start, data_dir, output, tuning, *more)


@pytest.fixture
def train():
    """Run the script in this process."""
    spec = importlib.util.spec_from_file_location("accelerate_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield lambda arguments: module.train(read_recipe(overrides=arguments))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights(folder):
    """Return the trained weights without key biases, whose gradients are rounding errors: attention ignores them."""
    tensors = load_file(folder / "model.safetensors")
    return {name: weight for name, weight in tensors.items() if not name.endswith("key.bias")}


def assert_same(one, other, **tolerances):
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, **tolerances, msg=lambda text, name=name: f"{name}: {text}")


def test_two_processes_train_as_one(python, start, data_dir, tmp_path):
    """Passes of eight rows are the same: four in each of two processes, or eight in one."""
    outputs = []
    for processes, launch, size in ((1, python, 8), (2, python.both, 4)):
        passes = "tuning.arguments={gradient_accumulation_steps: 2}"
        more = (PENALTY, ALPHAS, ROTATION, f"tuning.batch_size={size}", passes)
        overrides = settings(start, data_dir, tmp_path / str(processes), *more)
        done = launch(SCRIPT, *overrides)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
        outputs.append(done.stdout)
        assert done.stderr.count(" 0/6 ") == 1  # one bar
    assert outputs[0] == outputs[1]
    assert [line.partition(":")[0] for line in outputs[0].splitlines()] == [
        f"epoch {n}, validation" for n in (1, 2, 3)
    ]
    assert_same(weights(tmp_path / "1"), weights(tmp_path / "2"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("size", "accumulated"), [(8, 1), (2, 15)])
def test_it_trains_as_a_trainer_that_averages(size, accumulated, train, start, data_dir, tmp_path, monkeypatch):
    """With sixteen batches of two an epoch, a step of fifteen passes is followed by one of one."""
    begin = HeadSession.step

    def seeded(session, progress):
        begin(session, progress)
        torch.manual_seed(int(1e6 * progress))  # so that both drop the same heads

    monkeypatch.setattr(HeadSession, "step", seeded)
    arguments = f"tuning.arguments={{gradient_accumulation_steps: {accumulated}}}"
    heads = (DROPHEAD, PENALTY, ALPHAS, ROTATION)
    overrides = settings(start, data_dir, tmp_path / "loop", *heads, arguments, f"tuning.batch_size={size}")
    train(overrides)
    recipe = read_recipe(overrides=overrides)
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(start)
    rows = encode_classification(load_task("mrpc", data_dir), tokenizer, max_length=24)
    trainer = HeadTrainer(
        model,
        TrainingArguments(
            str(tmp_path / "trainer"),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            optim="adamw_torch",
            learning_rate=1e-3,
            per_device_train_batch_size=size,
            num_train_epochs=3,
            gradient_accumulation_steps=accumulated,
            warmup_steps=0.1,
            seed=0,
            data_seed=0,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        head_training=replace(recipe.heads, loss_normalization="mean"),
    )
    trainer.train()
    model.save_pretrained(tmp_path / "trainer")
    assert_same(weights(tmp_path / "loop"), weights(tmp_path / "trainer"), atol=1e-6, rtol=1e-5)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "loop")
    assert [torch.equal(matrix, torch.eye(3)) for matrix in alphas_of(loaded).values()] == [False] * 2


def test_what_is_logged(python, start, data_dir, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    more = (PENALTY, DROPHEAD, "trackers=[tensorboard]", "tuning.arguments={mixed_precision: bf16}")
    overrides = settings(start, data_dir, tmp_path / "out", *more)
    done = python(SCRIPT, *overrides)
    assert done.returncode == 0, done.stderr[-9000:]
    logs = reader.EventAccumulator(str(tmp_path / "out" / "collab_compress")).Reload()
    steps = {name: [event.step for event in logs.Scalars(name)] for name in logs.Tags()["scalars"]}
    assert steps.items() >= {"loss": [10], "agreement": [10], "validation/f1": [4, 8, 12]}.items()


@pytest.mark.parametrize("more", ["task=stsb", "compression.dk=12", "tuning=null"])
def test_what_is_refused(more, train, start, data_dir, tmp_path):
    overrides = settings(start, data_dir, tmp_path / "out", "trackers=[tensorboard]", more)
    with pytest.raises(RecipeError, match="this loop fine-tunes a given model on a classification task"):
        train(overrides)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("revision=v1", "start is a local model without revisions"),
        ("tuning.arguments={bf16: true}", "tuning.arguments: .*'bf16'; give arguments of the Accelerator"),
    ],
)
def test_settings_that_do_not_fit(more, message, train, start, data_dir, tmp_path):
    with pytest.raises(CollabCompressError, match=message):
        train(settings(start, data_dir, tmp_path / "out", more))


def test_mistakes_are_one_line(python, start, data_dir, tmp_path):
    done = python(SCRIPT, *settings(start, data_dir, tmp_path / "out", "trackers=[mlflow]"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("accelerate_loop: no tracker 'mlflow' here; install its package")
    assert len(done.stderr.splitlines()) == 1
