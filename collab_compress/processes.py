"""Processes that `accelerate launch` started together."""

from datetime import timedelta

import torch
from accelerate import PartialState

PATIENCE = timedelta(days=2)  # while one process converts, scores or writes, the others wait


def processes() -> PartialState:
    """Give the processes that run this together; without a GPU they meet on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
