"""Refits by dense least squares, an oracle for those from moments."""

import torch

from collab_compress.conversion.sequential import DAMPINGS


def slow_fit(used, held_back):
    """Fit by least squares with each ridge; return the change with the least held-back error, or None."""
    inputs, lacking = used
    others, wanted = held_back
    best, chosen = wanted.square().sum(), None
    for damping in DAMPINGS:
        centred = inputs - inputs.mean(0)
        ridge = (damping * centred.square().mean() * len(inputs)) ** 0.5
        stacked = torch.cat([centred, ridge * torch.eye(inputs.shape[1], dtype=torch.float64)])
        right = torch.cat([lacking - lacking.mean(0), lacking.new_zeros(inputs.shape[1], lacking.shape[1])])
        change = torch.linalg.lstsq(stacked, right).solution
        shift = lacking.mean(0) - inputs.mean(0) @ change
        error = (wanted - others @ change - shift).square().sum()
        if error < best:
            best, chosen = error, (change, shift)
    return chosen
