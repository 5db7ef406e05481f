"""Training whose processes share a model's weights by Accelerate's FSDP2; DeepSpeed and FSDP1 are refused."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env, patch_environment
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import PreTrainedModel, Trainer, TrainingArguments

from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError

USED = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def sharding(allowed: bool) -> Iterator[None]:
    """Allow or forbid trainers created within to shard their models, as their arguments or `accelerate launch` ask.

    Accelerate writes the choice of one trainer into the environment, where the next would find it; the environment is
    restored at the end.
    """
    used = os.environ.get(USED, "false") if allowed else "false"
    with patch_environment(**{USED: used, EFFICIENT: os.environ.get(EFFICIENT, "false")}):
        yield


def refuse_deepspeed(arguments: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed, in training arguments or from `accelerate launch`.

    Raises:
        RecipeError: it is asked for.
    """
    if arguments.get("deepspeed") or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise RecipeError(
            "recipes do not support DeepSpeed; shard with FSDP2 instead (arguments: {fsdp: true}), or leave "
            "models whole"
        )


def is_to_shard(arguments: TrainingArguments) -> bool:
    """Return whether a trainer's arguments, or else `accelerate launch`, ask for FSDP2.

    Raises:
        RecipeError: they ask for something else of FSDP, or there is one process.
    """
    if arguments.fsdp_plugin_args is not None:
        version = arguments.fsdp_plugin_args["fsdp_version"]
        efficient = arguments.fsdp_plugin_args["cpu_ram_efficient_loading"]
    elif parse_flag_from_env(USED):
        version, efficient = int(os.environ.get("FSDP_VERSION", "1")), parse_flag_from_env(EFFICIENT)
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
    """Let a trainer that shards write whole weights into its checkpoints.

    Raises:
        RecipeError: the model cannot be sharded.
    """
    if not is_to_shard(trainer.args):
        return
    if not trainer.is_fsdp_enabled:
        raise RecipeError("FSDP was asked for, and Accelerate shards on accelerators only; leave it out on CPUs")
    plugin = trainer.accelerator.state.fsdp_plugin
    _check_wrapping(trainer.model, plugin)
    _check_sharing(trainer.model)
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # otherwise those of the former type stay
    plugin.set_state_dict_type("FULL_STATE_DICT")


def whole_weights(trainer: Trainer) -> dict[str, Tensor] | None:
    """Gather the weights of a sharded model on the main process; None if the model is not sharded.

    All processes call it together.
    """
    if not trainer.is_fsdp_enabled:
        return None
    weights: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model)
    names: dict[Tensor, str] = {}
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        if name in weights:
            weights[name] = weights[names.setdefault(parameter, name)]  # tied weights were gathered twice
    return weights


def _check_wrapping(model: PreTrainedModel, plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse to wrap unknown layers, and those with the input embeddings, which Accelerate wraps anyway."""
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    embeddings = model.get_input_embeddings()
    embeds = {type(module).__name__: embeddings in module.modules() for module in model.modules()}
    names = plugin.transformer_cls_names_to_wrap or model._no_split_modules or ()
    fitting = ", ".join(sorted(name for name in names if embeds.get(name) is False))
    for name in sorted(names):
        if embeds.get(name, True):
            why = "which holds its input embeddings" if name in embeds else "which it does not have"
            raise RecipeError(
                f"FSDP is to wrap {name} of {type(model).__name__}, {why}; name its layers alone "
                f"(fsdp_config: {{transformer_layer_cls_to_wrap: [{fitting or 'BertLayer'}]}})"
            )


def _check_sharing(model: PreTrainedModel) -> None:
    """Refuse a model in which modules share a weight, except for its input and output embeddings."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}
    holders: dict[Tensor, tuple[str, nn.Module]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            other, holder = holders.setdefault(parameter, (f"{module_name}.{name}", module))
            if holder is not module and not {holder, module} <= embeddings:
                raise RecipeError(
                    f"Accelerate cannot shard {type(model).__name__}, in which {other} and {module_name}.{name} are "
                    "one weight; leave FSDP out"
                )
