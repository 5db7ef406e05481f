import numpy as np
import pytest
import torch
from head_tensors import make_heads

from collab_compress.factorization.parafac import parafac

tensorly = pytest.importorskip("tensorly")


def test_equals_tensorly_called_directly():
    from tensorly.decomposition import parafac as direct

    tensor = make_heads(3, 8, 7, 2)
    before = tensorly.get_backend()
    ours = parafac(tensor, 4, seed=7)
    assert tensorly.get_backend() == before
    with tensorly.backend_context("pytorch"):
        _, (mixing, query, key) = direct(tensor.dense(), 4, n_iter_max=100, init="random", tol=1e-6, random_state=7)
    assert torch.equal(ours.factors.query, query)
    assert torch.equal(ours.factors.mixing, mixing)
    assert torch.equal(ours.factors.key, key)


def test_seed_and_sweeps_are_heeded():
    tensor = make_heads(3, 8, 7, 2)
    solution = parafac(tensor, 4, sweeps=5, seed=1)
    assert solution.sweeps == 5
    assert not solution.converged
    assert torch.equal(solution.factors.query, parafac(tensor, 4, sweeps=5, seed=1).factors.query)
    assert not torch.equal(solution.factors.query, parafac(tensor, 4, sweeps=5, seed=2).factors.query)
    assert parafac(tensor, tensor.full_rank).converged


@pytest.mark.parametrize("how", ["singular", "nan"])
def test_a_breakdown_gives_the_sweep_before_it(monkeypatch, how):
    tensor, solve, calls = make_heads(3, 8, 7, 2), torch.linalg.solve, []
    unbroken = parafac(tensor, 4, 2)

    def fails_in_the_third_sweep(a, b):
        calls.append(1)
        if len(calls) <= 6:
            return solve(a, b)
        return solve(a * 0, b) if how == "singular" else solve(a, b) * float("nan")

    with tensorly.backend_context("pytorch"):
        monkeypatch.setattr(tensorly, "solve", fails_in_the_third_sweep)
        solution = parafac(tensor, 4, 50)
    assert solution.breakdowns == 1
    assert not solution.converged
    assert solution.sweeps == unbroken.sweeps == 2
    assert torch.equal(solution.factors.query, unbroken.factors.query)


def test_global_random_state_is_untouched():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    torch_before = torch.get_rng_state()
    parafac(make_heads(2, 4, 4, 1), 1, 2)
    assert (np.random.get_state()[1] == before).all()
    assert torch.equal(torch.get_rng_state(), torch_before)
