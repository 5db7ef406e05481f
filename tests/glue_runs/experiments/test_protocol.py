"""The protocol end to end on a tiny task: stages, what is done once, and what survives being killed."""

import json
from unittest.mock import Mock

import pytest
import torch
from collab_compress_glue_runs.experiments import read_recipe, run
from collab_compress_glue_runs.experiments import tuning as tuning_module
from collab_compress_glue_runs.experiments.by_length import group_by_length
from collab_compress_glue_runs.tasks import load_task
from datasets import Dataset
from safetensors.torch import load_file
from tiny_recipes import mrpc, trained
from transformers import BertConfig, Trainer, TrainerCallback, TrainingArguments

from collab_compress.errors import RecipeError
from collab_compress.training import HeadTrainer
from collab_compress.training.checkpoints import whole_checkpoints

TUNING = "{epochs: 4, learning_rate: 1.0e-3, batch_size: 8, arguments: {use_cpu: true, disable_tqdm: true}}"


def settings(start, data_dir, output, *more):
    stages = (f"tuning={TUNING}", "compression.dk=12", "calibration=none", f"again={TUNING}")
    return mrpc(start, data_dir, output, "trackers=[tensorboard]", *stages, *more)


def test_stages(start, data_dir, tmp_path):
    heads = "heads.drophead=[{p: 0.2}]"
    recipe = read_recipe(overrides=settings(start, data_dir, tmp_path / "out", heads))
    records = run(recipe)
    assert [record["stage"] for record in records] == ["tuned", "dk12", "dk12-again"]
    for record in records:
        values = record["metrics"]["validation"]
        assert record["score"] == pytest.approx(50 * (values["accuracy"] + values["f1"]))
        assert record["recipe"]["heads"]["drophead"][0]["p"] == 0.2
        assert record["environment"]["torch"] == torch.__version__
    model, _ = trained(tmp_path / "out" / "dk12-again")
    assert model.bert.encoder.layer[0].attention.self.qk.mixing.shape == (3, 7)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert run(recipe) == records  # read from the records; nothing runs again
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    wider = settings(start, data_dir, tmp_path / "out", heads, "again=null", "compression.dk=24")
    tuned, exact = run(read_recipe(overrides=wider))
    assert (tuned, exact["stage"], exact["metrics"]) == (records[0], "dk24", tuned["metrics"])
    made = tmp_path / "out" / "tuned" / "model" / "model.safetensors"
    assert made.stat().st_mtime_ns == before[made]
    (data_dir / "MRPC" / "train.tsv").unlink()  # what evaluates needs none
    record = evaluated(tmp_path / "out" / "dk24" / "model", data_dir, tmp_path / "scores")
    assert (record["stage"], record["metrics"]) == ("given", tuned["metrics"])
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"given"}


@pytest.mark.parametrize(
    ("named", "stage"), [("conversion=null", "tuned-again"), ("conversion=dense", "dense-again")]
)
def test_the_dense_model_can_be_tuned_again(start, data_dir, tmp_path, named, stage):
    """It ends as the tuned model that is given to a first fine-tuning of the same settings."""
    recipe = read_recipe(overrides=settings(start, data_dir, tmp_path / "out", "compression=null", named))
    tuned, again = run(recipe)
    stages = [(record["stage"], record["conversion"], record["again"]) for record in (tuned, again)]
    assert stages == [("tuned", None, False), (stage, None, True)]
    model = tmp_path / "out" / "tuned" / "model"
    once = read_recipe(overrides=settings(model, data_dir, tmp_path / "once", "compression=null", "again=null"))
    [expected] = run(once)
    assert again["metrics"] == expected["metrics"]
    assert same_weights(tmp_path / "out" / stage, tmp_path / "once/tuned")
    assert not same_weights(tmp_path / "out" / stage, tmp_path / "out/tuned")


def test_a_conversion_is_distilled_without_labels(start, data_dir, tmp_path):
    towards = TUNING.replace("epochs: 4, learning_rate: 1.0e-3", "epochs: 40, learning_rate: 4.0e-3, distilled: true")
    output = tmp_path / "out"
    recipe = read_recipe(overrides=settings(start, data_dir, output, "compression.dk=3", f"again={towards}"))
    run(recipe)
    models = [trained(output / stage)[0] for stage in ("tuned", "dk3", "dk3-again")]
    _, tokenizer = trained(output / "tuned")
    sentences = load_task("mrpc", data_dir, splits=["train"])["train"]["text"]
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
    with torch.no_grad():
        dense, converted, distilled = (model(**batch).logits for model in models)
    assert (distilled - dense).norm() < 0.7 * (converted - dense).norm()  # labels lead to six times as much


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([f"tuning={TUNING.replace('epochs', 'distilled: true, epochs')}"], "give compression, and set it in again"),
        (["compression=null"], "give compression, and set it in again"),
        (["heads.drophead=[{p: 0.2}]"], r"again\.distilled trains without what acts on heads"),
        (["again.arguments={label_smoothing_factor: 0.1}"], "without labels; leave label_smoothing_factor out"),
    ],
)
def test_distillation_is_refused_where_it_has_no_teacher(more, message, start, data_dir, tmp_path):
    towards = f"again={TUNING.replace('epochs', 'distilled: true, epochs')}"
    with pytest.raises(RecipeError, match=message):
        read_recipe(overrides=settings(start, data_dir, tmp_path / "out", towards, *more))


def same_weights(*folders):
    """Return whether the models of two stages are the same."""
    one, other = (load_file(folder / "model/model.safetensors") for folder in folders)
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def evaluated(model, data_dir, output, *more):
    """Return the record of a finished model that is only evaluated."""
    (record,) = run(read_recipe(overrides=mrpc(model, data_dir, output, *more)))
    return record


def test_a_score_is_not_that_of_another_model_or_other_data(start, data_dir, tmp_path):
    run(read_recipe(overrides=settings(start, data_dir, tmp_path / "out", "compression=null", "again=null")))
    model = tmp_path / "out" / "tuned" / "model"
    record = evaluated(model, data_dir, tmp_path / "scores")
    assert evaluated(model, data_dir, tmp_path / "scores", "progress=false") == record
    for changed, *setting in (("data_dir", model, tmp_path), ("model", start, data_dir)):
        with pytest.raises(RecipeError, match=f"given was made with another {changed}; choose another output"):
            evaluated(*setting, tmp_path / "scores")
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        RecipeError, match=r"model has no tokenizer; save it there too, by tokenizer\.save_pretrained"
    ):
        evaluated(model, data_dir, tmp_path / "more")
    with pytest.raises(RecipeError, match="heads acts in fine-tuning, and there is none"):
        evaluated(model, data_dir, tmp_path / "more", "heads.drophead=[{p: 0.2}]")


def test_flex_attention_with_dropout_is_refused_before_the_work(start, data_dir, tmp_path):
    config = BertConfig.from_pretrained(start)
    config.attention_probs_dropout_prob = 0.1
    config.save_pretrained(start)
    recipe = read_recipe(
        overrides=settings(start, data_dir, tmp_path / "out", "again=null", "attn_implementation=flex_attention")
    )
    with pytest.raises(RecipeError, match="'flex_attention', which has no dropout in training, and attention_probs"):
        run(recipe)


def test_scores_have_no_label_smoothing(start, tmp_path):
    folder = tmp_path / "STS-B"
    folder.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("sentence1\tsentence2\tscore\nred cat\tblue cat\t2.5\ncat\tdog\t1.0\n")
    recipe = settings(start, tmp_path, tmp_path / "out", "task=stsb", "tuning.arguments.label_smoothing_factor=0.1")
    with pytest.raises(RecipeError, match="stsb has scores, not classes; leave label_smoothing_factor out"):
        run(read_recipe(overrides=recipe))


def test_a_checkpoint_that_was_being_written_does_not_count(tmp_path):
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text('{"global_step": 1}')
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]
    (tmp_path / "checkpoint-10/trainer_state.json").write_text('{"global_')
    (tmp_path / "checkpoint-30").mkdir()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["checkpoint-2"]


@pytest.mark.parametrize("vectors", [False, True], ids=["avx2", "avx512"])
def test_emulated_bfloat16_is_told(start, data_dir, tmp_path, caplog, set_bfloat16, vectors):
    set_bfloat16(vectors)
    arguments = ("again=null", "compression=null", "tuning.max_steps=1", "tuning.arguments.bf16=true")
    run(read_recipe(overrides=settings(start, data_dir, tmp_path / "out", *arguments)))
    assert ("this CPU only emulates bfloat16" in caplog.text) != vectors


def test_what_is_evaluated_keeps_its_order(tmp_path):
    """Translations during training are scored against the references of the same rows."""
    options = {"per_device_eval_batch_size": 1, "train_sampling_strategy": "group_by_length"}
    arguments = TrainingArguments(tmp_path, use_cpu=True, remove_unused_columns=False, **options)
    rows = Dataset.from_dict({"input_ids": [[row] * (1 + row % 3) for row in range(12)]})
    trainer = group_by_length(Trainer)(torch.nn.Linear(1, 1), arguments, data_collator=lambda batch: batch[0])
    assert [batch["input_ids"][0] for batch in trainer.get_eval_dataloader(rows)] == list(range(12))


def test_an_interrupted_run_ends_as_an_uninterrupted_one(start, data_dir, tmp_path, monkeypatch):
    """Interrupted after its last step, before the model is saved, or in between; rows grouped by length."""
    steps = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 3}
    arguments = {"use_cpu": True, "disable_tqdm": True, **steps}
    tuning = {"epochs": 3, "learning_rate": 1e-3, "batch_size": 8, "arguments": arguments}

    def attempt(output, *more):
        overrides = settings(start, data_dir, tmp_path / output, f"tuning={json.dumps(tuning)}", "again=null", *more)
        return run(read_recipe(overrides=[*overrides, "compression=null"]))

    attempt("whole")
    for moment in ("saving", "training"):
        with monkeypatch.context() as patch:
            if moment == "saving":
                patch.setattr(tuning_module, "atomic_directory", Mock(side_effect=KeyboardInterrupt))
            else:
                patch.setattr(Stopping, "limit", 7)
                patch.setattr(HeadTrainer, "train", Stopping.train)
            with pytest.raises(KeyboardInterrupt):
                attempt(moment)
        attempt(moment)
        assert same_weights(tmp_path / "whole/tuned", tmp_path / moment / "tuned"), moment


def test_a_run_that_was_interrupted_after_its_last_checkpoint_keeps_the_best(start, data_dir, tmp_path, monkeypatch):
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    arguments = {"use_cpu": True, "disable_tqdm": True, **best, "greater_is_better": True}  # the first
    tuning = json.dumps({"epochs": 3, "learning_rate": 1e-3, "batch_size": 8, "arguments": arguments})

    def attempt(output):
        overrides = settings(start, data_dir, tmp_path / output, f"tuning={tuning}", "again=null", "compression=null")
        run(read_recipe(overrides=overrides))

    attempt("straight")
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "limit", 12)
        patch.setattr(HeadTrainer, "train", Stopping.train)
        with pytest.raises(KeyboardInterrupt):
            attempt("stopped")
    state = json.loads((tmp_path / "stopped/tuned/checkpoints/checkpoint-12/trainer_state.json").read_text())
    assert state["best_global_step"] < 12
    attempt("stopped")
    assert same_weights(tmp_path / "straight/tuned", tmp_path / "stopped/tuned")
    log = json.loads((tmp_path / "stopped/tuned/log.json").read_text())
    assert log["history"] == state["log_history"]


class Stopping(TrainerCallback):
    """Interrupts a training."""

    limit = 0

    @staticmethod
    def train(trainer, original=HeadTrainer.train, **options):
        trainer.add_callback(Stopping)
        return original(trainer, **options)

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.limit:
            raise KeyboardInterrupt

    def on_save(self, args, state, control, **_):
        if state.global_step == self.limit == state.max_steps:
            raise KeyboardInterrupt
