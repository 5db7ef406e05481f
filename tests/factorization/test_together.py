"""Layers that are solved together end where each ends by itself."""

import itertools
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from collab_compress.factorization import HeadTensor, SolverOptions
from collab_compress.factorization.als import als
from collab_compress.factorization.iterate import Channels
from collab_compress.factorization.sweep import Sweep
from collab_compress.factorization.together import Together

SHAPES = {
    "equal": [(3, 12, 11, 4)] * 4,
    "without Gram matrices": [(6, 5, 4, 3)] * 3,
    "unequal": [(3, 12, 11, 4), (2, 9, 9, 3), (3, 12, 11, 4), (4, 8, 12, 3), (2, 9, 9, 3)],
}


def close(ours, alone):
    """Whether two runs are the same up to rounding, which may move the sweep that is the last."""
    assert len(ours.errors) == pytest.approx(len(alone.errors), abs=3)
    assert ours.errors[-1] == pytest.approx(alone.errors[-1], rel=1e-4, abs=1e-7)
    assert (ours.converged, ours.breakdowns) == (alone.converged, alone.breakdowns)


def together(problems, width=None, check=lambda: None):
    """Solve (tensor, rank, options) in threads that meet."""
    width = width or len(problems)
    meeting = Together(len(problems), width, check)

    def run(place, tensor, rank, options):
        with meeting.run(place) as sweeper:
            return als(tensor, rank, SolverOptions(**options, sweeper=sweeper))

    with ThreadPoolExecutor(width) as pool:
        futures = [pool.submit(run, place, *problem) for place, problem in enumerate(problems)]
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
    return futures


def problems(make_heads, shapes, **options):
    return [(make_heads(*shape, seed=seed), 5, options) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("shapes", SHAPES)
def test_each_is_solved_as_by_itself(make_heads, shapes, width):
    given = problems(make_heads, SHAPES[shapes], sweeps=30)
    for future, (tensor, rank, options) in zip(together(given, width), given, strict=True):
        ours, alone = future.result(), als(tensor, rank, SolverOptions(**options))
        close(ours, alone)
        for name in ("query", "mixing", "key"):
            torch.testing.assert_close(getattr(ours.factors, name), getattr(alone.factors, name), rtol=1e-5, atol=1e-6)
