"""Batches of rows of similar lengths, by tokens: filled, shared out among processes, and the same when resumed."""

import numpy as np
import pytest
from collab_compress_glue_runs.experiments.batches import ByTokens, row_lengths
from datasets import Dataset

from collab_compress.errors import RecipeError

LENGTHS = np.random.default_rng(0).integers(1, 60, 500).astype(np.int32)


def cost(batch):
    return len(batch) * max(LENGTHS[row] for row in batch)


@pytest.mark.parametrize("tokens", [60, 61, 300, 10**6])
def test_batches_hold_all_rows_and_are_as_full_as_they_can_be(tokens):
    batches = sorted(ByTokens(LENGTHS, tokens), key=lambda batch: max(LENGTHS[row] for row in batch))
    assert sorted(row for batch in batches for row in batch) == list(range(500))
    assert all(cost(batch) <= tokens for batch in batches)
    ordered = sorted(LENGTHS)
    filled = []  # one row after another, until the batch is full
    for length in ordered:
        if filled and (len(filled[-1]) + 1) * length <= tokens:
            filled[-1].append(length)
        else:
            filled.append([length])
    assert sorted(map(len, batches)) == sorted(map(len, filled))


@pytest.mark.parametrize(("processes", "passes"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_does_not_depend_on_how_processes_and_passes_share_it(processes, passes):
    alone = ByTokens(LENGTHS, 1200, passes=4, seed=3)
    shares = [ByTokens(LENGTHS, 1200, passes, 3, processes, rank) for rank in range(processes)]
    for sampler in (alone, *shares):
        sampler.set_epoch(1)
    assert {len(share) for share in shares} == {len(alone) // processes}
    batches, parts = list(alone), [list(share) for share in shares]
    assert {len(part) for part in parts} == {len(alone) // processes}
    assert len(batches) % 4 == 0
    assert {row for batch in batches for row in batch} == set(range(500))
    for step in range(len(batches) // 4):
        shared = [part[step * passes + turn] for turn in range(passes) for part in parts]
        assert shared == batches[4 * step : 4 * step + 4]
        assert sum(map(cost, shared)) <= 1200


def test_each_epoch_and_seed_has_its_order():
    def order(seed, epoch):
        sampler = ByTokens(LENGTHS, 300, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(0, 1))  # the same batches, so that every epoch has the same number
    assert order(1, 0) != order(0, 0)


def test_batches_repeat_where_processes_outnumber_them():
    assert [list(ByTokens(np.array([5, 5]), 40, processes=4, process=rank)) for rank in range(4)] == [[[0, 1]]] * 4


def test_a_batch_without_room_for_a_row_is_refused():
    with pytest.raises(
        RecipeError, match="leaves 50 for a batch of each of 2 processes with 3 passes a step, and a row"
    ):
        ByTokens(LENGTHS, 300, passes=3, processes=2)


def test_lengths_are_those_of_the_longer_side():
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "labels": [[1], [2, 3], []]})
    assert row_lengths(rows, "input_ids").tolist() == [2, 1, 3]
    assert row_lengths(rows, "input_ids", "labels").tolist() == [2, 2, 3]
    assert row_lengths(rows.select([2, 0]), "input_ids", "labels").tolist() == [3, 2]
    classes = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [0, 1]})
    assert row_lengths(classes, "input_ids", "labels", "nothing").tolist() == [2, 1]
