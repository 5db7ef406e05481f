"""What to convert and how: the same dataclass in the Python API and on the command line."""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal, TypeAlias, get_args

import tyro

from collab_compress.architectures import KINDS, Kind
from collab_compress.attention import FORMS, Form
from collab_compress.errors import CompressionError

Effort: TypeAlias = Literal["best", "fast"]
LARGEST_DAMPING = 1e6
SOLVERS = max((form.solvers for form in FORMS.values()), key=len)  # where there is a choice


@dataclass(frozen=True)
class Compression:
    """How to turn dense attention into its collaborative form."""

    dk: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of queries and keys, all heads together: from 1 to heads × head width, where the conversion is exact; a
    third of that is where to begin, and collab-analyze MODEL --sections energy suggests one. They stay dense if not
    given."""

    dv: Annotated[int | None, tyro.conf.arg(metavar="N")] = field(default=None, kw_only=True)
    """Width of values and of what the output projection reads, all heads together: from 1 to heads × head width,
    where the conversion is exact; two thirds of that is where to begin. They stay dense if not given."""

    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = field(default=None, kw_only=True)
    """Share of the attention's parameters to keep, in place of dk, dv and form: each module gets its own widths, in
    the form with the fewest operations on inputs of `length` tokens, or of the length that nine in ten texts do not
    exceed, or else of 128 tokens."""

    form: Form = "shared"
    """Whether heads share their channels, or each has its own, as many as pay (per-head: cheaper on long inputs)."""

    equal_heads: bool = field(default=False, kw_only=True)
    """In the per-head form: all heads equally wide, as a stock model has them, in place of as wide as pays."""

    solver: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(SOLVERS)}}}")] = "als"
    """How to decompose: als (ours) or parafac (the papers' recipe, through tensorly)."""

    effort: Effort = field(default="best", kw_only=True)
    """How long to look for the factors of queries and keys: best is the solver's own default, fast two fifths of
    its sweeps, for errors about 2 % higher."""

    sweeps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Most passes over the factors; the solver's own default if not given."""

    tolerance: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """Stop once a sweep lowers the error by less than this share of it (parafac: of the heads' norm); the
    solver's own default if not given."""

    damping: float = 1e-3
    """Share of the mean input variance added to every direction, so that unseen ones keep some weight."""

    centre: bool | None = None
    """Weigh by covariances, and fold what the mean query loses into the content bias; None centres keys alone where
    queries have no bias (T5), so that no content bias appears there, which would take room in key caches."""

    sequences: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Calibration sequences: so many random ones (384 if not given, 128 with `length`), or a random sample of the
    texts (all of them if not given)."""

    length: Annotated[int | None, tyro.conf.arg(metavar="T")] = None
    """Tokens of a random sequence (8 to 128 if not given), or where texts are cut (at the model's limit if not
    given)."""

    modules: Annotated[str, tyro.conf.arg(metavar="GLOB")] = "*"
    """Convert only attention modules whose path matches."""

    kinds: tuple[Kind, ...] = KINDS
    """Convert only attention of these kinds: encoder and decoder (self-attention), cross."""

    seed: int = 0
    """Seed of random tokens and random starts."""

    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None
    """Where to decompose, as torch names it (cpu, cuda:0; cuda is each process's own GPU); where the model is if not
    given, or the CPU if that device has no float64."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise CompressionError(f"unknown form {self.form!r}; expected one of {', '.join(FORMS)}")
        if self.keep is not None:
            self._check_keep()
        elif self.dk is None and self.dv is None:
            raise CompressionError(
                "none of dk, dv and keep is given; pass the width of queries and keys, of values, or a share to keep"
            )
        of_scores = (self.form, self.solver, self.sweeps, self.tolerance, self.effort)
        if self.dk is None and self.keep is None and of_scores != ("shared", "als", None, None, "best"):
            raise CompressionError("form, solver, sweeps, tolerance and effort are for queries and keys; pass dk too")
        solvers = FORMS[self.form].solvers
        if self.equal_heads and self.form != "per-head":
            raise CompressionError("equal_heads is for the per-head form; pass form='per-head' too, or leave it out")
        if len(solvers) == 1 and of_scores[1:] != ("als", None, None, "best"):
            raise CompressionError(
                f"the {self.form} form is solved in closed form; leave out solver, sweeps, tolerance, effort"
            )
        if self.effort not in get_args(Effort):
            raise CompressionError(f"unknown effort {self.effort!r}; expected one of {', '.join(get_args(Effort))}")
        if self.effort == "fast" and (self.sweeps is not None or self.solver != "als"):
            raise CompressionError("effort 'fast' says how many sweeps als makes; leave out sweeps and other solvers")
        object.__setattr__(self, "kinds", tuple(self.kinds))  # lists come from JSON and YAML
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown or not self.kinds:
            raise CompressionError(f"kinds are {', '.join(unknown) or 'none'}; expected some of {', '.join(KINDS)}")
        if len(solvers) > 1 and self.solver not in solvers:
            raise CompressionError(f"unknown solver {self.solver!r}; expected one of {', '.join(sorted(solvers))}")
        for name in ("dk", "dv", "sweeps", "sequences", "length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise CompressionError(f"{name} is {value!r}; expected a whole number")
            if value is not None and value < 1:
                raise CompressionError(f"{name} is {value}; expected at least 1")
        if not 0 <= self.damping <= LARGEST_DAMPING:
            raise CompressionError(
                f"damping is {self.damping}; expected 0 or more, up to {LARGEST_DAMPING:g} (calibration 'none' "
                "weighs all directions alike)"
            )
        if self.tolerance is not None and not 0 <= self.tolerance < inf:
            raise CompressionError(f"tolerance is {self.tolerance}; expected a finite number, 0 or more")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise CompressionError(f"seed is {self.seed}; expected a whole number from 0 to 2³² − 1")

    def _check_keep(self) -> None:
        if (self.dk, self.dv, self.form) != (None, None, "shared"):
            raise CompressionError("keep chooses dk, dv and form; leave those out, or leave out keep")
        if not isinstance(self.keep, int | float) or not 0 < self.keep < 1:
            raise CompressionError(f"keep is {self.keep!r}; expected a number between 0 and 1")
