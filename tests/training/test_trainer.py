"""Joining a stock `Trainer`, a bare Accelerate loop, and distributed training."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    MarianMTModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from collab_compress import Compression, compress
from collab_compress.errors import HeadError
from collab_compress.heads import Rotation, alphas_of
from collab_compress.training import (
    AlphasOptions,
    DropHeadOptions,
    HeadSession,
    HeadTraining,
    Penalty,
    join_trainer_,
)

EVERYTHING = HeadTraining(
    drophead=(DropHeadOptions(0.3, "scheduled"),),
    penalties=(Penalty("hsic", 1e-3), Penalty("disagreement", 0.3), Penalty("bhattacharyya", 0.1),
               Penalty("orthogonality", 0.01)),
    alphas=AlphasOptions(frozen=0.3, growth_weight=1.0, growth=0.01),
    rotation=Rotation("in-layer", (0, 1, 2, 3), k=1, swap_back_after=1, rest=0, exclude=()),
)  # fmt: skip


def dataset(count=16, length=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 61, (count, length), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]


def arguments(folder, **more):
    given = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 5,
        "per_device_train_batch_size": 4, "num_train_epochs": 3, "learning_rate": 1e-3, "warmup_steps": 2,
        "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**{**given, **more})


def classifier(make_tiny, family="bert", rank=None):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(make_tiny(family).config)
    if rank is not None:
        compress(model, Compression(rank=rank), calibration=None)
    return model


def joined(model, folder, training=EVERYTHING, data=None, **more):
    given = arguments(folder, **more)
    trainer = Trainer(model, given, train_dataset=data or dataset(), eval_dataset=dataset(8, 7, 1))
    join_trainer_(trainer, training)
    return trainer


@pytest.mark.parametrize("rank", [None, 13])
@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_every_method_at_once(family, rank, make_tiny, tmp_path):
    model = classifier(make_tiny, family, rank)
    trainer = joined(model, tmp_path)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 12
    for entry in logs:
        assert {"hsic", "disagreement", "bhattacharyya", "orthogonality", "drophead/0"} <= entry.keys()
    assert "nuclear-growth" not in logs[3]
    assert "nuclear-growth" in logs[4]  # 0.3 · 11 steps = 3.3
    assert {torch.equal(matrix, torch.eye(3)) for matrix in alphas_of(model).values()} == {False}
    assert not any("head_acts" in vars(module) for module in model.modules())


def final_weights(trainer, **kwargs):
    trainer.train(**kwargs)
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("step", [6, 8])  # in the middle of an epoch, and between two
def test_a_resumed_run_equals_a_straight_one(step, make_tiny, tmp_path):
    straight = joined(classifier(make_tiny), tmp_path, save_strategy="steps", save_steps=step)
    expected = final_weights(straight)
    resumed = joined(classifier(make_tiny), tmp_path, save_strategy="no")
    found = final_weights(resumed, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
    history = state["stateful_callbacks"]["collab_compress_heads"]["rotation"]["history"]
    assert [event["reason"] for event in history] == ["swap", "swap-back", "swap"][: len(history)]
    assert len(history) >= 2


PENALTIES = HeadTraining(penalties=(Penalty("disagreement", 5.0), Penalty("bhattacharyya", 5.0)))
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "warmup_steps": 0}


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", [regression, translation])
def test_the_gradient_does_not_depend_on_accumulation(task, smoothing, make_tiny, set_dropout_, tmp_path):
    if task is regression and smoothing:
        pytest.skip("labels of a regression cannot be smoothed")
    weights = []
    for size, passes in ((8, 1), (2, 4)):
        model, data = task(make_tiny, set_dropout_)
        trainer = joined(
            model, tmp_path, PENALTIES, data, **ONE_STEP, per_device_train_batch_size=size,
            gradient_accumulation_steps=passes, label_smoothing_factor=smoothing,
        )  # fmt: skip
        weights.append(final_weights(trainer))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("own", ["labels", "smoothed", "function"])
def test_the_gradient_is_that_of_loss_plus_penalty(own, make_tiny, set_dropout_, tmp_path):
    """Against one step by hand; the labels keep their meaning whoever computes the loss."""
    model, data = translation(make_tiny, set_dropout_)
    other, _ = translation(make_tiny, set_dropout_)
    more = {"label_smoothing_factor": 0.1} if own == "smoothed" else {}
    trainer = Trainer(
        model, arguments(tmp_path, **ONE_STEP, per_device_train_batch_size=8, **more), train_dataset=data,
        compute_loss_func=doubled if own == "function" else None,
    )  # fmt: skip
    given = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    join_trainer_(trainer, PENALTIES)
    trainer.train()
    session = HeadSession(other.train(), PENALTIES)
    logits = other(given["input_ids"], given["attention_mask"], decoder_input_ids=given["decoder_input_ids"]).logits
    smoothing = 0.1 if own == "smoothed" else 0.0
    loss = cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), label_smoothing=smoothing)
    loss = 2 * loss if own == "function" else loss
    (loss + session.penalty()).backward()
    for (name, parameter), found in zip(other.named_parameters(), model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(found, parameter - 0.1 * parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def doubled(outputs, labels, num_items_in_batch=None):
    return 2 * cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def test_evaluation_has_no_penalty(make_tiny, tmp_path):
    model = classifier(make_tiny)
    plain = Trainer(model, arguments(tmp_path), eval_dataset=dataset()).evaluate()["eval_loss"]
    trainer = joined(model, tmp_path, HeadTraining(penalties=(Penalty("disagreement", 100.0),)), learning_rate=0.0,
                     eval_strategy="epoch")  # fmt: skip
    trainer.eval_dataset = dataset()
    trainer.train()
    assert [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry] == [plain] * 3


def test_a_subclass_keeps_its_ways(make_tiny, tmp_path):
    seen = []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(inputs["labels"])
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = Own(classifier(make_tiny), arguments(tmp_path, max_steps=2), train_dataset=dataset())
    join_trainer_(trainer, PENALTIES)
    trainer.train()
    assert isinstance(trainer, Own)
    assert type(trainer).__name__ == "Own"
    assert len(seen) == 2
    trainer.train()  # again
    assert len(seen) == 4


def test_checkpoints_reload(make_tiny, tmp_path):
    """Alphas and all, through stock `from_pretrained`."""
    model = classifier(make_tiny, rank=13)
    trainer = joined(model, tmp_path, save_strategy="epoch")
    trainer.train()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-12")
    batch = {"input_ids": dataset()[0]["input_ids"][None]}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def test_a_bare_accelerate_loop(make_tiny):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from collab_compress.heads import mix_heads_

    accelerator = Accelerator(cpu=True)
    model = classifier(make_tiny)
    mix_heads_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, prepared, data = accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=4))
    session = HeadSession(accelerator.unwrap_model(wrapped), EVERYTHING, prepared, warmup=0.1)
    done, steps = 0, 3 * len(data)
    for epoch in range(3):
        session.epoch(epoch, DataLoader(dataset(8, 7, 1), batch_size=4))
        for batch in data:
            session.step(done / (steps - 1))
            loss = wrapped(**batch).loss
            accelerator.backward(loss + session.penalty(loss))
            prepared.step()
            prepared.zero_grad()
            done += 1
    assert session.logs()["disagreement"] < 1
    assert {torch.equal(matrix, torch.eye(3)) for matrix in alphas_of(model).values()} == {False}
    session.close()


def undropped(config):
    """The config of a BERT without dropout, for models that are built in another process."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return config


def train_in_process(rank: int, processes: int, folder: str) -> None:
    """One of several processes, each with its part of the batch; the first writes the gradients."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{processes}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    config = torch.load(Path(folder) / "config.pt", weights_only=False)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    session = HeadSession(model, PENALTIES)
    rows = dataset(8)[rank * 8 // processes : (rank + 1) * 8 // processes]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss = wrapped(**batch).loss
    (loss + session.penalty(loss)).backward()
    if rank == 0:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        torch.save(gradients, Path(folder) / f"gradients-{processes}.pt")
    torch.distributed.barrier()
    os._exit(0)  # torch may deadlock while it takes gloo and the wrapper apart


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_give_the_gradients_of_one(make_tiny, tmp_path):
    torch.save(undropped(make_tiny("bert").config), tmp_path / "config.pt")
    for processes in (1, 2):
        torch.multiprocessing.spawn(train_in_process, (processes, str(tmp_path)), nprocs=processes)
    one, two = (torch.load(tmp_path / f"gradients-{count}.pt", weights_only=True) for count in (1, 2))
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, atol=1e-6, rtol=1e-4)


NEWER = {field.name for field in dataclasses.fields(TrainingArguments)} >= {"activation_checkpointing"}
CHECKPOINTING = "activation_checkpointing" if NEWER else "gradient_checkpointing"


@pytest.mark.parametrize("option", [CHECKPOINTING, "torch_compile"])
def test_checkpointing_and_compilation_change_nothing(option, make_tiny, set_dropout_, tmp_path):
    more = {"torch_compile_backend": "aot_eager"} if option == "torch_compile" else {}
    model, other = (set_dropout_(classifier(make_tiny), 0.0) for _ in range(2))
    expected = final_weights(joined(model, tmp_path, max_steps=6))
    found = final_weights(joined(other, tmp_path, max_steps=6, **{option: True}, **more))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-4, msg=name)


def test_an_interrupted_run_leaves_nothing_to_the_next(make_tiny, tmp_path):
    model = classifier(make_tiny)
    trainer = joined(model, tmp_path, max_steps=4)
    acts = []

    class Interrupting(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            acts.append(max(len(vars(module).get("head_acts", ())) for module in model.modules()))
            if len(acts) == 2:
                raise KeyboardInterrupt

    trainer.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert acts == [2] * 6
    assert not any("head_acts" in vars(module) for module in model.modules())
    assert not any(matrix._backward_hooks for matrix in alphas_of(model).values())


def test_a_subclass_may_ignore_what_it_does_not_need(make_tiny, tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss = model(**inputs).loss
            return (loss, {}) if return_outputs else loss

    trainer = Own(
        classifier(make_tiny),
        arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2),
        train_dataset=dataset(),
    )
    join_trainer_(trainer, PENALTIES)
    trainer.train()
    assert "disagreement" in trainer.state.log_history[0]


def test_models_that_return_tuples(make_tiny, tmp_path):
    model = classifier(make_tiny)
    model.config.return_dict = False
    trainer = joined(model, tmp_path, PENALTIES, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


class Stream(torch.utils.data.IterableDataset):
    """Data that does not know its length."""

    def __iter__(self):
        return iter(dataset())


def test_epochs_are_passes_over_the_data(make_tiny, tmp_path):
    training = HeadTraining(rotation=Rotation("random", (0, 1, 2)))
    trainer = joined(classifier(make_tiny), tmp_path, training, Stream(), max_steps=12)
    trainer.train()
    history = trainer.state.stateful_callbacks["collab_compress_heads"]["rotation"]["history"]
    assert [event["epoch"] for event in history] == [0, 1, 2]


def test_validation_data_may_be_several(make_tiny, tmp_path):
    training = HeadTraining(rotation=Rotation("in-layer", (0,), exclude=()))
    trainer = joined(classifier(make_tiny), tmp_path, training, max_steps=1)
    trainer.eval_dataset = {"one": dataset(4, 7, 1), "two": dataset(4, 7, 2)}
    trainer.train()
    trainer = Trainer(classifier(make_tiny), arguments(tmp_path), train_dataset=dataset())
    with pytest.raises(HeadError, match="pass eval_dataset to the trainer"):
        join_trainer_(trainer, training)


def test_joining_refuses_what_would_silently_not_train(make_tiny, tmp_path):
    alphas = HeadTraining(alphas=AlphasOptions())
    trainer = joined(classifier(make_tiny), tmp_path, alphas)
    with pytest.raises(HeadError, match="joined before"):
        join_trainer_(trainer, alphas)
    model = classifier(make_tiny)
    own = torch.optim.SGD(model.parameters())
    trainer = Trainer(model, arguments(tmp_path), train_dataset=dataset(), optimizers=(own, None))
    join_trainer_(trainer, alphas)
    with pytest.raises(HeadError, match="the optimizer does not step the alphas"):
        trainer.train()
    made = Trainer(model_init=lambda: classifier(make_tiny), args=arguments(tmp_path), train_dataset=dataset())
    with pytest.raises(HeadError, match=r"call mix_heads_\(model\) in model_init"):
        join_trainer_(made, alphas)


ADDING_UP = """
import sys
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from collab_compress.training import HeadTraining, join_trainer_

torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
ids = torch.randint(5, 61, (8, 7), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
arguments = TrainingArguments(
    sys.argv[2], max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, warmup_steps=0, use_cpu=True,
    per_device_train_batch_size=int(sys.argv[3]), report_to="none", disable_tqdm=True, save_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=data)
join_trainer_(trainer, HeadTraining())
trainer.train()
if trainer.is_world_process_zero():
    model.save_pretrained(sys.argv[2])
"""


def test_two_processes_train_as_one(make_tiny, tmp_path):
    """A stock trainer would add up the losses of the two."""
    from safetensors.torch import load_file

    start = classifier(make_tiny)
    undropped(start.config)
    start.save_pretrained(tmp_path / "start")
    (tmp_path / "program.py").write_text(ADDING_UP)
    weights = []
    for processes in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
        folder = tmp_path / str(processes)
        command = [sys.executable, *launcher, "program.py", "start", str(folder), str(8 // processes)]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
        weights.append(load_file(folder / "model.safetensors"))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=1e-4)
