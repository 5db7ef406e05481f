"""The state of the processes that `torchrun` or `accelerate launch` started together."""

import os
from datetime import timedelta

import torch
import torch.distributed
from accelerate import PartialState

from collab_compress.errors import CollabCompressError, one_line

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(days=2)  # for which processes wait while one converts, scores or writes


def process_state() -> PartialState:
    """Return the state of the processes that run together; without a GPU they communicate on the CPU."""
    names = [name for name in LAUNCHED if name in os.environ]  # Accelerate sets others itself
    try:
        return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
    except (KeyError, ValueError, torch.distributed.DistError) as error:
        if not names:
            raise
        raise CollabCompressError(
            f"the environment says that several processes were started ({', '.join(names)}), but they cannot "
            f"connect: {one_line(error)}; unset these variables, or start with torchrun"
        ) from error


def end_processes() -> None:
    """Destroy the process group, if there is one; without, its threads may abort a process that exits."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
