r"""Spare components: a point gets more than it may keep, and later gives up the smallest.

Least squares moves components but hardly ever lets two change places: which channels of which heads are shared is
decided in the first sweeps. With some components to spare more combinations are tried, and those that a ridge makes
small are the ones that are not needed.
"""

from __future__ import annotations

import torch

from collab_compress.factorization.iterate import Channels, Direction, Iterate

DEAD = 1e-2  # times the median norm of components: what is smaller, a ridge has killed


def widened(point: Iterate, channels: Channels, count: int) -> Iterate:
    r"""Return a point with further components: the singular channels that it fits worst, each for its own head.

    With $u_j$ and $v_j$ the singular vectors of a channel of head i and $\sigma_j$ its singular value, what the point
    lacks there is $\delta_j = u_j^\top (T_i - \hat T_i) v_j = \sigma_j - u_j^\top \hat T_i v_j$, and a component
    $\delta_j\, u_j \otimes v_j$ of that head alone lowers the squared error by $\delta_j^2$, whatever else is added.

    Args:
        point: of R components.
        channels: singular channels of the heads.
        count: how many to add, up to the number of channels.

    Returns:
        The point, of R + count components; the new ones last, their three columns equally long.
    """
    values = channels.query.square().sum(0)
    fitted = channels.by_head(point.projected_query * point.projected_key) * point.mixing[:, None]
    lacking = values - fitted.sum(-1).flatten() / values.clamp_min(torch.finfo(values.dtype).tiny)
    chosen = lacking.abs().argsort(descending=True, stable=True)[:count]
    size, place = lacking[chosen].abs().pow(1 / 3), torch.arange(count, device=chosen.device)
    columns = values.new_zeros(len(values), count)
    columns[chosen, place] = size / values[chosen].sqrt().clamp_min(torch.finfo(values.dtype).tiny)
    mixing = values.new_zeros(channels.heads, count)
    mixing[chosen.div(len(values) // channels.heads, rounding_mode="floor"), place] = size * lacking[chosen].sign()
    added = Direction.of(channels, columns, mixing, columns)
    return Iterate.at(Direction(torch.cat([point.values, added.values], 1), point.heads))


def narrowed(point: Iterate, rank: int) -> Iterate:
    """Return a point without all but its R components of the largest norm, and without those that a ridge has killed.

    Args:
        point: of any number of components.
        rank: R.

    Returns:
        The point, of R components, or fewer where fewer are alive.
    """
    squares = point.grams.diagonal(dim1=1, dim2=2).prod(0)
    order = squares.argsort(descending=True, stable=True)[:rank]
    alive = squares[order] > DEAD**2 * squares[order].median()
    return Iterate.at(Direction(point.values[:, order[alive].sort().values], point.heads))
