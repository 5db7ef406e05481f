"""Training with everything that acts on heads, in a `Trainer` or in any loop, and towards a dense teacher."""

from collab_compress.training.distillation import DistillationTrainer
from collab_compress.training.head_training import (
    LOSSES,
    SCHEDULES,
    AlphasOptions,
    DropHeadOptions,
    HeadTraining,
    PenaltyOptions,
)
from collab_compress.training.session import HeadSession
from collab_compress.training.trainer import HeadSeq2SeqTrainer, HeadTrainer, HeadTrainerMixin

__all__ = [
    "LOSSES",
    "SCHEDULES",
    "AlphasOptions",
    "DistillationTrainer",
    "DropHeadOptions",
    "HeadSeq2SeqTrainer",
    "HeadSession",
    "HeadTrainer",
    "HeadTrainerMixin",
    "HeadTraining",
    "PenaltyOptions",
]
