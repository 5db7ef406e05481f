"""Options of conversions and reports: the same dataclasses in the Python API, on the command line and in recipes.

Nothing large is imported here, so that a command can print its help at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, get_args

import tyro

from collab_compress_options.errors import CalibrationError, CompressionError, HeadError, check_type, shown

Kind: TypeAlias = Literal["encoder", "decoder", "cross"]
"""Self-attention of an encoder or of a decoder, or cross-attention."""

KINDS: tuple[Kind, ...] = get_args(Kind)
Method: TypeAlias = Literal["als", "parafac"]
SECTION_NAMES = (
    "widths",
    "mixing",
    "cost",
    "similarity",
    "diversity",
    "patterns",
    "attention_maps",
    "dominance",
)
"""Sections of a report, in the order of the page."""

MAX_DAMPING = 1e6
KEEP = 0.5  # share of the layers' operations that a conversion keeps by default
MAX_SWEEPS = 1_000_000
LARGEST_SEED = 2**32 - 1  # of NumPy's generators, which take the fewest


def check_counts(options: Any, error: type[Exception], *names: str, least: int = 1, most: float = inf) -> None:
    """Make some fields of `options` ints; raise `error` for one that is no whole number from `least` to `most`.

    A field that is None by default may be None.
    """
    for name in names:
        value = getattr(options, name)
        if value is None and getattr(type(options), name, least) is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise error(f"{name} is {shown(value)}; expected a whole number")
        count = int(value)  # NumPy's are not written as JSON
        if count < least:
            raise error(f"{name} is {count}; expected at least {least}")
        if count > most:
            raise error(f"{name} is {count}; expected at most {most:,}")
        object.__setattr__(options, name, count)


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise a HeadError unless a name is one of those that are known."""
    if name not in (names := sorted(known)):
        raise HeadError(f"unknown {what} {name!r}; expected one of {', '.join(names)}")


def check_kinds(what: str, kinds: tuple[Kind, ...]) -> None:
    """Raise a HeadError unless these are kinds of attention, each once."""
    if isinstance(kinds, str) or not kinds or len(set(kinds)) < len(kinds):
        raise HeadError(f"{what}: kinds are {kinds!r}; expected some of {', '.join(KINDS)}, each once")
    for kind in kinds:
        check_known(f"kind of attention for {what}", kind, KINDS)


@dataclass(frozen=True, kw_only=True)
class Solver:
    """How the factors of queries and keys, and the channels of values, are computed.

    Example:
        >>> Solver(sweeps=36, damping=0.01).sweeps
        36
    """

    method: tyro.conf.Suppress[Method] = "als"
    """Solver of queries and keys: als (ours) or parafac (the papers' recipe, through tensorly)."""

    sweeps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Most passes over the factors of queries and keys; the solver's own default if not given. 36 take two fifths of
    that time, for errors about 2 % higher. Rotary models are solved in closed form, without any."""

    damping: float = 1e-3
    """Share of the mean input variance added to every direction, so that unseen ones keep some weight."""

    refit: bool | None = None
    """Refit the layers that write to the residual stream, in closed form, towards the dense model's hidden states:
    the output projections of attention and the second layers of feed-forward blocks. If not given, they are refitted
    if the calibration data are texts or batches, and with dff, layers or keep."""

    bf16: bool = False
    """Multiply in bfloat16 where layers of a float32 model are converted, as in mixed-precision training: faster on
    GPUs and on processors with instructions for it (AVX512-BF16, AMX). Processors that only emulate it (x86 without
    AVX-512) go on in float32. Results differ by rounding. Widths and layers are chosen in float32."""

    seed: int = 0
    """Seed of random tokens and random starts."""

    device: tyro.conf.Suppress[str | None] = None
    """Device of the decomposition, as torch names it (cpu, cuda:0; cuda is each process's own GPU); the model's if
    not given, or the CPU if that has no float64."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise CompressionError(f"unknown solver {self.method!r}; expected one of {', '.join(get_args(Method))}")
        check_counts(self, CompressionError, "sweeps", most=MAX_SWEEPS)
        check_counts(self, CompressionError, "seed", least=0, most=LARGEST_SEED)
        if not isinstance(self.damping, Real) or not 0 <= self.damping <= MAX_DAMPING:
            raise CompressionError(f"damping is {shown(self.damping)}; expected 0 or more, up to {MAX_DAMPING:g}")
        if self.refit not in (None, True, False):
            raise CompressionError(f"refit is {shown(self.refit)}; expected True, False or None")
        if not isinstance(self.bf16, bool):
            raise CompressionError(f"bf16 is {shown(self.bf16)}; expected True or False")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What to convert, how wide, and in which form.

    Example:
        >>> compression = Compression(dk=128, dv=192, solver=Solver(sweeps=36))
        >>> compression.with_solver(seed=1).solver.seed
        1
    """

    dk: Annotated[int | None, tyro.conf.arg(metavar="N")] = field(default=None, kw_only=False)
    """Width of queries and keys, all heads together: from 1 to heads × head width, where the conversion is exact;
    with grouped queries the key–value heads count (SmolLM2-135M: 3 × 64 = 192, not 576). Half of that is where to
    begin, and collab-analyze MODEL --sections widths shows what each loses. They stay dense if another width is given
    alone."""

    dv: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of values and of what the output projection reads, all heads together: from 1 to heads × head width,
    where the conversion is exact; with grouped queries the key–value heads count. Two thirds of
    that is where to begin. They stay dense if another width is given alone."""

    dff: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of all feed-forward blocks: from 1 to the model's own (`intermediate_size` of most configs); half of that
    is where to begin, best with texts like yours to calibrate on. They stay as they are if another width is given
    alone."""

    layers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of layers that each stack keeps, encoder and decoder alike; those go that matter least on the
    calibration data. A stack that has no more keeps its own. Widths are then those of the layers that stay."""

    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of the layers' operations to keep, in place of dk, dv and dff: of all widths of attention and of
    feed-forward blocks that keep it, those that lose least. Operations are counted for inputs of the calibration's
    `length`, or of the length that nine in ten texts do not exceed, or of 128 tokens."""

    head_dim: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Width of one head of queries and keys: how many of the dk shared channels each head reads, its content bias
    included. The dense heads' width if not given; as much as dk lets every head read all channels, as in the paper,
    which is slower on long inputs."""

    modules: Annotated[str, tyro.conf.arg(metavar="GLOB")] = "*"
    """Convert only attention modules whose path matches, as '*.encoder.*' or '*.layers.[0-3].*'. `dff`, `layers`,
    `keep` and refitting still apply everywhere."""

    solver: Solver = Solver()
    """How the conversion is computed."""

    def __post_init__(self) -> None:
        if (self.keep, self.dk, self.dv, self.dff, self.layers) == (None, None, None, None, None):
            raise CompressionError(
                "none of dk, dv, dff, layers and keep is given; pass the width of queries and keys, of values, of "
                "feed-forward blocks, a number of layers, or a share to keep"
            )
        check_counts(self, CompressionError, "dk", "dv", "dff", "layers", "head_dim")
        if self.keep is not None:
            self._check_keep()
        check_type("modules", self.modules, str, CompressionError)
        check_type("solver", self.solver, Solver, CompressionError)
        self._check_solver()

    def _check_keep(self) -> None:
        if (self.dk, self.dv, self.dff, self.layers, self.head_dim) != (None, None, None, None, None):
            raise CompressionError(
                "keep chooses dk, dv, dff and head_dim; leave those and layers out, or leave out keep"
            )
        if not isinstance(self.keep, int | float) or not 0 < self.keep < 1:
            raise CompressionError(f"keep is {shown(self.keep)}; expected a number between 0 and 1")

    def _check_solver(self) -> None:
        """Refuse settings of queries and keys where those stay dense."""
        solver = self.solver
        iterates = (solver.method, solver.sweeps) != ("als", None)
        if self.dk is None and self.keep is None and (self.head_dim is not None or iterates):
            raise CompressionError(
                "head_dim, solver and sweeps apply to queries and keys; pass dk, or leave them out"
            )
        if solver.method == "parafac" and self.head_dim is not None and self.head_dim < (self.dk or inf):
            raise CompressionError("with parafac heads read all channels; leave out head_dim, or pass solver als")
        if (self.dff is not None or self.keep is not None) and solver.refit is False:
            raise CompressionError("dff and keep refit the layers that read the neurons; leave out refit")

    def with_solver(self, **changes: Any) -> "Compression":
        """Return a copy with other settings of the solver."""
        return replace(self, solver=replace(self.solver, **changes))


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How much of the calibration data is used.

    Example:
        >>> CalibrationOptions(sequences=0)
        Traceback (most recent call last):
            ...
        collab_compress.errors.CalibrationError: sequences is 0; expected at least 1
    """

    sequences: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of calibration sequences: of random ones (384 if not given, 128 with `length`), of texts or their
    passages, drawn at random (all if not given), or of built-in texts and random ones together; of several sources,
    that of each."""

    length: Annotated[int | None, tyro.conf.arg(metavar="T")] = None
    """Tokens of a random sequence (8 to 128 if not given), or of a text at most (the model's limit if not given):
    longer ones become several passages, and pairs are cut, or read in windows by a question-answering model."""

    def __post_init__(self) -> None:
        check_counts(self, CalibrationError, "sequences", "length")


@dataclass(frozen=True)
class ReportOptions:
    """How much a report measures.

    Example:
        >>> ReportOptions(lengths=[32, 128]).lengths
        (32, 128)
    """

    dk: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Shared width R at which the cost of dense attention is counted and timed. If neither this nor dv is given, dk
    is a third of the dense keys' width; where queries and keys cannot be converted, dv is."""

    dv: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of values, all heads together, at which the cost of dense attention is counted and timed."""

    dff: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of feed-forward blocks at which their cost is counted; half of theirs if not given."""

    head_sequences: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Sequences on which heads are silenced one by one; the output error is measured on these."""

    input_sequences: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Sequences on which the losses of widths are measured."""

    lengths: tuple[int, ...] = (32, 128, 512)
    """Numbers of tokens at which attention modules are timed; those beyond the model's positions are left out."""

    rounds: int = 10
    """How often each module is timed at each length."""

    seed: int = 0
    """Seed of random tokens, sentences, samples and the order of timing."""

    def __post_init__(self) -> None:
        check_counts(self, HeadError, "head_sequences", "input_sequences", "dk", "dv", "dff")
        check_counts(self, HeadError, "rounds", least=2)
        check_counts(self, HeadError, "seed", least=0, most=LARGEST_SEED)
        if not isinstance(self.lengths, tuple | list) or not all(isinstance(length, int) for length in self.lengths):
            raise HeadError(f"lengths is {self.lengths!r}; expected numbers of tokens, such as (32, 128)")
        object.__setattr__(self, "lengths", tuple(self.lengths))  # lists come from JSON and YAML
        if min(self.lengths, default=1) < 1:
            raise HeadError(f"lengths are {', '.join(map(str, self.lengths))}; expected at least 1 token")
