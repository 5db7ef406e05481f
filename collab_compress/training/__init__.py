"""Training with everything that acts on heads: in a `Trainer` or in any loop."""

from collab_compress.training.distillation import distil_, recover_, with_copies
from collab_compress.training.options import AlphasOptions, DropHeadOptions, HeadTraining, PenaltyOptions
from collab_compress.training.penalties import LOSSES, measure
from collab_compress.training.schedules import SCHEDULES
from collab_compress.training.session import HeadSession
from collab_compress.training.trainer import HeadSeq2SeqTrainer, HeadTrainer, HeadTrainerMixin

__all__ = [
    "LOSSES",
    "SCHEDULES",
    "AlphasOptions",
    "DropHeadOptions",
    "HeadSeq2SeqTrainer",
    "HeadSession",
    "HeadTrainer",
    "HeadTrainerMixin",
    "HeadTraining",
    "PenaltyOptions",
    "distil_",
    "measure",
    "recover_",
    "with_copies",
]
