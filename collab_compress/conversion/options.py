"""What to convert and how: the same dataclass in the Python API and on the command line."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import CompressionError
from collab_compress.factorization import FORMS, SOLVERS, Form


@dataclass(frozen=True)
class Compression:
    """How to turn dense attention into its collaborative form."""

    rank: Annotated[int, tyro.conf.arg(name="dk", metavar="N")]
    """Shared query/key width R, from 1 to heads × head width; at the upper end the conversion is exact."""

    form: Form = "shared"
    """Whether heads share their channels, or each has its own, as many as pay (per-head: cheaper on long inputs)."""

    solver: str = "als"
    """How to decompose: als (ours) or parafac (the papers' recipe, through tensorly)."""

    sweeps: int | None = None
    """Most passes over the factors; the solver's own default if not given."""

    tolerance: float | None = None
    """Stop once a sweep lowers the relative error by less; the solver's own default if not given."""

    damping: float = 1e-3
    """Share of the mean input variance added to every direction, so that unseen ones keep some weight."""

    centre: bool = True
    """Weigh by covariances, and fold what the mean query loses into the content bias."""

    modules: Annotated[str, tyro.conf.arg(metavar="GLOB")] = "*"
    """Convert only attention modules whose path matches."""

    kinds: tuple[Kind, ...] = KINDS
    """Convert only attention of these kinds: encoder and decoder (self-attention), cross."""

    seed: int = 0
    """Seed of random tokens and random starts."""

    device: str | None = None
    """Where to decompose, as torch names it (cpu, cuda:0); where the model is if not given."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise CompressionError(f"unknown form {self.form!r}; expected one of {', '.join(FORMS)}")
        if self.form == "per-head" and (self.solver, self.sweeps, self.tolerance) != ("als", None, None):
            raise CompressionError("the per-head form is solved in closed form; leave out solver, sweeps, tolerance")
        if not isinstance(self.rank, int):
            raise CompressionError(f"dk is {self.rank!r}; expected a whole number")
        if self.rank < 1:
            raise CompressionError(f"dk is {self.rank}; expected at least 1")
        object.__setattr__(self, "kinds", tuple(self.kinds))  # lists come from JSON and YAML
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown or not self.kinds:
            raise CompressionError(f"kinds are {', '.join(unknown) or 'none'}; expected some of {', '.join(KINDS)}")
        if self.solver not in SOLVERS:
            raise CompressionError(f"unknown solver {self.solver!r}; expected one of {', '.join(sorted(SOLVERS))}")
        if self.sweeps is not None and self.sweeps < 1:
            raise CompressionError(f"sweeps is {self.sweeps}; expected at least 1")
        if self.damping < 0:
            raise CompressionError(f"damping is {self.damping}; expected 0 or more")
