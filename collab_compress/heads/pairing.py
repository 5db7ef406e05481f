"""Which heads swap: one function for each strategy of Multi-Head Rotation, and one table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from collab_compress.architectures import AttentionSite
from collab_compress.errors import HeadError
from collab_compress.heads.rotation import RotationOptions, Strategy
from collab_compress.heads.swap import Head, Pair

Scores = Mapping[str, Tensor]


def manual(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: int) -> list[Pair]:
    """Take the given pairs whose first head is in one of `sites`."""
    names = {site.name for site in sites}
    return [pair for pair in rotation.pairs if pair[0][0] in names]


def hard(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: int) -> list[Pair]:
    """Pair the k least important heads of all layers with the k most important (algorithm 1)."""
    heads = _from_least(sites, scores)
    _check_k(rotation, len(heads) // 2, sites)
    return list(zip(heads[: rotation.k], heads[::-1], strict=False))


def in_layer(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: int) -> list[Pair]:
    """Pair the k least important heads of each layer with its k most important (§3.1.1, there by hand)."""
    return [pair for site in sites for pair in hard(rotation, [site], scores, epoch)]


def soft(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: int) -> list[Pair]:
    """Pair the k least important heads of lower layers with those of upper ones (algorithm 2).

    Layer i meets L+1−i, or as printed L−i, for i = 1 … t_max. The two are never the same layer, so k may be up to H,
    where the paper stops at H/2: its own manual swap exchanges whole layers.
    """
    last = len(sites) - rotation.printed
    if rotation.t_max > last // 2:
        raise HeadError(
            f"t_max is {rotation.t_max} for {len(sites)} layers of {sites[0].kind} attention; expected at most "
            f"{last // 2}" + (", for printed pairs layer i with L−i" if rotation.printed else "")
            + ("; the strategy needs more modules than a single shared one" if last < 2 else "")
        )  # fmt: skip
    pairs: list[Pair] = []
    for lower, upper in zip(sites[: rotation.t_max], sites[last - 1 :: -1], strict=False):
        _check_k(rotation, min(lower.heads, upper.heads), sites)
        least = (_from_least([site], scores)[: rotation.k] for site in (lower, upper))
        pairs += zip(*least, strict=True)
    return pairs


def random(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: int) -> list[Pair]:
    """Draw k pairs of different heads from all layers (algorithm 3); the same for the same seed, kind and epoch."""
    heads = _heads(sites)
    _check_k(rotation, len(heads) // 2, sites)
    drawn = Random(f"{rotation.seed} {sites[0].kind} {epoch}").sample(heads, 2 * rotation.k)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


@dataclass(frozen=True)
class Pairing:
    """A strategy.

    Args:
        pair: from the settings, the modules of one kind, path → importance (H,) of each, and the epoch to pairs in
            which no head is twice. Raises HeadError where the settings ask more than the modules have.
        measures: whether it looks at importance.
        crosses: whether it may pair heads of different modules.
    """

    pair: Callable[[RotationOptions, Sequence[AttentionSite], Scores, int], list[Pair]]
    measures: bool
    crosses: bool


PAIRINGS: dict[Strategy, Pairing] = {
    "manual": Pairing(manual, measures=False, crosses=False),  # whether they cross is seen from the pairs
    "hard": Pairing(hard, measures=True, crosses=True),
    "in-layer": Pairing(in_layer, measures=True, crosses=False),
    "soft": Pairing(soft, measures=True, crosses=True),
    "random": Pairing(random, measures=False, crosses=True),
}


def _heads(sites: Sequence[AttentionSite]) -> list[Head]:
    return [(site.name, head) for site in sites for head in range(site.heads)]


def _from_least(sites: Sequence[AttentionSite], scores: Scores) -> list[Head]:
    """All heads, the least important first; equal ones in the model's order."""
    return sorted(_heads(sites), key=lambda head: float(scores[head[0]][head[1]]))


def _check_k(rotation: RotationOptions, most: int, sites: Sequence[AttentionSite]) -> None:
    if rotation.k > most:
        raise HeadError(
            f"k is {rotation.k} for {rotation.strategy!r} among {len(sites)} modules of {sites[0].kind} attention "
            f"such as {sites[0].name}, which has {sites[0].heads} heads; expected at most {most}"
        )
