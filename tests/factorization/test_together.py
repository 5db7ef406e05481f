"""Layers that are solved together end where each ends by itself."""

import itertools
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from collab_compress.factorization import SolverOptions
from collab_compress.factorization.als import als
from collab_compress.factorization.iterate import Channels, Direction, Iterate
from collab_compress.factorization.sweep import Sweep
from collab_compress.factorization.together import Together

ONE = (3, 12, 11, 4)
SHAPES = {
    "equal": [ONE] * 4,
    "without Gram matrices": [(6, 5, 4, 3)] * 3,
    "unequal": [ONE, (2, 9, 9, 3), ONE, (4, 8, 12, 3), (2, 9, 9, 3)],
}
ENDLESS = 10**6


@pytest.fixture
def problems(make_heads):
    """Tensor, rank and options of some layers."""

    def make(shapes, *options):
        tensors = [make_heads(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        return [(tensor, 5, each) for tensor, each in zip(tensors, itertools.cycle(options), strict=False)]

    return make


def together(problems, width=None, check=lambda: None):
    """Begin to solve layers in threads that meet."""
    width = width or len(problems)
    meeting = Together(len(problems), width, check)

    def run(place, tensor, rank, options):
        with meeting.run(place) as sweeper:
            return als(tensor, rank, SolverOptions(**options), sweeper)

    pool = ThreadPoolExecutor(width)
    futures = [pool.submit(run, place, *problem) for place, problem in enumerate(problems)]
    return pool, futures


def solved(*given):
    pool, futures = together(*given)
    pool.shutdown()
    return [future.result() for future in futures]


def assert_same(ours, alone):
    assert ours.errors == pytest.approx(alone.errors, rel=1e-6, abs=1e-7)
    assert (ours.converged, ours.breakdowns) == (alone.converged, alone.breakdowns)
    for name in ("query", "mixing", "key"):
        torch.testing.assert_close(getattr(ours.factors, name), getattr(alone.factors, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("shapes", SHAPES)
def test_each_is_solved_as_by_itself(problems, shapes, width):
    given = problems(SHAPES[shapes], {"sweeps": 30})
    for ours, (tensor, rank, options) in zip(solved(given, width), given, strict=True):
        assert_same(ours, als(tensor, rank, SolverOptions(**options)))


def test_ends_and_dtypes_are_each_run_s_own(problems, monkeypatch):
    monkeypatch.setattr("collab_compress.factorization.als.LARGE", 1)
    given = problems([(8, 40, 40, 6)] * 4, {"sweeps": 3}, {}, {"sweeps": 60})
    found = solved(given)
    for ours, (tensor, rank, options) in zip(found, given, strict=True):
        alone = als(tensor, rank, SolverOptions(**options))
        assert ours.converged == alone.converged
        assert len(ours.errors) == pytest.approx(len(alone.errors), abs=2)
        assert ours.errors[-1] == pytest.approx(alone.errors[-1], rel=1e-3)
    assert len({len(each.errors) for each in found}) == 3


def test_runs_of_one_shape_sweep_as_one(problems, monkeypatch):
    sizes, make = [], Sweep.of

    def watched(channels, point, *given):
        sizes.append(len(point.values))
        return make(channels, point, *given)

    monkeypatch.setattr(Sweep, "of", watched)
    found = solved(problems([ONE] * 3, {"tolerance": 1e-9}))
    ends = [len(each.errors) for each in found]
    assert sizes == [sum(sweep < end for end in ends) for sweep in range(max(ends))]
    assert len(set(sizes)) > 1


def test_a_sweep_reads_nothing_of_a_device(make_point, make_heads):
    """On the meta device there is nothing to be read."""
    heads = make_heads(*ONE)
    channels, point = Channels.of(heads), make_point(heads, 5)[0]
    where = {"device": "meta"}
    layers = Channels.stacked([Channels(channels.query.to(**where), channels.key.to(**where), channels.heads)] * 3)
    points = Iterate.at(Direction(point.values.to(**where).expand(3, -1, -1), point.heads))
    ridge = shift = torch.zeros(3, 1, **where)
    found = Sweep.of(layers, points, (points, points), ridge, shift)
    assert found.numbers.shape == (3, 16)


def test_what_is_found_does_not_depend_on_which_thread_is_faster(problems):
    def sometimes_slow(*_):
        time.sleep(random.choice([0.0, 0.002]))

    given = problems(SHAPES["unequal"], {"sweeps": 12, "progress": sometimes_slow})
    one, two = solved(given, 3), solved(given, 3)
    for ours, again in zip(one, two, strict=True):
        assert ours.errors == again.errors
        assert torch.equal(ours.factors.query, again.factors.query)


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_singular_system_is_its_run_s_own(problems, monkeypatch, times):
    """The second layer's; once it is solved with a larger shift, always it ends the run."""
    given = problems([ONE] * 4, {"sweeps": 30})
    alone = [als(tensor, rank, SolverOptions(**options)) for tensor, rank, options in given]
    found, failures = torch.linalg.cholesky_ex, itertools.count()

    def fail(matrix, **options):
        root, info = found(matrix, **options)
        if len(info) in (4, 1) and next(failures) < times:
            info[-1 if len(info) == 1 else 1] = 1
        return root, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fail)
    ours = solved(given)
    assert [each.breakdowns for each in ours] == [0, 1, 0, 0]
    assert len(ours[1].errors) == (30 if times == 1 else 0)
    for place in (0, 2, 3):
        assert_same(ours[place], alone[place])


def test_an_error_in_one_run_is_not_that_of_others(problems):
    def failing(sweep, _):
        if sweep == 3:
            raise ValueError("no")

    given = problems([ONE] * 3, {"sweeps": 8}, {"sweeps": 8, "progress": failing}, {"sweeps": 8})
    pool, futures = together(given, 2)
    pool.shutdown()
    assert [type(future.exception()) for future in futures] == [type(None), ValueError, type(None)]
    for place in (0, 2):
        assert_same(futures[place].result(), als(given[place][0], 5, SolverOptions(sweeps=8)))


def test_an_error_in_a_common_sweep_reaches_all(problems, monkeypatch):
    calls, product = itertools.count(), Channels.mttkrp

    def failing(*given):
        if next(calls) == 10:
            raise RuntimeError("out of memory")
        return product(*given)

    monkeypatch.setattr(Channels, "mttkrp", failing)
    pool, futures = together(problems([ONE] * 3, {"sweeps": 30}))
    pool.shutdown()
    assert [str(future.exception()) for future in futures] == ["out of memory"] * 3


def test_an_interrupt_ends_runs_that_wait(problems):
    """Also where those that they wait for will never begin."""
    stopping = threading.Event()

    def check():
        if stopping.is_set():
            raise CancelledError

    options = {"sweeps": ENDLESS, "tolerance": 0.0, "progress": lambda *_: check()}
    pool, futures = together(problems([ONE] * 4, {"sweeps": 2}, options, options, options), 3, check)
    futures[0].result()
    stopping.set()
    started = time.monotonic()
    pool.shutdown(cancel_futures=True)
    assert time.monotonic() - started < 5
    assert all(future.cancelled() or isinstance(future.exception(), CancelledError) for future in futures[1:])
