"""How much is looked at: the same dataclass in the Python API and on the command line."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from collab_compress.errors import HeadError


@dataclass(frozen=True)
class Look:
    """How much is looked at."""

    dk: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Shared width R at which the cost of dense attention is counted and timed; a third of H·d if not given."""

    head_sequences: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Sequences on which heads are silenced one by one; the drift of the outputs is measured on these."""

    input_sequences: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Sequences on which inputs of queries and keys are measured, for energy and content."""

    kernel_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 1000
    """Tokens that CKA with the RBF kernel is measured on; time and memory grow with their square."""

    lengths: tuple[int, ...] = (32, 128, 512)
    """Numbers of tokens at which attention modules are timed; those beyond the model's positions are left out."""

    rounds: int = 10
    """How often each module is timed at each length."""

    seed: int = 0
    """Seed of what is drawn: tokens, sentences, samples, order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))  # lists come from JSON and YAML
        for name, least in (("head_sequences", 1), ("input_sequences", 1), ("kernel_tokens", 4), ("rounds", 2)):
            if getattr(self, name) < least:
                raise HeadError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.dk is not None and self.dk < 1:
            raise HeadError(f"dk is {self.dk}; expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise HeadError(f"seed is {self.seed}; expected a whole number from 0 to 2³² − 1")
        if min(self.lengths, default=1) < 1:
            raise HeadError(f"lengths are {', '.join(map(str, self.lengths))}; expected at least 1 token")
