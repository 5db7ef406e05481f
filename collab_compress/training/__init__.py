"""Training with everything that acts on heads: in a `Trainer` or in any loop."""

from collab_compress.training.distillation import distil_, recover_, with_copies
from collab_compress.training.options import AlphasOptions, DropHeadOptions, HeadTraining, Penalty
from collab_compress.training.penalties import LOSSES, measure
from collab_compress.training.schedules import SCHEDULES
from collab_compress.training.session import HeadSession
from collab_compress.training.trainer import join_trainer_

__all__ = [
    "LOSSES",
    "SCHEDULES",
    "AlphasOptions",
    "DropHeadOptions",
    "HeadSession",
    "HeadTraining",
    "Penalty",
    "distil_",
    "join_trainer_",
    "measure",
    "recover_",
    "with_copies",
]
