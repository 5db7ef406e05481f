"""Recipes whose processes share the weights of a model by FSDP2: as one process, killed or not.

One process that makes two passes a step, and averages their losses, does what two processes do that make one pass
each; DropHead is seeded to draw in pass r what process r draws. Accelerate shards on accelerators only, so that the
program lets it do so on CPUs.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from collab_compress_glue_runs.experiments import read_recipe, run
from collab_compress_glue_runs.experiments.sharding import keep_whole_checkpoints, sharding
from collab_compress_glue_runs.experiments.tuning import whole_checkpoints
from safetensors.torch import load_file
from tiny_recipes import mrpc
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    MarianMTModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from two_processes import run_both, sharding_on_cpus

from collab_compress import Compression, compress
from collab_compress.errors import RecipeError
from collab_compress.training import HeadTrainer

SUPPORT = Path(__file__).parents[2] / "support"
PROGRAM = """
import json, os, sys
import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from two_processes import sharding_on_cpus
from collab_compress.distributed import end_processes, process_state
from collab_compress_glue_runs.experiments import read_recipe, run
from collab_compress.training import HeadTrainer

kill, recipes = sys.argv[1], json.loads(sys.argv[2])
compute, get, init = HeadTrainer.compute_loss, Accelerator.get_state_dict, HeadTrainer.__init__

def compute_loss(self, model, *given, **options):
    assert self.is_fsdp_enabled == (self.is_in_train and self.args.world_size > 1)
    if model.training:
        rank = self.passes % 2 if self.args.world_size == 1 else self.args.process_index
        self.passes += 1
        for drophead in self._callback.session._dropheads:  # one process draws what each of two draws
            drophead.rank, drophead.processes = rank, 2
        torch.manual_seed(2 * self.state.global_step + rank)
    return compute(self, model, *given, **options)

class Killer(TrainerCallback):
    def on_save(self, args, state, control, **_):
        if args.output_dir.endswith(kill) and state.global_step == 8:
            torch.distributed.barrier()  # both processes have written their part
            os._exit(9)

def make(self, *given, **options):
    init(self, *given, **options)
    self.passes = 0
    self.add_callback(Killer)

def cloned(*given, **options):  # on CPUs these still wait for what others send
    return {name: tensor.clone() for name, tensor in get(*given, **options).items()}

HeadTrainer.compute_loss, HeadTrainer.__init__, Accelerator.get_state_dict = compute_loss, make, cloned
process_state()
with sharding_on_cpus():
    for overrides in recipes:
        run(read_recipe(overrides=overrides))
end_processes()
os._exit(0)  # sharded on CPUs, PyTorch keeps threads that may want the interpreter while it ends, and are aborted
"""
HEADS = {
    "drophead": [{"p": 0.3}],
    "penalties": [{"name": "agreement", "weight": 0.1}],
    "alphas": {"frozen_ratio": 0.5},
    "rotation": {"strategy": "in-layer", "epochs": [1], "importance": "confidence", "exclude": []},
    "loss_normalization": "mean",
}
ENVIRONMENT = {  # as `accelerate launch --use_fsdp --fsdp_version 2` says it, weights sharded in its checkpoints
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def sharing(layer):
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": [layer]}}


def recipes(start, data_dir, output, bert, gpt2):
    """Train a dense model, convert it and let it recover; train a converted one, and one with tied embeddings."""
    every = {"disable_tqdm": True, "adam_epsilon": 1e-4, "weight_decay": 0.1}
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    worst = {**best, "greater_is_better": True}  # which is not the last

    def tuning(arguments, **more):
        settings = {"epochs": 3, "learning_rate": 1e-3, "batch_size": 4, "arguments": every | arguments, **more}
        return f"tuning={json.dumps(settings)}"

    def mrpc_on(model, name, *more):
        return mrpc(model, data_dir, output / name, f"heads={json.dumps(HEADS)}", *more)

    fresh = f"fresh={{config: {start.parent / 'gpt2'}, tokenizer: word, vocab_size: null}}"
    tied = ("task=text", f"data_dir={start.parent}", "max_length=19", "model=null", fresh)
    return [
        mrpc_on(start, "dense", tuning(bert), "compression.dk=24", "recovery.steps=2"),
        mrpc_on(start.parent / "converted", "converted", tuning(bert | worst)),
        mrpc_on(start, "tied", tuning(gpt2), *tied),
    ]


def launch(folder, overrides, processes=2, kill="nothing", **environment):
    (folder / "program.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    return subprocess.run(
        [sys.executable, *launcher, str(folder / "program.py"), kill, json.dumps(overrides)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("text")
def test_sharded_processes_give_the_models_of_one(start, data_dir, tmp_path):
    """Heads act in all ways; the worst checkpoint is kept of the converted model."""
    model, tokenizer = AutoModel.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    compress(model, Compression(dk=12), calibration=None)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "converted")
    GPT2Config(
        n_embd=24, n_head=3, n_layer=2, n_positions=40, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    ).save_pretrained(tmp_path / "gpt2")
    halves = {"gradient_accumulation_steps": 2}
    overrides = {
        "alone": recipes(start, data_dir, tmp_path / "alone", halves, halves),
        "straight": recipes(start, data_dir, tmp_path / "straight", sharing("BertLayer"), sharing("GPT2Block")),
        "killed": recipes(start, data_dir, tmp_path / "killed", {}, sharing("GPT2Block")),  # by the environment
    }
    for name, processes in (("alone", 1), ("straight", 2)):
        done = launch(tmp_path, overrides[name], processes)
        assert done.returncode == 0, done.stderr[-9000:]
    done = launch(tmp_path, overrides["killed"], kill="converted/tuned/checkpoints", **ENVIRONMENT)
    assert done.returncode != 0
    checkpoint = whole_checkpoints(tmp_path / "killed" / "converted" / "tuned" / "checkpoints")[-1]
    assert checkpoint.name == "checkpoint-8", done.stderr[-9000:]
    assert (checkpoint / "optimizer.bin").is_file()  # as FSDP alone writes it
    done = launch(tmp_path, overrides["killed"], **ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-9000:]

    for stage in ("tied/tuned", "dense/tuned", "dense/dk24", "converted/tuned"):
        one, other, resumed = (tmp_path / name / stage for name in overrides)
        if stage != "dense/dk24":  # solvers magnify rounding
            torch.testing.assert_close(weights(other), weights(one), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(weights(resumed), weights(other), atol=0, rtol=0)
        records = [json.loads((folder / "result.json").read_text()) for folder in (one, other, resumed)]
        for record in records:
            for split, metrics in record["metrics"].items():
                assert metrics == pytest.approx(records[0]["metrics"][split], rel=1e-5)
        assert not (other / "checkpoints").exists()
    model = AutoModelForSequenceClassification.from_pretrained(other / "model")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.bert.encoder.layer[0].attention.self.mixing.shape == (3, 12)


def refusal(call, *arguments):
    try:
        call(*arguments)
    except RecipeError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.filterwarnings("ignore:FSDP1:FutureWarning")
@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (
            {"deepspeed": {}},
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "do not support DeepSpeed; shard with FSDP2",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {}, "do not support DeepSpeed; shard with FSDP2"),
        (
            {"fsdp": True, "fsdp_config": {"version": 1}},
            {},
            "FSDP1 splits weights across head boundaries; take FSDP2",
        ),
        (
            {},
            {"ACCELERATE_USE_FSDP": "True"},
            "FSDP1 splits weights across head boundaries; .* accelerate launch --fsdp_version 2",
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}, {}, "set FSDP's cpu_ram_efficient_load"),
        ({}, {**ENVIRONMENT, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "--fsdp_cpu_ram_efficient_loading false"),
        ({"fsdp": True}, {}, "FSDP shares a model between processes, and there is one; start several"),
        ({"fsdp": "full_shard"}, {}, "fsdp is 'full_shard'; expected a valid boolean"),
        ({"fsdp": True, "fsdp_config": "nowhere.json"}, {}, "training arguments: .*nowhere.json"),
    ],
)
def test_what_recipes_do_not_do_is_refused_first(
    start, data_dir, tmp_path, monkeypatch, arguments, environment, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    overrides = mrpc(start, data_dir, tmp_path / "out")
    with pytest.raises(RecipeError, match=words):
        run(read_recipe(overrides=[*overrides, f"tuning={json.dumps({'arguments': arguments})}"]))
    assert not (tmp_path / "out").exists()


def asked_process(rank, bert, marian, folder):
    results = []
    for model, options, trick in (
        (bert, sharing("BertLayer"), nullcontext),
        (bert, sharing("NoLayer"), sharding_on_cpus),
        (bert, {"fsdp": True}, sharding_on_cpus),
        (marian, sharing("MarianDecoderLayer"), sharding_on_cpus),
    ):
        with sharding(allowed=True), trick():
            arguments = TrainingArguments(folder, use_cpu=True, report_to=[], **options)
            results.append(refusal(keep_whole_checkpoints, Trainer(model, arguments)))
        results.append(os.environ.get("ACCELERATE_USE_FSDP"))
    return results


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_cannot_be_sharded_is_said(make_tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    unsharded = "FSDP was asked for, and Accelerate shards on accelerators only; leave it out on CPUs"
    unknown = "FSDP is to wrap NoLayer of BertModel, which it does not have; name its layers alone"
    twice = (
        "FSDP is to wrap BertEmbeddings of BertModel, which holds its input embeddings; name its layers alone "
        "(fsdp_config: {transformer_layer_cls_to_wrap: [BertLayer]})"
    )
    tied = "MarianMTModel, in which model.shared.weight and model.encoder.embed_tokens.weight are one weight; leave"
    for results in run_both(asked_process, make_tiny("bert"), make_tiny("marian", MarianMTModel), str(tmp_path)):
        assert results[1::2] == [None] * 4
        for said, words in zip(results[::2], (unsharded, unknown, twice, tied), strict=True):
            assert words in said


class Stopping(TrainerCallback):
    def on_save(self, *_, **__):
        raise KeyboardInterrupt


def test_a_checkpoint_of_the_other_kind_is_refused(start, data_dir, tmp_path, monkeypatch):
    overrides = mrpc(start, data_dir, tmp_path / "out", "tuning={epochs: 2, arguments: {disable_tqdm: true}}")
    recipe = read_recipe(overrides=overrides)
    train = HeadTrainer.train
    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "train", lambda self, **options: [self.add_callback(Stopping), train(self)])
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    checkpoint = whole_checkpoints(tmp_path / "out" / "tuned" / "checkpoints")[-1]
    (checkpoint / "optimizer.pt").rename(checkpoint / "optimizer.bin")
    with pytest.raises(RecipeError, match="written with FSDP, and training cannot go on without it; start it with"):
        run(recipe)
