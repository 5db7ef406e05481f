"""What can be typed after `collab-compress`."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from collab_compress import CollabCompressError, Compression

from .options import Model, Saving


@dataclass(frozen=True)
class Conversion(Compression):
    """How to convert, if at all."""

    def __post_init__(self) -> None:
        if self.asked:
            super().__post_init__()

    @property
    def asked(self) -> bool:
        """Whether anything is to be converted."""
        return self.dk is not None or self.dv is not None

    @property
    def changed(self) -> list[str]:
        """Names of the options that are not at their defaults."""
        return [each.name for each in fields(self) if getattr(self, each.name) != each.default]


@dataclass(frozen=True)
class Arguments:
    """Convert a pretrained model's attention into collaborative form, without retraining, or let its heads mix.

    Examples:
      collab-compress minilm --dk 128
      collab-compress minilm --dk 192 --dv 252
      collab-compress bert-base --dk 384 --output bert-base-384
      collab-compress ./my-classifier --dk 256 --calibration sentences.txt --json report.json
      collab-compress minilm --dk 192 --form per-head
      collab-compress minilm --dk 128 --recover
      collab-compress ./my-classifier --mix
    """

    model: Model
    """minilm (embedded), a model directory, or a name on the hub (bert-base, distilbert, albert-base, org/name)."""

    compression: tyro.conf.OmitArgPrefixes[Conversion]

    recover: Annotated[int | None, tyro.conf.arg(metavar="[STEPS]")] = None
    """Then bring the converted attention nearer to the dense model's by a short distillation without labels, on the
    same kind of data; 150 steps if no number is given."""

    mix: bool = False
    """Add head mixing (alphas), to be trained; alone, or after conversion."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-dkN, -dvN, with -per-head, -recovered and -mixed where that was asked for, in the current
    directory if not given."""

    calibration: Annotated[str, tyro.conf.arg(metavar="synthetic|none|FILE")] = "synthetic"
    """Data that says which input directions matter: random tokens, none, or a file with one text a line."""

    standalone: bool = False
    """Ship the modelling code too: people without this package load it with trust_remote_code=True."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)

    def __post_init__(self) -> None:
        if self.compression.asked:
            if self.recover is not None and self.calibration == "none":
                raise CollabCompressError("--recover trains on calibration data; leave --calibration none out")
            return
        if not self.mix:
            raise CollabCompressError("nothing to do: pass --dk N or --dv N to convert, --mix to let heads mix, or both")
        unused = [
            *self.compression.changed,
            *(["calibration"] if self.calibration != "synthetic" else []),
            *([] if self.recover is None else ["recover"]),
        ]
        if unused:
            raise CollabCompressError(f"--{unused[0]} belongs to a conversion; pass --dk N or --dv N too, or leave it out")

    @property
    def suffix(self) -> str:
        """What is appended to the model's name to name the output."""
        widths = {"dk": self.compression.dk, "dv": self.compression.dv}
        converted = "".join(f"-{name}{width}" for name, width in widths.items() if width is not None)
        form = "" if self.compression.form == "shared" else f"-{self.compression.form}"
        recovered = "" if self.recover is None else "-recovered"
        return converted + form + recovered + ("-mixed" if self.mix else "")
