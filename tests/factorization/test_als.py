import itertools
from dataclasses import replace

import pytest
import torch
from head_tensors import SHAPES, dense_of, make_factors, make_heads, truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor
from collab_compress.factorization.als import als, ridge_at, width_at
from collab_compress.factorization.point import Channels, LineSearch, Point, Step

SOLVER = "collab_compress.factorization.als"


def followed(tensor, rank, **options):
    """Return the solution, and the errors that were reported after its sweeps."""
    errors = []
    return als(tensor, rank, **options, progress=lambda _, error: errors.append(error)), errors


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(1, 15), st.integers(0, 99), st.integers(1, 25))
def test_errors_fall_and_end_no_higher_than_the_truncation(shape, rank, seed, sweeps):
    tensor = make_heads(*shape, seed=seed)
    rank = min(rank, tensor.full_rank)
    solution, errors = followed(tensor, rank, sweeps=sweeps)
    start = (tensor.dense() - dense_of(truncation(tensor, rank))).norm() / tensor.dense().norm()
    final = (tensor.dense() - dense_of(solution.factors)).norm() / tensor.dense().norm()
    errors = [start.item(), *errors]
    assert all(later <= earlier + 1e-7 for earlier, later in itertools.pairwise(errors))
    assert final.item() == pytest.approx(errors[-1], abs=1e-7)
    assert solution.sweeps == len(errors) - 1 <= sweeps


def error_of(tensor, rank, reads):
    """Return the error with heads that read some components, once their number is checked."""
    factors = als(tensor, rank, reads=reads).factors
    assert int(factors.mixing.count_nonzero(1).max()) <= reads
    return float(tensor.relative_error(factors))


@settings(max_examples=3, derandomize=True)
@given(st.tuples(st.integers(2, 4), st.integers(5, 9), st.integers(5, 9), st.integers(2, 4)), st.data())
def test_more_channels_and_more_reads_are_no_worse(shape, data):
    """The solver is local: another number of channels may lead it to a point that is worse by 2 %."""
    tensor = make_heads(*shape, seed=data.draw(st.integers(0, 99)))
    rank = data.draw(st.integers(2, tensor.full_rank - 1))
    reads = data.draw(st.integers(1, min(rank, tensor.head_width)))
    error = error_of(tensor, rank, reads)
    assert error <= float(tensor.relative_error(truncation(tensor, min(rank, shape[0] * reads), equal=True))) + 1e-9
    assert error_of(tensor, rank, min(reads + 1, rank)) <= 1.02 * error
    assert error_of(tensor, rank + 1, reads) <= 1.02 * error + 1e-7


def test_heads_that_read_few_components_are_at_a_fixed_point():
    """Dense least squares for the mixing weights that may differ from zero gain next to nothing."""
    tensor = make_heads(4, 12, 11, 4)
    factors = als(tensor, 9, reads=3).factors
    for head, dense in enumerate(tensor.dense()):
        reads = factors.mixing[head].nonzero()[:, 0]
        assert len(reads) == 3
        design = torch.einsum("qr,kr->qkr", factors.query[:, reads], factors.key[:, reads]).flatten(0, 1)
        best = torch.linalg.lstsq(design, dense.flatten()[:, None]).solution[:, 0]
        residuals = [(dense.flatten() - design @ row).norm() for row in (factors.mixing[head, reads], best)]
        assert residuals[0] <= 1.001 * residuals[1]


@pytest.mark.parametrize("case", ["zero head", "twin heads", "one head", "width one", "huge", "tiny", "dead inputs"])
@pytest.mark.parametrize(("rank", "reads"), [(1, None), (3, None), (3, 1)])
def test_degenerate_heads_are_survived(case, rank, reads):
    shape = {"one head": (1, 8, 7, 4), "width one": (4, 8, 7, 1)}.get(case, (3, 8, 7, 2))
    heads = make_heads(*shape)
    query, key = heads.query.clone(), heads.key.clone()
    if case == "zero head":
        query[0] = 0
    elif case == "twin heads":
        query[1], key[1] = query[0], key[0]
    elif case == "huge":
        query, key = query * 1e60, key * 1e60
    elif case == "tiny":
        query, key = query * 1e-60, key * 1e-60
    elif case == "dead inputs":
        query[:, 2:] = 0
    tensor = HeadTensor(query, key)
    factors = als(tensor, rank, sweeps=20, reads=reads).factors
    assert all(torch.isfinite(part).all() for part in (factors.query, factors.mixing, factors.key))
    start = truncation(tensor, min(rank, tensor.heads * (reads or rank)), equal=reads is not None)
    assert tensor.relative_error(factors) <= tensor.relative_error(start) + 1e-7


def test_exact_low_rank_is_found(monkeypatch):
    """A tensor that is a sum of three components over four heads, not aligned with any head."""
    hidden = make_factors(make_heads(4, 9, 8, 3), 3, seed=5)
    tensor = HeadTensor(hidden.query * hidden.mixing[:, None], hidden.key.expand(4, -1, -1))
    monkeypatch.setattr(f"{SOLVER}.MIN_GAIN", 0.0)
    solution = als(tensor, 3, sweeps=300)
    assert tensor.relative_error(solution.factors) < 1e-6
    assert solution.converged


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_zero_tensor_and_a_truncation_that_is_exact_need_no_sweep(scale):
    tensor = make_heads(2, 5, 5, 3)
    low = HeadTensor(scale * tensor.query[..., :1].repeat(1, 1, 3), tensor.key)
    solution = als(low, 4)
    assert (solution.sweeps, solution.converged) == (0, True)
    torch.testing.assert_close(solution.factors.squared_norm(), low.squared_norm())


def test_tolerance_ends_the_run_and_progress_is_reported():
    tensor = make_heads(3, 12, 11, 4)
    reports = []
    solution = als(tensor, 5, sweeps=500, progress=lambda *report: reports.append(report))
    assert solution.converged
    assert solution.sweeps < 500
    assert [iteration for iteration, _ in reports] == list(range(1, solution.sweeps + 1))
    assert reports[-1][1] == pytest.approx(tensor.relative_error(solution.factors), rel=1e-6)
    assert not als(tensor, 5, sweeps=5).converged


def broken(monkeypatch, systems):
    """Let the given Cholesky factorizations, counted from 0, fail as LAPACK does: by `info`, without an error."""
    cholesky, calls = torch.linalg.cholesky_ex, itertools.count()

    def fail(matrix, **options):
        root, info = cholesky(matrix, **options)
        return (root, torch.ones_like(info)) if next(calls) in systems else (root, info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fail)


@pytest.mark.parametrize(("good", "sweeps"), [(0, 0), (12, 3)])
def test_a_solver_that_cannot_go_on_keeps_the_best_point_and_has_not_converged(monkeypatch, good, sweeps):
    tensor = make_heads(3, 12, 11, 4)
    broken(monkeypatch, range(good, 10**6))
    solution, errors = followed(tensor, 5)
    assert not solution.converged
    assert solution.breakdowns == 1
    assert solution.sweeps == len(errors) == sweeps
    best = errors[-1] if sweeps else tensor.relative_error(truncation(tensor, 5))
    assert tensor.relative_error(solution.factors) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("after", [0, 5])
def test_nans_end_the_run_and_are_no_convergence(monkeypatch, after):
    tensor, calls, product = make_heads(3, 12, 11, 4), itertools.count(), Channels.project_query

    def poisoned(self, *args, **kwargs):
        return product(self, *args, **kwargs).mul_(float("nan") if next(calls) > after else 1.0)

    monkeypatch.setattr(Channels, "project_query", poisoned)
    solution = als(tensor, 5)
    factors = solution.factors
    assert not solution.converged
    assert solution.breakdowns == 1
    assert solution.sweeps == after
    assert all(torch.isfinite(part).all() for part in (factors.query, factors.mixing, factors.key))
    assert tensor.relative_error(factors) <= tensor.relative_error(truncation(tensor, 5)) + 1e-9


def test_float32_products_end_where_float64_ends(monkeypatch):
    """Products are in float32 while there is a ridge; the last sweeps and the returned error are in float64."""
    tensor = make_heads(8, 40, 40, 6)
    _, exact = followed(tensor, 16)
    monkeypatch.setattr(f"{SOLVER}.MIN_FLOAT32_COEFFICIENTS", 1)
    solution, rough = followed(tensor, 16)
    assert rough != exact
    assert rough[-1] == pytest.approx(exact[-1], rel=2e-3)
    assert rough[-1] == pytest.approx(tensor.relative_error(solution.factors), abs=1e-9)
    assert solution.factors.query.dtype == torch.float64


def test_heads_whose_squares_overflow_are_refused():
    heads = make_heads(2, 5, 5, 2)
    with pytest.raises(ValueError, match="squared norm overflows float64"):
        als(HeadTensor(heads.query * 1e90, heads.key * 1e90), 3)


def test_ridge_fades_and_ends(monkeypatch):
    schedule = {"SEARCH_TO": 0.0, "RIDGE_TO": 0.8, "FIRST_RIDGE": 0.1, "LAST_RIDGE": 0.001}
    with monkeypatch.context() as patch:
        for name, value in schedule.items():
            patch.setattr(f"{SOLVER}.{name}", value)
        values = [ridge_at(iteration, 100) for iteration in range(100)]
    assert values[0] == 0.1
    assert values[40] == pytest.approx(0.01)
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    assert not any(values[80:])
    assert ridge_at(0, 1) == 0.0
    for sweeps in range(2, 100):
        assert max(ridge_at(iteration, sweeps) for iteration in range(sweeps)) <= ridge_at(0, 100)


@pytest.mark.parametrize("failing", [(4, 7, 8), (30,)])
def test_repeated_sweeps_are_the_same(monkeypatch, failing):
    """A iteration whose numbers are not finite is made again from the same point."""
    monkeypatch.setattr(f"{SOLVER}.MIN_FLOAT32_COEFFICIENTS", 1)
    tensor, calls, of = make_heads(8, 40, 40, 6), itertools.count(), LineSearch.of
    unbroken = als(tensor, 16, sweeps=60)

    def line(*arguments):
        made = of(*arguments)
        return replace(made, squared=made.squared * float("nan")) if next(calls) in failing else made

    monkeypatch.setattr(LineSearch, "of", line)
    solution = als(tensor, 16, sweeps=60)
    assert solution.sweeps == unbroken.sweeps
    assert solution.breakdowns == len([call for call in failing if call != 8])
    error = tensor.relative_error(solution.factors)
    assert error == pytest.approx(tensor.relative_error(unbroken.factors), rel=1e-3)


def test_the_best_point_is_kept(monkeypatch):
    calls, tensor, of = itertools.count(), make_heads(3, 12, 11, 4), LineSearch.of

    def worse(*arguments):
        made = of(*arguments)
        made.squared[0] += next(calls) >= 10  # at every step length
        return made

    monkeypatch.setattr(LineSearch, "of", worse)
    solution, errors = followed(tensor, 5, sweeps=20)
    assert len(set(errors[9:])) == 1
    assert tensor.relative_error(solution.factors) == pytest.approx(errors[9], rel=1e-9)


def test_spare_components_are_there_for_a_part_of_the_search_only(monkeypatch):
    for name, value in {"SPARE_FROM": 0.1, "SEARCH_TO": 0.25, "SPARE_RATIO": 1.25}.items():
        monkeypatch.setattr(f"{SOLVER}.{name}", value)
    widths = [width_at(iteration, 80, 16, 99) for iteration in range(80)]
    assert [(width, len(list(group))) for width, group in itertools.groupby(widths)] == [(16, 8), (20, 12), (16, 60)]
    assert width_at(10, 80, 16, 18) == 18
    assert width_at(200, 80, 16, 99) == 16


@pytest.mark.parametrize("first", [0.2, 10.0])
def test_components_that_the_first_ridge_kills_are_replaced(monkeypatch, first):
    tensor = make_heads(4, 12, 11, 4)
    _, usual = followed(tensor, 6)
    monkeypatch.setattr(f"{SOLVER}.SEARCH_RIDGE", first)
    _, replaced = followed(tensor, 6)
    assert replaced[-1] == pytest.approx(usual[-1], rel=0.05)


def test_the_end_is_a_fixed_point_of_plain_least_squares(monkeypatch):
    tensor = make_heads(3, 12, 11, 4)
    monkeypatch.setattr(f"{SOLVER}.MIN_GAIN", 0.0)
    solution, (*_, error) = followed(tensor, 5, sweeps=2000)
    assert solution.converged
    norm = tensor.squared_norm().item()
    unit = HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25)
    coefficients = [
        torch.linalg.lstsq(side, factor / norm**0.25).solution
        for side, factor in ((unit.flat_query, solution.factors.query), (unit.flat_key, solution.factors.key))
    ]
    channels = Channels(unit)
    point = Point.at(Step.of(channels, coefficients[0], solution.factors.mixing, coefficients[1]))
    after = point
    for _ in range(20):
        after = Point.at(after.solve(channels, 0.0))
    assert point.relative_error(channels) == pytest.approx(error, abs=1e-7)
    assert error - 1e-6 <= after.relative_error(channels) <= error + 1e-9
