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
from forms import mostly_slow
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from transformers import BertForSequenceClassification, TrainingArguments
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
BY_LAYER = {"transformer_layer_cls_to_wrap": ["BertLayer"]}
WHOLE = {"auto_wrap_policy": "NO_WRAP"}  # attention in a single group, which a forward pass leaves gathered


def training(losses, rotation):
    return HeadTraining(
        drophead=(DropHeadOptions(0.4),),
        penalties=tuple(PenaltyOptions(loss, 0.1) for loss in losses),
        alphas=AlphasOptions(frozen_ratio=0.7, growth_weight=3.0, growth=0.05),
        rotation=rotation,
    )


IN_LAYER = ((("bert.encoder.layer.0.attention.self", 0), ("bert.encoder.layer.0.attention.self", 2)),)
CASES = {  # collaborative, how it is sharded, what acts
    "dense": (False, BY_LAYER, training(sorted(LOSSES), RotationOptions("hard", (0, 1, 2), k=2, exclude=()))),
    "collaborative": (
        True,
        BY_LAYER,
        training(sorted(LOSSES), RotationOptions("manual", (0,), pairs=IN_LAYER, swap_back_after=2)),
    ),
    "whole": (False, WHOLE, training(["agreement"], RotationOptions("soft", (1,), k=2, exclude=()))),
}


@pytest.fixture
def case(request, make_tiny, set_dropout_, make_batch):
    collaborative, sharding, acting = CASES[request.param]
    model = make_tiny("bert", BertForSequenceClassification)
    if collaborative:
        compress(model, Compression(dk=13), calibration=None)
    mix_heads_(model)
    set_dropout_(model.double(), 0.0)
    batches = [make_batch("bert", seed=seed) for seed in range(4 + 2 * STEPS)]
    for number, batch in enumerate(batches):
        batch["labels"] = torch.arange(number, number + 3) % 2
    held_out, data = ([row for batch in part for row in rows_of(batch)] for part in (batches[:4], batches[4:]))
    return model, sharding, dataclasses.replace(acting, loss_normalization="mean"), data, held_out


def rows_of(batch):
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


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
        for drophead in self.head_session._dropheads:
            drophead.rank, drophead.processes = rank, 2
        torch.manual_seed(2 * self.state.global_step + rank)
        self.passes += 1
        return super().compute_loss(*arguments, **options)


def trainer_of(case, folder, sharded):
    model, sharding, acting, data, held_out = case
    model = copy.deepcopy(model)
    config = {"version": 2, **sharding, "cpu_ram_efficient_loading": False}
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
        **({"fsdp": True, "fsdp_config": config} if sharded else {}),
    )
    return Seeded(model, arguments, train_dataset=data, eval_dataset=held_out, head_training=acting)


def history_of(trainer):
    saved = trainer.state.stateful_callbacks["HeadState"]["attributes"]["saved"]
    return json.loads(json.dumps(saved["rotation"]["history"]))


def trainer_process(rank, case, folder):
    results = []
    for resumed in (None, f"{folder}/checkpoint-{2 * STEPS}"):
        with sharding_on_cpus():
            trainer = trainer_of(case, folder, sharded=True)
        trainer.train(resume_from_checkpoint=resumed)
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        results.append(({name: tensor.clone() for name, tensor in weights.items()}, history_of(trainer)))
    return results


@pytest.mark.parametrize("case", mostly_slow(zip(CASES), ("collaborative",)), indirect=True)
def test_a_trainer_shards(case, tmp_path):
    alone = trainer_of(case, tmp_path / "alone", sharded=False)
    alone.train()
    assert history_of(alone)
    for weights, history in run_both(trainer_process, case, str(tmp_path / "both"))[0]:
        assert history == history_of(alone)
        torch.testing.assert_close(weights, alone.model.state_dict(), atol=1e-9, rtol=1e-7)


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
    dense = copy.deepcopy(model)
    pieces = f"{FIRST}: FSDP1 splits weights across head boundaries; shard the model with"
    flat = FSDP1(copy.deepcopy(model), use_orig_params=True, device_id=torch.device("cpu"))
    refused(pieces, swap_heads_, flat.module, PAIR)
    refused(pieces, Rotator, flat.module, RotationOptions("hard", (0,)))
    session = HeadTraining(rotation=RotationOptions("hard", (0,)))
    views = FSDP1(copy.deepcopy(model), use_orig_params=False, device_id=torch.device("cpu"))
    refused(pieces, HeadSession, views.module, session, torch.optim.AdamW(views.parameters()))
    mixed = copy.deepcopy(model)
    mix_heads_(mixed)
    flat = FSDP1(mixed, use_orig_params=True, device_id=torch.device("cpu"))
    session, adamw = HeadTraining(alphas=AlphasOptions()), torch.optim.AdamW(flat.parameters())
    refused("alphas: FSDP1 splits weights across head boundaries", HeadSession, flat.module, session, adamw)

    config = {"version": 2, **BY_LAYER}
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
