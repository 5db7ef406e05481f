"""Processes that `torchrun` or `accelerate launch` started together."""

from datetime import timedelta

import torch
import torch.distributed
from accelerate import PartialState

PATIENCE = timedelta(days=2)  # while one process converts, scores or writes, the others wait


def processes() -> PartialState:
    """Give the processes that run this together; without a GPU they meet on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def leave() -> None:
    """End what the processes share, if anything; one that exits without may be aborted by the threads of it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
