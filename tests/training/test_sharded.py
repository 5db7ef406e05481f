"""Training whose processes share weights or moments: the same weights as one process, resumed or not.

One process that makes two passes a step, on the data of rank 0 and then of rank 1, and averages their losses, does
what two processes do that make one pass each: penalties are means over a pass's own batch on either side, and
DropHead is seeded to draw in pass r what process r draws. Importance is that of all held-out data, half of which each
process has. Everything runs in float64, so that what differs is more than rounding.
"""

import copy
import dataclasses
import json
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertForSequenceClassification, MarianMTModel, TrainingArguments
from two_processes import run_both, sharding_on_cpus

from collab_compress import Compression, CompressionError, compress, expand
from collab_compress.errors import HeadError
from collab_compress.heads import RotationOptions, Rotator, merge_alphas_, mix_heads_, prune_heads_, swap_heads_
from collab_compress.training import (
    LOSSES,
    AlphasOptions,
    DropHeadOptions,
    HeadSession,
    HeadTrainer,
    HeadTraining,
    PenaltyOptions,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
EPOCHS, STEPS = 3, 2  # steps an epoch
LAYERS = {"bert": ["BertLayer"], "marian": ["MarianEncoderLayer", "MarianDecoderLayer"]}


def training(losses, rotation):
    return HeadTraining(
        drophead=(DropHeadOptions(0.4),),
        penalties=tuple(PenaltyOptions(loss, 0.1) for loss in losses),
        alphas=AlphasOptions(frozen_ratio=0.7, growth_weight=3.0, growth=0.05),
        rotation=rotation,
    )


IN_LAYER = ((("bert.encoder.layer.0.attention.self", 0), ("bert.encoder.layer.0.attention.self", 2)),)
CASES = {  # family, collaborative, what acts
    "dense": ("bert", False, training(sorted(LOSSES), RotationOptions("hard", (0, 1, 2), k=2, exclude=()))),
    "collaborative": (
        "bert",
        True,
        training(sorted(LOSSES), RotationOptions("manual", (0,), pairs=IN_LAYER, swap_back_after=2)),
    ),
    "seq2seq": ("marian", False, training(["agreement"], RotationOptions("soft", (1,), k=2, exclude=()))),
}


@pytest.fixture
def case(request, make_tiny, set_dropout_, make_batch):
    family, collaborative, acting = CASES[request.param]
    model = make_tiny(family, {"bert": BertForSequenceClassification, "marian": MarianMTModel}[family])
    if collaborative:
        compress(model, Compression(dk=13), calibration=None)
    mix_heads_(model)
    set_dropout_(model.double(), 0.0).train()
    batches = [make_batch(family, seed=seed) for seed in range(2 * STEPS * EPOCHS)]
    for number, batch in enumerate(batches):
        batch["labels"] = torch.arange(number, number + 3) % 2 if family == "bert" else batch["decoder_input_ids"]
    held_out = [make_batch(family, seed=100 + seed) for seed in range(4)]
    return family, model, acting, batches, held_out


class Training:
    """One process, or one of two."""

    def __init__(self, model, optimizer, acting, batches, held_out, ranks, backward=torch.Tensor.backward):
        self.model, self.optimizer, self.batches, self.ranks, self.backward = (
            model,
            optimizer,
            batches,
            ranks,
            backward,
        )
        self.bare = model.module if isinstance(model, DistributedDataParallel) else model
        self.session = HeadSession(self.bare, acting, optimizer)
        self.held_out = [batch for rank in ranks for batch in held_out[rank::2]]

    def run(self, epochs):
        for epoch in epochs:
            self.session.epoch(epoch, self.held_out)
            self.model.train()
            for step in range(epoch * STEPS, (epoch + 1) * STEPS):
                self.session.step(step / (EPOCHS * STEPS - 1))
                for rank in self.ranks:
                    draw_as(self.session, rank)
                    torch.manual_seed(1000 + 2 * step + rank)
                    loss = self.model(**self.batches[2 * step + rank]).loss
                    self.backward((loss + self.session.penalty(loss)) / len(self.ranks))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def state(self):
        return json.loads(json.dumps(self.session.state_dict()))


def draw_as(session, rank):
    """Let DropHead draw what one of two processes draws."""
    for drophead in session._dropheads:
        drophead.rank, drophead.processes = rank, 2


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def expected(case, epochs=range(EPOCHS)):
    _, model, *rest = case
    model = copy.deepcopy(model)
    alone = Training(model, adamw(model), *rest, ranks=(0, 1)).run(epochs)
    history = alone.state()["rotation"]["history"]
    assert history, "nothing rotated"
    return model.state_dict(), history


def full(accelerator, model):
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


class Seeded(HeadTrainer):
    """Takes the data in order, and draws in pass r of one process what process r of two draws."""

    passes = 0

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is not None:  # on CPUs these still wait for what others send
            state_dict = {name: tensor.clone() for name, tensor in state_dict.items()}
        super()._save(output_dir, state_dict=state_dict)

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments, **options):
        alone = self.args.world_size == 1
        rank = self.passes % 2 if alone else self.args.process_index
        if self.head_session is not None:
            draw_as(self.head_session, rank)
        torch.manual_seed(2 * self.state.global_step + rank)
        self.passes += 1
        return super().compute_loss(*arguments, **options)


def trainer_of(case, folder, sharded):
    family, model, acting, batches, held_out = case
    few = batches[: 2 * STEPS]  # of each epoch
    rows = [dict(zip(batch, row, strict=True)) for batch in few for row in zip(*batch.values(), strict=True)]
    held = [dict(zip(batch, row, strict=True)) for batch in held_out for row in zip(*batch.values(), strict=True)]
    config = {"version": 2, "transformer_layer_cls_to_wrap": LAYERS[family], "cpu_ram_efficient_loading": False}
    sharding = {"fsdp": True, "fsdp_config": config} if sharded else {}
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
        use_cpu=True,
        gradient_accumulation_steps=1 if sharded else 2,
        learning_rate=1e-2,
        save_steps=2 * STEPS,
        report_to=[],
        disable_tqdm=True,
        weight_decay=0.1,
        max_grad_norm=0.1,
        dataloader_pin_memory=False,
        **sharding,
    )
    acting = dataclasses.replace(acting, loss_normalization="mean")
    return Seeded(model, arguments, train_dataset=rows, eval_dataset=held, head_training=acting)


def history_of(trainer):
    return trainer.state.stateful_callbacks["HeadState"]["attributes"]["saved"]["rotation"]["history"]


def trainer_process(rank, case, folder):
    results, stock = [], copy.deepcopy(case[1])
    for model, resumed in ((case[1], None), (stock, f"{folder}/checkpoint-{2 * STEPS}")):
        with sharding_on_cpus():
            trainer = trainer_of((case[0], model, *case[2:]), folder, sharded=True)
        trainer.train(resume_from_checkpoint=resumed)
        results.append(
            (full(trainer.accelerator, trainer.model_wrapped), json.loads(json.dumps(history_of(trainer))))
        )
    return results


@pytest.mark.parametrize("case", ["collaborative", pytest.param("dense", marks=pytest.mark.slow)], indirect=True)
def test_a_trainer_shards(case, tmp_path):
    alone = trainer_of((case[0], copy.deepcopy(case[1]), *case[2:]), tmp_path / "alone", sharded=False)
    alone.train()
    results = run_both(trainer_process, case, str(tmp_path / "both"))
    for got, events in results[0]:
        assert events == json.loads(json.dumps(history_of(alone)))
        torch.testing.assert_close(got, alone.model.state_dict(), atol=1e-9, rtol=1e-7)


def one_group_process(rank, case):
    _, model, *rest = case
    fully_shard(model)  # in a single group, which a forward pass leaves gathered
    run = Training(model, adamw(model), *rest, ranks=(rank,)).run(range(EPOCHS))
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options), run.state()["rotation"]["history"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["seq2seq"], indirect=True)
def test_a_model_sharded_as_a_whole(case):
    weights, history = expected(case)
    for got, events in run_both(one_group_process, case):
        assert events == history
        torch.testing.assert_close(got, weights, atol=1e-9, rtol=1e-7)


FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
PAIR = [((FIRST, 0), (SECOND, 1))]


def refused(message, call, *arguments, **options):
    with pytest.raises((CompressionError, HeadError, TypeError), match=message):
        call(*arguments, **options)


class First(HeadTrainer):
    """Is told that its plugin is FSDP1, which Accelerate makes on accelerators only."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.fsdp_plugin.fsdp_version = 1


def refusals_process(rank, model, batch, folder):
    dense, pieces = (
        copy.deepcopy(model),
        f"{FIRST}: FSDP1 splits weights across head boundaries; shard the model with",
    )
    flat = FSDP1(copy.deepcopy(model), use_orig_params=True, device_id=torch.device("cpu"))
    refused(pieces, swap_heads_, flat.module, PAIR)
    refused(pieces, Rotator, flat.module, RotationOptions("hard", (0,)))
    session = HeadTraining(rotation=RotationOptions("hard", (0,)))
    views = FSDP1(copy.deepcopy(model), use_orig_params=False, device_id=torch.device("cpu"))
    refused(pieces, HeadSession, views.module, session, adamw(views))
    mixed = copy.deepcopy(model)
    mix_heads_(mixed)
    flat = FSDP1(mixed, use_orig_params=True, device_id=torch.device("cpu"))
    session = HeadTraining(alphas=AlphasOptions())
    refused("alphas: FSDP1 splits weights across head boundaries", HeadSession, flat.module, session, adamw(flat))

    config = {"version": 2, "transformer_layer_cls_to_wrap": LAYERS["bert"]}
    with sharding_on_cpus():
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], fsdp=True, fsdp_config=config)
        acting = HeadTraining(drophead=(DropHeadOptions(0.4),))
        message = "FSDP1 splits weights across head boundaries"
        refused(message, First, copy.deepcopy(model), arguments, head_training=acting)
    away = copy.deepcopy(model)
    away.encoder.layer[0].attention.self.query.weight.ds_id = 0  # as ZeRO-3 marks parameters that it has partitioned
    message = f"{FIRST}: DeepSpeed ZeRO-3 splits weights across head boundaries"
    refused(message, Rotator, away, RotationOptions("random", (0,)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, at the import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    refused("keeps its state in other processes; shard by FSDP2", swap_heads_, model, PAIR, zero)

    rotator = Rotator(model, RotationOptions("hard", (0,)))
    message = "process 1 could not measure the importance of heads: TypeError" if rank == 0 else "int"
    refused(message, rotator.epoch, 0, batches=[batch] if rank == 0 else 3)
    assert rotator.history == []

    mixed = copy.deepcopy(model)
    mix_heads_(mixed)
    for network in (model, mixed):
        fully_shard(network)
    sharded = ": .*BertModel is sharded, and new parameters would not be"
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=8), None)
    fully_shard(converted)
    flat = FSDP1(copy.deepcopy(dense), use_orig_params=rank == 0, device_id=torch.device("cpu"))
    refused("compress" + sharded, compress, model, Compression(dk=8), None)
    refused("expand" + sharded, expand, converted)
    refused("compress" + sharded, compress, flat.module, Compression(dk=8), None)
    for call, *arguments in ((mix_heads_, model), (merge_alphas_, mixed), (prune_heads_, model, {FIRST: [0]})):
        refused(rf"{call.__name__}: embeddings\..* is sharded", call, *arguments)


def test_what_cannot_be_right_is_refused_in_all_processes(make_tiny, batch, tmp_path):
    run_both(refusals_process, make_tiny("bert"), batch, str(tmp_path))
