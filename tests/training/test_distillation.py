"""A trainer that trains a model towards its teacher, without labels."""

import copy
import dataclasses

import pytest
import torch
from torch.utils.data import default_collate
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MarianMTModel,
    TrainingArguments,
)

from collab_compress import Compression, compress
from collab_compress.errors import UnsupportedModelError
from collab_compress.training import DistillationTrainer, distillation
from collab_compress.training.distillation import distance

PLAIN = {  # one step of gradient descent on one batch
    "learning_rate": 0.1,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
}
LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=32,
    initializer_range=0.4,
)
HEADS = {
    "classifier": AutoModelForSequenceClassification,
    "tagger": AutoModelForTokenClassification,
    "reader": AutoModelForQuestionAnswering,
}


def rows(count=8, seed=0, labelled=False):
    """Return inputs of several lengths, padded on the right to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in range(count):
        length = 4 + row % 6
        ids = torch.zeros(9, dtype=torch.long)
        ids[:length] = torch.randint(5, 61, (length,), generator=generator)
        made.append({"input_ids": ids, "attention_mask": (torch.arange(9) < length).long()})
        if labelled:
            made[-1]["labels"] = ids[0] % 2
    return made


def pair(make_tiny, auto=AutoModelForSequenceClassification, family="bert", dropout=0.0):
    """Return a dense model and its conversion, which loses much."""
    torch.manual_seed(0)
    config = copy.deepcopy(make_tiny(family).config)
    for name in vars(config):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, dropout)
    dense = auto.from_config(config)
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=6), calibration=None)
    return dense, converted


def trainer_of(model, teacher, folder, data=None, **settings):
    arguments = TrainingArguments(str(folder), **{**PLAIN, **settings})
    return DistillationTrainer(model, arguments, teacher=teacher, train_dataset=data or rows())


def trained(model, *args, **settings):
    """Return the parameters of a copy after training."""
    model = copy.deepcopy(model)
    trainer_of(model, *args, **settings).train()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def translator(make_tiny):
    """Return a dense translator and its conversion, and pairs of several lengths, padded on the right."""
    torch.manual_seed(0)
    dense = MarianMTModel(make_tiny("marian").config).eval()
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=6), calibration=None)
    data = rows()
    for place, row in enumerate(data):
        row["labels"] = torch.where(torch.arange(7) < 2 + place % 5, row["input_ids"][:7] + 1, -100)
        row["labels"][1 + place % 5] = dense.config.eos_token_id
    return dense, converted, data


def slow_error(models, inputs, names=("hidden_states",), first=1):
    """Compute the loss token by token, given the inputs of each text alone and without padding."""
    errors = {}
    for row in inputs:
        ours, theirs = (model(**row, output_hidden_states=True) for model in models)
        for name in names:
            for layer, (one, other) in enumerate(zip(ours[name][first:], theirs[name][first:], strict=True)):
                for value, target in zip(one[0], other[0], strict=True):
                    errors.setdefault((name, layer), []).append(
                        ((value - target) @ (value - target)) / (target @ target)
                    )
    return sum(sum(of_layer) / len(of_layer) for of_layer in errors.values()) / len(errors)


def slow_translator_distance(model, teacher, data):
    inputs = []
    for row in data:
        wanted = row["labels"][row["labels"] >= 0]
        shifted = torch.cat([torch.tensor([model.config.decoder_start_token_id]), wanted[:-1]])[None]
        ids = row["input_ids"][row["attention_mask"].bool()][None]
        inputs.append({"input_ids": ids, "decoder_input_ids": shifted})
    return slow_error((model, teacher), inputs, ("encoder_hidden_states", "decoder_hidden_states"))


def slow_distance(model, teacher, data, first=1):
    inputs = [{"input_ids": row["input_ids"][row["attention_mask"].bool()][None]} for row in data]
    return slow_error((model, teacher), inputs, first=first)


@pytest.mark.parametrize("kind", HEADS)
def test_loss_is_that_of_texts_alone(kind, make_tiny):
    dense, converted = pair(make_tiny, HEADS[kind])
    batch = default_collate(rows())
    ours, theirs = (model(**batch, output_hidden_states=True) for model in (converted, dense))
    loss = distance(ours, theirs, batch)
    torch.testing.assert_close(loss, slow_distance(converted, dense, rows()), rtol=1e-4, atol=1e-6)
    assert loss > 1e-3


def test_loss_of_an_encoder_decoder_is_that_of_pairs_alone(make_tiny, tmp_path):
    dense, converted, data = translator(make_tiny)
    batch = default_collate(data)
    wanted = slow_translator_distance(converted, dense, data)
    assert wanted > 1e-3
    loss = trainer_of(converted, dense, tmp_path).compute_loss(converted.train(), batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)
    labels = batch.pop("labels")  # other tokens than a decoder reads are padding
    batch["decoder_input_ids"] = converted.prepare_decoder_input_ids_from_labels(labels)
    batch["decoder_attention_mask"] = (labels >= 0).long()
    loss = trainer_of(converted, dense, tmp_path).compute_loss(converted.train(), batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)


def slow_divergence(model, teacher, data):
    """Compute the divergence token by token, given each text alone and without padding."""
    terms = []
    for row in data:
        ids = row["input_ids"][row["attention_mask"].bool()][None]
        ours, theirs = (one(input_ids=ids).logits[0].double().exp() for one in (model, teacher))
        for p, q in zip(ours / ours.sum(1, keepdim=True), theirs / theirs.sum(1, keepdim=True), strict=True):
            terms.append(sum(q[v] * (q[v] / p[v]).log() for v in range(len(q))))
    return sum(terms) / len(terms)


def test_loss_of_a_language_model_is_the_divergence_of_texts_alone(tmp_path, monkeypatch):
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LLAMA).eval()
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dff=4), calibration=[default_collate(rows(seed=1))])
    monkeypatch.setattr(distillation, "TOKENS", 7)
    wanted = slow_divergence(converted, dense, rows())
    assert wanted > 1e-3
    trainer = trainer_of(converted, dense, tmp_path)
    loss, outputs = trainer.compute_loss(converted.train(), default_collate(rows(labelled=True)), return_outputs=True)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=1e-6)
    gradient = torch.autograd.grad(wanted, converted.model.layers[1].mlp.down_proj.weight)[0]
    loss.backward()
    torch.testing.assert_close(converted.model.layers[1].mlp.down_proj.weight.grad, gradient, rtol=1e-3, atol=1e-6)
    assert outputs.logits.shape == (8, 9, 61)
    trainer_of(converted, dense, tmp_path, max_steps=60, optim="adamw_torch", learning_rate=3e-3).train()
    assert slow_divergence(converted.eval(), dense, rows()) < 0.3 * wanted


def test_other_models_than_language_models_are_compared_by_hidden_states(make_tiny, tmp_path):
    hidden = [torch.ones(2, 9, 24)]
    trainer = trainer_of(LlamaForCausalLM(LLAMA), LlamaForCausalLM(LLAMA), tmp_path)
    assert trainer._predicts_tokens({"logits": torch.ones(2, 9, 61), "hidden_states": hidden})
    assert not trainer._predicts_tokens({"logits": torch.ones(8, 9, 61), "hidden_states": hidden})  # as Musicgen's
    classifier, _ = pair(make_tiny)
    trainer.model = torch.nn.ModuleList([classifier])  # no model of Transformers
    assert not trainer._predicts_tokens({"hidden_states": hidden})


def test_of_a_model_with_fewer_layers_the_last_states_count(make_tiny, tmp_path):
    dense, _ = pair(make_tiny)
    shallow = copy.deepcopy(dense)
    compress(shallow, Compression(layers=1), calibration=[default_collate(rows())])
    assert shallow.config.num_hidden_layers == dense.config.num_hidden_layers - 1
    loss = trainer_of(shallow, dense, tmp_path).compute_loss(shallow.train(), default_collate(rows()))
    torch.testing.assert_close(loss, slow_distance(shallow, dense, rows(), first=-1), rtol=1e-4, atol=1e-6)


def test_step_follows_the_gradient_of_the_loss(make_tiny, tmp_path):
    dense, converted = pair(make_tiny)
    wanted = copy.deepcopy(converted)
    slow_distance(wanted, dense, rows()).backward()
    for parameter in wanted.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad
    after = trained(converted, dense, tmp_path)
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-3, atol=1e-5)


def test_labels_and_dropout_do_not_matter(make_tiny, tmp_path):
    dense, converted = pair(make_tiny, dropout=0.5)
    plain = trained(converted, dense, tmp_path)
    labelled = trained(converted, dense, tmp_path, rows(labelled=True))
    dense_without, without = pair(make_tiny, dropout=0.0)
    calm = trained(without, dense_without, tmp_path)
    for name, parameter in plain.items():
        assert torch.equal(parameter, labelled[name])
        torch.testing.assert_close(parameter, calm[name])


def test_no_label_is_read(make_tiny, tmp_path):
    dense, reader = pair(make_tiny, HEADS["reader"])
    trainer = trainer_of(reader, dense, tmp_path)
    batch = default_collate(rows())
    loss, outputs = trainer.compute_loss(reader.train(), batch | {"start_positions": "?"}, return_outputs=True)
    assert "loss" not in outputs
    torch.testing.assert_close(loss, slow_distance(reader, dense, rows()), rtol=1e-4, atol=1e-6)


def test_passes_of_a_step_are_averaged(make_tiny, tmp_path):
    dense, converted = pair(make_tiny)
    row = rows()[3:4]
    once = trained(converted, dense, tmp_path, row * 8)
    twice = trained(converted, dense, tmp_path, row * 16, gradient_accumulation_steps=2)
    for name, parameter in once.items():
        torch.testing.assert_close(parameter, twice[name], rtol=1e-3, atol=1e-5)


def test_teacher_stays_and_model_comes_closer(make_tiny, tmp_path):
    dense, converted = pair(make_tiny)
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    first = slow_distance(converted, dense, rows()).item()
    trainer_of(converted, dense, tmp_path, max_steps=60, optim="adamw_torch", learning_rate=3e-3).train()
    assert slow_distance(converted.eval(), dense, rows()) < 0.3 * first
    assert all(torch.equal(before[name], value) for name, value in dense.state_dict().items())
    assert all(parameter.grad is None for parameter in dense.parameters())


def test_evaluation_is_that_of_a_trainer(make_tiny, tmp_path):
    dense, converted = pair(make_tiny)
    data = rows(labelled=True)
    scores = trainer_of(converted, dense, tmp_path).evaluate(data)
    with torch.no_grad():
        assert scores["eval_loss"] == pytest.approx(converted(**default_collate(data)).loss.item(), rel=1e-5)


def test_refusals(make_tiny, tmp_path):
    dense, converted = pair(make_tiny)
    with pytest.raises(UnsupportedModelError, match="the teacher is the model that is trained"):
        trainer_of(dense, dense, tmp_path)
    with pytest.raises(UnsupportedModelError, match="teacher is of type str: 'dense'; expected Module"):
        trainer_of(converted, "dense", tmp_path)
    with pytest.raises(UnsupportedModelError, match="the model has hidden_states, and its teacher has none"):
        distance({"hidden_states": [torch.ones(1, 2, 3)]}, {"last_hidden_state": torch.ones(1, 2, 3)}, {})
    with pytest.raises(UnsupportedModelError, match="outputs hold no hidden states"):
        distance({"logits": torch.ones(2, 2)}, {"logits": torch.ones(2, 2)}, {})
    other = AutoModelForSequenceClassification.from_config(dataclasses.replace(dense.config, hidden_size=36))
    with pytest.raises(UnsupportedModelError, match=r"hidden_states .* shapes \(8, 9, 24\) and \(8, 9, 36\)"):
        trainer_of(converted, other, tmp_path).train()


def test_a_mask_of_other_tokens_is_refused(make_tiny):
    dense, converted = pair(make_tiny)
    batch = default_collate(rows())
    ours, theirs = (model(**batch, output_hidden_states=True) for model in (converted, dense))
    with pytest.raises(UnsupportedModelError, match=r"attention_mask has the shape \(8, 8\), and hidden_states"):
        distance(ours, theirs, {"attention_mask": batch["attention_mask"][:, 1:]})
