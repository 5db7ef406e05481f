"""Training whose processes share a model's weights: FSDP2, which Accelerate makes; anything else is refused."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils import str_to_bool
from torch import Tensor
from transformers import Trainer, TrainingArguments

from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError

USED = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def sharding(allowed: bool) -> Iterator[None]:
    """Let trainers that are made within shard their models, or have them leave those whole.

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
    """Say whether a trainer's arguments, or else `accelerate launch`, ask for FSDP2.

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
            "FSDP1 keeps weights in pieces that do not follow heads; take FSDP2 (fsdp_config: {version: 2}, or "
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
        RecipeError: it was to shard, and cannot.
    """
    if not is_to_shard(trainer.args):
        return
    if not trainer.is_fsdp_enabled:
        raise RecipeError("FSDP was asked for, and Accelerate shards on accelerators only; leave it out on CPUs")
    plugin = trainer.accelerator.state.fsdp_plugin
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    for name in plugin.transformer_cls_names_to_wrap or ():
        if name not in kinds:
            raise RecipeError(f"FSDP is to wrap {name}, and {type(trainer.model).__name__} has none; see its modules")
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # those of what it was to write
    plugin.set_state_dict_type("FULL_STATE_DICT")


def whole_weights(trainer: Trainer) -> dict[str, Tensor] | None:
    """Give the weights of a model that is sharded, to the main process alone; None if it is whole.

    Every process must call it.
    """
    weights: dict[str, Tensor] | None = None
    if trainer.is_fsdp_enabled:
        weights = trainer.accelerator.get_state_dict(trainer.model)
    return weights


def _told(name: str) -> bool:
    return bool(str_to_bool(os.environ.get(name, "false").lower()))
