"""Which heads: checked lists of them, and the least important ones."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from collab_compress.architectures import AttentionSite
from collab_compress.errors import HeadError


def check_heads(
    sites: Sequence[AttentionSite], heads: Mapping[str, Collection[int]]
) -> list[tuple[AttentionSite, list[int]]]:
    """Pair the modules that are named with their heads, in ascending order; those without a head are left out.

    Raises:
        HeadError: a module or a head is not known.
    """
    known = {site.name: site for site in sites}
    for name, chosen in heads.items():
        if name not in known:
            raise HeadError(f"no attention module {name!r}; there are {', '.join(known)}")
        for head in chosen:
            if not isinstance(head, int) or not 0 <= head < known[name].heads:
                raise HeadError(f"{name} has no head {head!r}; its heads are 0 to {known[name].heads - 1}")
    return [(site, sorted(set(heads[site.name]))) for site in sites if heads.get(site.name)]


def least_important(
    importance: Mapping[str, Tensor], share: float, *, keep_one: bool = False
) -> dict[str, list[int]]:
    """Pick the least important heads over all modules.

    Args:
        importance: module path → (H,), as `head_importance` gives.
        share: how much of all heads to pick, 0 to 1; rounded to whole heads. Of equals the first are picked.
        keep_one: spare the most important head of each module, as physical removal must; fewer than the share are
            picked where nothing else is left.

    Returns:
        Module path → heads in ascending order; modules without any are left out.

    Raises:
        HeadError: the share is not between 0 and 1, or an importance is no list of numbers.
    """
    if not 0 <= share <= 1:
        raise HeadError(f"share of heads is {share}; expected 0 to 1")
    for name, values in importance.items():
        if values.dim() != 1 or not len(values) or not bool(values.isfinite().all()):
            raise HeadError(f"importance of {name}: got {values}; expected one finite number a head")
    spared = {(name, int(values.argmax())) for name, values in importance.items()} if keep_one else set()
    ranked = sorted(
        ((float(value), name, head) for name, values in importance.items() for head, value in enumerate(values)),
        key=lambda entry: entry[0],
    )
    picked: dict[str, list[int]] = {}
    for _, name, head in [entry for entry in ranked if entry[1:] not in spared][: round(share * len(ranked))]:
        picked.setdefault(name, []).append(head)
    return {name: sorted(picked[name]) for name in importance if name in picked}
