"""Trainers that act on heads, a bare Accelerate loop, and distributed training."""

import copy
import dataclasses

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler, default_collate
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertTokenizerFast,
    MarianMTModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from two_processes import run_both

from collab_compress import Compression, compress
from collab_compress.attention.run import head_hooks
from collab_compress.errors import CheckpointError, HeadError
from collab_compress.heads import (
    RotationOptions,
    alphas_of,
    confidence,
    merge_alphas_,
    mix_heads_,
    prune_heads_,
    rotation,
)
from collab_compress.training import (
    AlphasOptions,
    DropHeadOptions,
    HeadSession,
    HeadTrainer,
    HeadTrainerMixin,
    HeadTraining,
    PenaltyOptions,
)

EVERYTHING = HeadTraining(
    drophead=(DropHeadOptions(0.3, "scheduled"),),
    penalties=(
        PenaltyOptions("hsic", 1e-3),
        PenaltyOptions("agreement", 0.3),
        PenaltyOptions("bhattacharyya", 0.1),
        PenaltyOptions("orthogonality", 0.01),
    ),
    alphas=AlphasOptions(frozen_ratio=0.3, growth_weight=1.0, growth=0.01),
    rotation=RotationOptions("hard", (0, 1, 2, 3), k=1, swap_back_after=1, rest=0, exclude=()),
)
CONVERTED = dataclasses.replace(EVERYTHING, rotation=None)  # whose heads stay in their layers


def dataset(count=16, length=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 61, (count, length), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]


SETTINGS = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 5,
    "num_train_epochs": 3,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
}


def arguments(folder, size=4, passes=1, **more):
    """Return training arguments for batches of `size` rows and steps of some passes."""
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": passes}
    return TrainingArguments(str(folder), **{**SETTINGS, **steps, **more})


def classifier(make_tiny, family="bert", rank=None, dv=None):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(make_tiny(family).config)
    if rank is not None or dv is not None:
        compress(model, Compression(dk=rank, dv=dv), calibration=None)
    return model


def trainer_of(model, folder, training=EVERYTHING, data=None, trainer_class=HeadTrainer, loss=None, **more):
    return trainer_class(
        model,
        arguments(folder, **more),
        train_dataset=data or dataset(),
        eval_dataset=dataset(8, 7, 1),
        compute_loss_func=loss,
        head_training=training,
    )


@pytest.mark.parametrize(
    ("family", "rank", "dv"), [("bert", None, None), ("albert", 13, None), ("distilbert", 13, 12)]
)
def test_every_method_at_once(family, rank, dv, make_tiny, tmp_path):
    model = classifier(make_tiny, family, rank, dv)
    training = EVERYTHING if rank is None else CONVERTED
    trainer = trainer_of(model, tmp_path, training)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 12
    for entry in logs:
        assert {"hsic", "agreement", "bhattacharyya", "orthogonality", "drophead"} <= entry.keys()
    assert "nuclear-growth" not in logs[3]
    assert "nuclear-growth" in logs[4]  # 0.3 · 11 steps = 3.3
    assert {torch.equal(matrix, torch.eye(3)) for matrix in alphas_of(model).values()} == {False}
    assert not any("head_hooks" in vars(module) for module in model.modules())


def final_weights(trainer, **kwargs):
    trainer.train(**kwargs)
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


WITHIN = RotationOptions("hard", (0.25, 0.5, 1.25, 1.3, 2.5), swap_back_after=0.5, rest=0.25, exclude=())


def rotations(trainer):
    history = trainer.state.stateful_callbacks["HeadState"]["attributes"]["saved"]["rotation"]["history"]
    return [(event["epoch"], event["reason"]) for event in history]


TWO_PASSES = {"training": dataclasses.replace(EVERYTHING, rotation=WITHIN), "size": 2, "passes": 2}


@pytest.fixture(scope="module")
def straight(make_tiny, tmp_path_factory):
    """Return a training with a checkpoint at every step, and its final weights."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = trainer_of(classifier(make_tiny), folder, **TWO_PASSES, save_strategy="steps", save_steps=1)
    return trainer, final_weights(trainer)


@pytest.mark.parametrize("save", [3, 8])  # in the middle of an epoch, and between two
def test_rotation_within_epochs(save, straight, make_tiny, tmp_path):
    """Four steps an epoch, of two passes; resumed wherever it stopped, with a dropout that must not notice."""
    trainer, expected = straight
    swaps = [(0.25, "swap"), (0.75, "swap-back"), (1.25, "swap"), (1.75, "swap-back"), (2.5, "swap")]
    assert rotations(trainer) == swaps
    resumed = trainer_of(classifier(make_tiny), tmp_path, **TWO_PASSES)
    actual = final_weights(resumed, resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{save}")
    assert rotations(resumed) == swaps
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rank", "greater"), [(None, False), (13, True)]
)  # the best, and the worst: one is not the last
def test_the_best_checkpoint_is_loaded_with_its_alphas_and_heads(rank, greater, make_tiny, tmp_path):
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": greater}
    training = EVERYTHING if rank is None else CONVERTED
    trainer = trainer_of(classifier(make_tiny, rank=rank), tmp_path, training, learning_rate=0.02, **best)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    expected = max(losses) if greater else min(losses)
    assert trainer.state.best_metric == expected
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    loaded = AutoModelForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


def test_a_plain_loop_rotates_as_a_trainer_does(make_tiny, tmp_path):
    training = HeadTraining(rotation=RotationOptions("random", (0.5, 1.3, 2.4), k=2, swap_back_after=0.8, rest=0.1))
    model, other = classifier(make_tiny), classifier(make_tiny)
    trainer = trainer_of(model, tmp_path, training, dataset(12), learning_rate=0.0)
    trainer.train()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.0)
    with HeadSession(other.train(), training, optimizer) as session:
        for epoch in range(3):
            for number in range(3):
                session.epoch(epoch + number / 3)
                session.step((3 * epoch + number) / 8)
        events = [(event["epoch"], event["reason"]) for event in session.state_dict()["rotation"]["history"]]
    assert rotations(trainer) == events == [(2 / 3, "swap"), (4 / 3, "swap-back"), (8 / 3, "swap")]
    start = classifier(make_tiny).state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_validation_data_are_read_only_where_heads_are_swapped(make_tiny, tmp_path):
    loaders = []

    class Own(HeadTrainer):
        def get_eval_dataloader(self, eval_dataset=None):
            loaders.append(self.state.global_step)
            return super().get_eval_dataloader(eval_dataset)

    trainer_of(classifier(make_tiny), tmp_path, HeadTraining(rotation=WITHIN), trainer_class=Own).train()
    assert loaders == [1, 5, 10]


def test_rotation_on_data_without_a_length(make_tiny, tmp_path):
    """Whole epochs are passes over the data, shares are of `max_steps`, and times within epochs need a length."""

    def trained(epochs, of_training=False):
        training = HeadTraining(rotation=RotationOptions("random", epochs, of_training=of_training))
        trainer = trainer_of(classifier(make_tiny), tmp_path, training, Stream(), max_steps=12)
        trainer.train()
        return rotations(trainer)

    assert trained((0, 1, 2)) == [(epoch, "swap") for epoch in range(3)]
    assert trained((0.5,), of_training=True) == [(0.5, "swap")]
    with pytest.raises(HeadError, match="needs the length of an epoch, and the training data have none"):
        trained((0.5,))


PENALTIES = HeadTraining(
    penalties=(PenaltyOptions("agreement", 5.0), PenaltyOptions("bhattacharyya", 5.0)), loss_normalization="mean"
)
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "warmup_steps": 0}


def assert_stepped(model, before):
    """Compare a model after `ONE_STEP` with one that has its gradients and weights of before."""
    for (name, parameter), actual in zip(before.named_parameters(), model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(actual, parameter - 0.1 * parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def regression(make_tiny, set_dropout_):
    torch.manual_seed(0)
    config = make_tiny("bert").config
    config.num_labels, config.problem_type = 1, "regression"
    data = [{**row, "labels": row["labels"].float()} for row in dataset(8)]
    return set_dropout_(BertForSequenceClassification(config), 0.0), data


def translation(make_tiny, set_dropout_):
    torch.manual_seed(0)
    model = set_dropout_(MarianMTModel(make_tiny("marian").config), 0.0)
    data = [{**row, "labels": row["input_ids"].flip(0)} for row in dataset(8)]
    for row in data:
        row["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(row["labels"][None])[0]
    return model, data


@pytest.mark.parametrize(("task", "smoothing"), [(regression, 0.0), (translation, 0.0), (translation, 0.1)])
def test_the_gradient_does_not_depend_on_accumulation(task, smoothing, make_tiny, set_dropout_, tmp_path):
    weights = []
    for size, passes in ((8, 1), (2, 4)):
        model, data = task(make_tiny, set_dropout_)
        options = {**ONE_STEP, "size": size, "passes": passes, "label_smoothing_factor": smoothing}
        weights.append(final_weights(trainer_of(model, tmp_path, PENALTIES, data, **options)))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("smoothing", "passes"), [(0.0, 1), (0.1, 4)])
def test_growth_beside_a_summed_loss_is_in_the_unit_of_the_authors(
    smoothing, passes, make_tiny, set_dropout_, tmp_path
):
    """The gradient of each pass's summed loss and 40 times the growth, divided by the labels of all passes."""
    options = AlphasOptions(frozen_ratio=0.0, growth_weight=40.0, growth_beside="sum")
    model, data = translation(make_tiny, set_dropout_)
    other, _ = translation(make_tiny, set_dropout_)
    rows = data[:2] * passes
    more = {**ONE_STEP, "size": 2, "passes": passes, "label_smoothing_factor": smoothing}
    trainer_of(model, tmp_path, HeadTraining(alphas=options), rows, **more).train()
    mix_heads_(other.train())
    count = passes * sum(int((row["labels"] != -100).sum()) for row in data[:2])
    logits = other(**default_collate(data[:2])).logits
    labels = torch.stack([row["labels"] for row in data[:2]])
    task = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum")
    growth = sum(-torch.linalg.svdvals(matrix).sum() for matrix in alphas_of(other).values())
    (passes * (task + 40 * growth) / count).backward()
    assert_stepped(model, other)


@pytest.mark.parametrize(
    ("task", "loss_from"), [(regression, "labels"), (regression, "function"), (translation, "smoothed")]
)
def test_with_nothing_on_it_is_the_stock_trainer(task, loss_from, make_tiny, tmp_path):
    """Bit for bit, dropout included, in weights and logs, though the stock one adds up losses over passes."""
    actual = []
    for trainer_class in (Trainer, HeadTrainer):
        model, data = task(make_tiny, lambda model, _: model)
        trainer = trainer_class(
            model,
            arguments(tmp_path, size=2, passes=3, label_smoothing_factor=0.1 if loss_from == "smoothed" else 0.0),
            train_dataset=data,
            compute_loss_func=doubled if loss_from == "function" else None,
        )
        weights = final_weights(trainer)
        timeless = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        history = [{key: entry[key] for key in entry if key not in timeless} for entry in trainer.state.log_history]
        actual.append((weights, history))
    (weights, history), (others, other_history) = actual
    assert history == other_history
    torch.testing.assert_close(others, weights, rtol=0, atol=0)


@pytest.mark.parametrize("task", [regression, translation])
def test_a_stock_loss_adds_up_and_the_penalty_does_not(task, make_tiny, set_dropout_, tmp_path):
    """The loss of a model that ignores `num_items_in_batch` counts once for each pass, a penalty is their mean."""
    stock = HeadTraining(penalties=PENALTIES.penalties)  # the default
    model, data = task(make_tiny, set_dropout_)
    other, _ = task(make_tiny, set_dropout_)
    trainer_of(model, tmp_path, stock, data[:2] * 4, **ONE_STEP, size=2, passes=4).train()
    session = HeadSession(other.train(), stock)
    loss = other(**default_collate(data[:2])).loss
    (4 * loss + session.penalty()).backward()
    assert_stepped(model, other)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_trainer_that_says_how_its_loss_is_scaled(scaled, make_tiny, set_dropout_, tmp_path):

    class Own(HeadTrainer):
        loss_is_scaled_for_ga = scaled

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def own_loss(self, outputs, labels, num_items_in_batch=None):
            return outputs.logits.square().mean() / (self.current_gradient_accumulation_steps if scaled else 1)

    weights = []
    for passes in (1, 4):
        model, data = regression(make_tiny, set_dropout_)
        steps = {**ONE_STEP, "size": 2, "passes": passes}
        trainer = trainer_of(model, tmp_path, PENALTIES, data[:2] * passes, trainer_class=Own, **steps)
        trainer.compute_loss_func = trainer.own_loss
        weights.append(final_weights(trainer))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("loss_from", ["labels", "smoothed", "function"])
def test_the_gradient_is_that_of_loss_plus_penalty(loss_from, make_tiny, set_dropout_, tmp_path):
    """Against one step by hand; the labels keep their meaning whoever computes the loss."""
    model, data = translation(make_tiny, set_dropout_)
    other, _ = translation(make_tiny, set_dropout_)
    more = {"label_smoothing_factor": 0.1} if loss_from == "smoothed" else {}
    loss = doubled if loss_from == "function" else None
    trainer = trainer_of(model, tmp_path, PENALTIES, data, loss=loss, **ONE_STEP, size=8, **more)
    batch = default_collate(data)
    trainer.train()
    session = HeadSession(other.train(), PENALTIES)
    logits = other(batch["input_ids"], batch["attention_mask"], decoder_input_ids=batch["decoder_input_ids"]).logits
    smoothing = 0.1 if loss_from == "smoothed" else 0.0
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
    loss = 2 * loss if loss_from == "function" else loss
    (loss + session.penalty()).backward()
    assert_stepped(model, other)


def doubled(outputs, labels, num_items_in_batch=None):
    return 2 * cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def test_evaluation_has_no_penalty(make_tiny, tmp_path):
    model = classifier(make_tiny)
    plain = Trainer(model, arguments(tmp_path), eval_dataset=dataset()).evaluate()["eval_loss"]
    training = HeadTraining(penalties=(PenaltyOptions("agreement", 100.0),))
    trainer = trainer_of(model, tmp_path, training, learning_rate=0.0, eval_strategy="epoch")
    trainer.eval_dataset = dataset()
    trainer.train()
    assert [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry] == [plain] * 3


class InOrder(HeadTrainer):
    """Reads the data in order, so that one process sees in two passes what two see in one."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def trained_in_step(model, folder, size):
    """Return the weights after one step, and its logs."""
    trainer = trainer_of(model, folder, PENALTIES, dataset(8), InOrder, **ONE_STEP, size=size)
    return final_weights(trainer), trainer.state.log_history[0]


def one_of_two(rank, model, folder):
    return trained_in_step(model, folder, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_train_as_one(make_tiny, set_dropout_, tmp_path):
    """A stock trainer would add up the losses of the two."""
    model = set_dropout_(classifier(make_tiny), 0.0).train()
    weights, logs = trained_in_step(copy.deepcopy(model), tmp_path, 8)
    for both_weights, both_logs in run_both(one_of_two, model, str(tmp_path)):
        torch.testing.assert_close(both_weights, weights, atol=1e-6, rtol=1e-4)
        for name in ("task_loss", "agreement", "bhattacharyya"):
            assert both_logs[name] == pytest.approx(logs[name], rel=1e-4)


NEWER = {field.name for field in dataclasses.fields(TrainingArguments)} >= {"activation_checkpointing"}
CHECKPOINTING = "activation_checkpointing" if NEWER else "gradient_checkpointing"


@pytest.mark.parametrize("option", [CHECKPOINTING, pytest.param("torch_compile", marks=pytest.mark.slow)])
def test_checkpointing_and_compilation_change_nothing(option, make_tiny, set_dropout_, tmp_path):
    more = {"torch_compile_backend": "aot_eager"} if option == "torch_compile" else {}
    model, other = (set_dropout_(classifier(make_tiny), 0.0) for _ in range(2))
    expected = final_weights(trainer_of(model, tmp_path, max_steps=6))
    actual = final_weights(trainer_of(other, tmp_path, max_steps=6, **{option: True}, **more))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def most_hooks(model):
    return max(len(head_hooks(module)) for module in model.modules())


def test_an_interrupted_run_leaves_nothing_to_the_next(make_tiny, tmp_path):
    model = classifier(make_tiny)
    trainer = trainer_of(model, tmp_path, max_steps=4)
    acts = []

    class Interrupting(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            acts.append(most_hooks(model))
            if len(acts) == 2:
                raise KeyboardInterrupt

    trainer.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_left_alone(model)
    trainer.train()
    assert acts == [2] * 6
    assert_left_alone(model)
    trainer.close()  # once more
    merge_alphas_(model)
    prune_heads_(model, {"bert.encoder.layer.0.attention.self": [1]})


@pytest.mark.filterwarnings("ignore:.*auto_find_batch_size")
def test_a_batch_that_was_too_large_leaves_nothing_to_the_next(make_tiny, tmp_path):
    model, acts = classifier(make_tiny), set()

    class Small(HeadTrainer):
        """A device that holds two rows."""

        def training_step(self, model, inputs, *rest, **more):
            acts.add(most_hooks(model))
            if len(inputs["labels"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest, **more)

    trainer_of(model, tmp_path, CONVERTED, trainer_class=Small, max_steps=4, auto_find_batch_size=True).train()
    assert acts == {2}
    assert_left_alone(model)


def test_logging_leaves_the_dictionary_of_the_caller_alone(make_tiny, tmp_path):
    class Own(HeadTrainer):
        def training_step(self, model, *args, **more):
            loss = super().training_step(model, *args, **more)
            logs = {"loss": 1.0, "epoch": 0.0}
            self.log(logs)
            assert not any("agreement" in name for name in logs)
            return loss

    trainer = trainer_of(classifier(make_tiny), tmp_path, PENALTIES, trainer_class=Own, max_steps=1)
    trainer.train()
    assert "agreement" in trainer.state.log_history[0]


@pytest.mark.parametrize("only_model", [False, True])
def test_a_checkpoint_resumes_in_a_model_with_the_same_edits_alone(only_model, make_tiny, tmp_path):
    """The stock trainer would leave out weights whose names the model does not have."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": only_model, "max_steps": 4}
    mixing = HeadTraining(alphas=AlphasOptions())
    trainer_of(classifier(make_tiny), tmp_path / "mixed", mixing, **options).train()
    trainer_of(classifier(make_tiny, rank=13, dv=12), tmp_path / "converted", HeadTraining(), **options).train()
    mixed, converted = (str(tmp_path / name / "checkpoint-2") for name in ("mixed", "converted"))
    for folder, model, saved, present in (
        (mixed, classifier(make_tiny), "alphas of 2 modules", "none"),
        (converted, classifier(make_tiny), "collaborative of 2 modules, narrow-values of 2 modules", "none"),
        (converted, classifier(make_tiny, rank=13, dv=9), "collaborative of 2", "collaborative of 2"),
    ):
        trainer = trainer_of(model, tmp_path / "again", HeadTraining(), **options)
        with pytest.raises(CheckpointError, match=f"checkpoint-2 holds another .* {saved}.* of the model {present}"):
            trainer.train(resume_from_checkpoint=folder)
    resumed = trainer_of(classifier(make_tiny), tmp_path / "again", mixing, **options)
    resumed.train(resume_from_checkpoint=mixed)
    assert resumed.state.global_step == 4


def assert_left_alone(model):
    assert not any("head_hooks" in vars(module) or "forward" in vars(module) for module in model.modules())
    assert not any(getattr(module, "frozen", False) for module in model.modules())
    assert not any(
        hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )


def test_a_subclass_keeps_its_loss_and_may_ignore_what_it_does_not_need(make_tiny, tmp_path):
    labels = []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels.append(inputs["labels"])
            loss = model(**inputs)[0]
            return (loss, {}) if return_outputs else loss

    class OwnHeads(HeadTrainerMixin, Own):
        pass

    model = classifier(make_tiny)
    model.config.return_dict = False  # outputs are tuples
    trainer = trainer_of(model, tmp_path, PENALTIES, trainer_class=OwnHeads, max_steps=2, passes=2)
    for runs in (1, 2):
        trainer.train()
        assert "agreement" in trainer.state.log_history[0]
        assert len(labels) == 4 * runs


def test_penalties_that_are_never_added_are_an_error(make_tiny, tmp_path):
    class Own(HeadTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    model = classifier(make_tiny)
    trainer = trainer_of(model, tmp_path, PENALTIES, trainer_class=Own)
    with pytest.raises(HeadError, match=r"Own\.compute_loss adds no penalties; put HeadTrainerMixin before"):
        trainer.train()
    assert_left_alone(model)


def test_replicas_in_one_process_are_refused(make_tiny, tmp_path):
    settings = arguments(tmp_path)
    settings._n_gpu = 2
    with pytest.raises(HeadError, match="DataParallel copies the model"):
        HeadTrainer(classifier(make_tiny), settings, train_dataset=dataset(), head_training=PENALTIES)


def test_restored_callbacks_go_on_too(make_tiny, tmp_path, caplog):
    """A trainer that restores its callbacks creates them anew, and warns of unknown ones."""
    straight = trainer_of(classifier(make_tiny), tmp_path, save_strategy="steps", save_steps=4)
    expected = final_weights(straight)
    checkpoint = str(tmp_path / "checkpoint-4")
    more = {"restore_callback_states_from_checkpoint": True, "save_strategy": "steps", "save_steps": 4}
    resumed = trainer_of(classifier(make_tiny), tmp_path / "again", **more)
    actual = final_weights(resumed, resume_from_checkpoint=checkpoint)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert "Ignoring" not in caplog.text
    again = trainer_of(classifier(make_tiny), tmp_path / "third")
    actual = final_weights(again, resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-8"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_stock_checkpoint_has_no_state_of_heads(make_tiny, tmp_path, caplog):
    stock = Trainer(classifier(make_tiny), arguments(tmp_path, save_strategy="epoch"), train_dataset=dataset())
    stock.train()
    trainer = trainer_of(classifier(make_tiny), tmp_path, PENALTIES, save_strategy="epoch")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "the checkpoint has no state of head methods" in caplog.text
    assert trainer.state.global_step == 12


def test_penalties_act_in_a_trainer_of_sentence_transformers(make_tiny, tmp_path):
    """Its models call `forward` of the Transformers model, once for each text of a pair."""
    library, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    make_tiny("bert").save_pretrained(tmp_path / "model")
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    model = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")

    class PairTrainer(HeadTrainerMixin, library.SentenceTransformerTrainer):
        pass

    trainer = PairTrainer(
        model,
        library.SentenceTransformerTrainingArguments(
            str(tmp_path), max_steps=1, **{name: SETTINGS[name] for name in ("use_cpu", "report_to", "logging_steps")}
        ),
        train_dataset=datasets.Dataset.from_dict({"anchor": ["a", "b"], "positive": ["c", "d"]}),
        loss=losses.MultipleNegativesRankingLoss(model),
        head_training=HeadTraining(penalties=(PenaltyOptions("agreement", 10.0),)),
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["agreement"] > 0
    assert logs["loss"] == pytest.approx(logs["task_loss"] + 10 * logs["agreement"], rel=1e-4)
    assert "forward" not in vars(model[0].auto_model)


class Stream(torch.utils.data.IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter(dataset())


def test_the_ends_of_the_processing_class_do_not_count_for_importance(make_tiny, tmp_path, monkeypatch):
    excluded = []

    def measured(model, batches, *, exclude, **options):
        excluded.append(exclude)
        return confidence(model, batches, exclude=exclude, **options)

    monkeypatch.setattr(rotation, "confidence", measured)
    training = HeadTraining(rotation=RotationOptions("hard", (0,), importance="confidence"))
    tokenizer = BertTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "[SEP]": 3}, "[PAD]")))
    trainer = trainer_of(classifier(make_tiny), tmp_path, training, max_steps=1)
    trainer.processing_class = tokenizer
    trainer.train()
    assert excluded == [{tokenizer.sep_token_id}]


def test_validation_data_may_be_several(make_tiny, tmp_path):
    training = HeadTraining(rotation=RotationOptions("hard", (0,), exclude=()))
    trainer = trainer_of(classifier(make_tiny), tmp_path, training, max_steps=1)
    trainer.eval_dataset = {"one": dataset(4, 7, 1), "two": dataset(4, 7, 2)}
    trainer.train()
    with pytest.raises(HeadError, match="pass eval_dataset to the trainer"):
        HeadTrainer(classifier(make_tiny), arguments(tmp_path), train_dataset=dataset(), head_training=training)


def test_a_model_that_is_made_anew_has_alphas(make_tiny, tmp_path):
    trainer = HeadTrainer(
        model_init=lambda: classifier(make_tiny),
        args=arguments(tmp_path, max_steps=4),
        train_dataset=dataset(),
        head_training=HeadTraining(alphas=AlphasOptions(frozen_ratio=0.3)),
    )
    for _ in range(2):
        trainer.train()
        assert not any(torch.equal(matrix, torch.eye(3)) for matrix in alphas_of(trainer.model).values())
