"""Refits by dense least squares, an oracle for those from moments."""

import torch

from collab_compress.conversion.sequential import DAMPINGS


def weights_of(streams):
    """Return the weights (n,) of tokens whose stream (n, D) a norm divides by its size."""
    return 1 / streams.square().mean(1)


def slow_fit(used, held_back):
    """Fit by least squares with each ridge; return the change with the least held-back error, or None.

    Both hold inputs, what is lacking, and weights.
    """
    inputs, lacking, weights = used
    others, wanted, counts = held_back
    best, chosen = (wanted.square().sum(1) * counts).sum(), None
    for damping in DAMPINGS:
        mean, missing = ((part * weights[:, None]).sum(0) / weights.sum() for part in (inputs, lacking))
        root = weights.sqrt()[:, None]
        centred = (inputs - mean) * root
        ridge = (damping * centred.square().sum() / inputs.shape[1]) ** 0.5
        stacked = torch.cat([centred, ridge * torch.eye(inputs.shape[1], dtype=torch.float64)])
        right = torch.cat([(lacking - missing) * root, lacking.new_zeros(inputs.shape[1], lacking.shape[1])])
        change = torch.linalg.lstsq(stacked, right).solution
        shift = missing - mean @ change
        error = ((wanted - others @ change - shift).square().sum(1) * counts).sum()
        if error < best:
            best, chosen = error, (change, shift)
    return chosen
