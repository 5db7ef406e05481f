"""What can be typed after `collab-compress`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from collab_compress import CollabCompressError, Compression


@dataclass(frozen=True)
class Conversion(Compression):
    """How to convert, if at all."""

    dk: Annotated[int | None, tyro.conf.arg(metavar="N")] = None  # type: ignore[assignment]
    """Shared query/key width R, from 1 to heads × head width; at the upper end the conversion is exact."""

    def __post_init__(self) -> None:
        if self.dk is not None:
            super().__post_init__()

    @property
    def changed(self) -> list[str]:
        """Names of the options that are not at their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


@dataclass(frozen=True)
class Arguments:
    """Convert a pretrained model's attention into collaborative form, without retraining, or let its heads mix.

    Examples:
      collab-compress minilm --dk 128
      collab-compress bert-base --dk 384 --output bert-base-384
      collab-compress ./my-classifier --dk 256 --calibration sentences.txt --json report.json
      collab-compress minilm --dk 192 --form per-head
      collab-compress ./my-classifier --mix
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """minilm (embedded), a model directory, or a name on the hub (bert-base, distilbert, albert-base, org/name)."""

    compression: tyro.conf.OmitArgPrefixes[Conversion]

    mix: bool = False
    """Add head mixing (alphas), to be trained; alone, or after conversion."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-dkN, MODEL-mixed or MODEL-dkN-mixed in the current directory if not given."""

    calibration: Annotated[str, tyro.conf.arg(metavar="synthetic|none|FILE")] = "synthetic"
    """Data that says which input directions matter: random tokens, none, or a file with one text a line."""

    standalone: bool = False
    """Ship the modelling code too: people without this package load it with trust_remote_code=True."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report as JSON as well."""

    def __post_init__(self) -> None:
        if self.compression.dk is not None:
            return
        if not self.mix:
            raise CollabCompressError("nothing to do: pass --dk N to convert, --mix to let heads mix, or both")
        unused = [*self.compression.changed, *(["calibration"] if self.calibration != "synthetic" else [])]
        if unused:
            raise CollabCompressError(f"--{unused[0]} belongs to a conversion; pass --dk N too, or leave it out")

    @property
    def suffix(self) -> str:
        """What is appended to the model's name to name the output."""
        converted = "" if self.compression.dk is None else f"-dk{self.compression.dk}"
        form = "" if self.compression.form == "shared" else f"-{self.compression.form}"
        return converted + form + ("-mixed" if self.mix else "")
