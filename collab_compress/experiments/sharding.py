"""Training whose processes share a model's weights: FSDP2, which Accelerate makes; anything else is refused."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin, str_to_bool
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import PreTrainedModel, Trainer, TrainingArguments

from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError

USED = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def sharding(allowed: bool) -> Iterator[None]:
    """Allow or forbid trainers created within to shard their models.

    Accelerate says that it shards in the environment, where the next trainer of the process would find it: what was
    there before is put back.

    Args:
        allowed: whether trainers shard, where their arguments or `accelerate launch` say so.
    """
    before = {name: os.environ.get(name) for name in (USED, EFFICIENT)}
    if not allowed:
        os.environ.pop(USED, None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def refuse_deepspeed(arguments: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed, which was not tried.

    Args:
        arguments: of a trainer, by name, before they are made into any.

    Raises:
        RecipeError: they or `accelerate launch` ask for it.
    """
    if arguments.get("deepspeed") or _told("ACCELERATE_USE_DEEPSPEED"):
        raise RecipeError(
            "recipes were not tried with DeepSpeed; shard with FSDP2 instead (arguments: {fsdp: true}), or leave "
            "models whole"
        )


def is_to_shard(arguments: TrainingArguments) -> bool:
    """Return whether a trainer's arguments, or else `accelerate launch`, ask for FSDP2.

    Raises:
        RecipeError: they ask for what recipes do not do.
    """
    if arguments.fsdp_plugin_args is not None:
        version, efficient = (arguments.fsdp_plugin_args[n] for n in ("fsdp_version", "cpu_ram_efficient_loading"))
    elif _told(USED):
        version, efficient = int(os.environ.get("FSDP_VERSION", "1")), _told(EFFICIENT)
    else:
        return False
    if version != 2:
        raise RecipeError(
            "FSDP1 splits weights across head boundaries; take FSDP2 (fsdp_config: {version: 2}, or "
            "accelerate launch --fsdp_version 2), or leave FSDP out"
        )
    if efficient:
        raise RecipeError(
            "each process of a recipe loads its models whole; set FSDP's cpu_ram_efficient_loading to false "
            "(accelerate launch --fsdp_cpu_ram_efficient_loading false)"
        )
    if process_state().num_processes == 1:
        raise RecipeError(
            "FSDP shares a model between processes, and there is one; start several (torchrun --nproc_per_node N), "
            "or leave FSDP out"
        )
    return True


def keep_whole_checkpoints(trainer: Trainer) -> None:
    """Make a sharding trainer write whole weights into its checkpoints.

    Raises:
        RecipeError: it was to shard, and cannot.
    """
    if not is_to_shard(trainer.args):
        return
    if not trainer.is_fsdp_enabled:
        raise RecipeError("FSDP was asked for, and Accelerate shards on accelerators only; leave it out on CPUs")
    plugin = trainer.accelerator.state.fsdp_plugin
    _check_wrapping(trainer.model, plugin)
    _check_sharing(trainer.model)
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # those of what it was to write
    plugin.set_state_dict_type("FULL_STATE_DICT")


def whole_weights(trainer: Trainer) -> dict[str, Tensor] | None:
    """Gather the weights of a sharded model on the main process; None if the model is not sharded.

    Every process must call it.
    """
    if not trainer.is_fsdp_enabled:
        return None
    weights: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model)
    names: dict[Tensor, str] = {}
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        if name in weights:
            weights[name] = weights[names.setdefault(parameter, name)]  # one that is tied was gathered twice
    return weights


def _check_wrapping(model: PreTrainedModel, plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse to wrap layers that are not there, and the input embeddings twice: Accelerate wraps them anyway."""
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    embeddings = model.get_input_embeddings()
    found = {type(module).__name__: embeddings in module.modules() for module in model.modules()}
    names = plugin.transformer_cls_names_to_wrap or model._no_split_modules or ()
    fit = ", ".join(sorted(name for name in names if found.get(name) is False))
    for name in sorted(names):
        if found.get(name, True):
            why = "which holds its input embeddings" if name in found else "which it has not"
            raise RecipeError(
                f"FSDP is to wrap {name} of {type(model).__name__}, {why}; name its layers alone "
                f"(fsdp_config: {{transformer_layer_cls_to_wrap: [{fit or 'BertLayer'}]}})"
            )


def _check_sharing(model: PreTrainedModel) -> None:
    """Refuse a model in which modules share a weight, but for its input and output embeddings."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}
    holders: dict[Tensor, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            where, holder = holders.setdefault(parameter, (f"{name}.{own}", module))
            if holder is not module and not {holder, module} <= embeddings:
                same = f"{where} and {name}.{own} are one weight"
                raise RecipeError(f"Accelerate cannot shard {type(model).__name__}, in which {same}; leave FSDP out")


def _told(name: str) -> bool:
    return bool(str_to_bool(os.environ.get(name, "false").lower()))
