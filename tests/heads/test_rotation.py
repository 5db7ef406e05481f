"""Which heads rotate and when, and that a resumed training rotates the same."""

import copy
import dataclasses
import json
import math
import multiprocessing
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel
from two_processes import run_both

from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import RotationOptions, Rotator, average_distance, confidence, swap_heads_

FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
PAIR = ((FIRST, 0), (SECOND, 1))


def bert(layers=6, heads=4):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61,
        hidden_size=24,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=16,
        initializer_range=0.4,
    )
    return BertModel(config).eval()


SMALL = bert(2, 2)  # tests swap its heads repeatedly


def layer(number):
    """Return the path of a layer's attention, counted from 1 as in the paper."""
    return f"encoder.layer.{number - 1}.attention.self"


def ranked(scores):
    """Return the heads from the least to the most important, by a plain selection sort."""
    remaining = [(float(value), name, head) for name, values in scores.items() for head, value in enumerate(values)]
    order = []
    while remaining:
        smallest = min(remaining, key=lambda entry: entry[0])
        remaining.remove(smallest)
        order.append(smallest[1:])
    return order


def first_pairs(model, rotation, batches):
    (event,) = Rotator(model, rotation).epoch(rotation.epochs[0], batches=batches)
    assert event.reason == "swap"
    return list(event.pairs)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("importance", "k"), [("distance", 3), ("confidence", 12)])
def test_hard_swaps_the_least_with_the_most_important_of_all_layers(k, importance, calibration):
    model = bert()
    scores = {"distance": average_distance, "confidence": confidence}[importance](model, calibration)
    order = ranked(scores)
    expected = [(order[i], order[-1 - i]) for i in range(k)]
    reference = copy.deepcopy(model)
    swap_heads_(reference, expected)
    rotation = RotationOptions("hard", epochs=(2,), k=k, importance=importance)
    assert first_pairs(model, rotation, calibration) == expected
    assert equal(model, reference)


@pytest.mark.parametrize(("layers", "t_max"), [(6, 1), (5, 2), (7, 3)])
def test_soft_swaps_the_least_important_of_lower_and_upper_layers(layers, t_max, calibration):
    model, k = bert(layers), 2
    scores = average_distance(model, calibration)
    expected = []
    for i in range(1, t_max + 1):
        least = [ranked({layer(n): scores[layer(n)]}) for n in (i, layers + 1 - i)]
        expected += [(least[0][j], least[1][j]) for j in range(k)]
    rotation = RotationOptions("soft", epochs=(0,), k=k, t_max=t_max)
    assert first_pairs(model, rotation, calibration) == expected


def test_random_draws_k_pairs_of_different_heads_from_seed_and_epoch():
    def drawn(seed, epoch):
        pairs = first_pairs(bert(), RotationOptions("random", epochs=(epoch,), k=12, seed=seed), None)
        assert len(pairs) == 12
        assert len({head for pair in pairs for head in pair}) == 24
        return pairs

    assert drawn(0, 1) == drawn(0, 1)
    assert drawn(0, 1) != drawn(0, 2)
    assert drawn(0, 1) != drawn(1, 1)


def test_every_kind_rotates_by_itself(make_tiny):
    model = make_tiny("marian")
    kinds = {site.name: site.kind for site in find_attention(model)}
    for strategy in ("hard", "random", "soft"):
        ids = torch.arange(5, 21).view(2, 8)
        batches = [{"input_ids": ids, "decoder_input_ids": ids + 20}]
        pairs = first_pairs(make_tiny("marian"), RotationOptions(strategy, epochs=(0,), k=2), batches)
        assert [kinds[one[0]] for one, _ in pairs] == [kind for kind in ("encoder", "decoder", "cross") for _ in "ab"]
        assert all(kinds[one[0]] == kinds[other[0]] for one, other in pairs)
    pairs = first_pairs(model, RotationOptions("random", epochs=(0,), kinds=("cross",)), None)
    assert [kinds[one[0]] for one, _ in pairs] == ["cross"]


S, B = "swap", "swap-back"


@pytest.mark.parametrize(
    ("settings", "epochs", "expected"),
    [
        # epochs that are not seen, and one that begins twice
        ({"epochs": (1, 4), "swap_back_after": 1}, (0, 1, 1, 4, 6), [(1, S), (4, B)]),
        ({"epochs": (0.5, 1.5)}, (1, 1.25, 1.5), [(1.5, S)]),  # what was due before the first call is passed over
    ],
)
def test_schedules(settings, epochs, expected):
    rotator = Rotator(bert(2), RotationOptions("manual", pairs=(PAIR,), **settings))
    for epoch in epochs:
        rotator.epoch(epoch)
    assert [(event.epoch, event.reason) for event in rotator.history] == expected


def timetable(epochs, back, rest, steps):
    """What happens at which step, in exact fractions: a plan, and each event of it at the first step not before."""
    plan, free = [], Fraction(0)
    for time in sorted(epochs):
        if time < free:
            continue
        plan.append((time, S))
        if back is not None:
            plan.append((time + back, B))
            free = time + back + rest
    return [(math.ceil(time * steps), reason) for time, reason in plan]


TENTHS = st.integers(0, 20).map(lambda tenth: Fraction(tenth, 10))


@settings(max_examples=40, deadline=None)
@given(
    st.sets(TENTHS, min_size=1, max_size=12),
    st.none() | TENTHS.filter(bool),
    TENTHS,
    st.integers(10, 40),
    st.sets(st.integers(0, 80), max_size=4),
)
def test_within_epochs_it_keeps_to_the_timetable(epochs, back, rest, steps, stops):
    rotation = RotationOptions(
        "manual",
        epochs=sorted(float(time) for time in epochs),
        pairs=(PAIR,),
        rest=float(rest),
        swap_back_after=None if back is None else float(back),
    )
    rotator = Rotator(SMALL, rotation)
    for step in range(4 * steps + 1):
        if step in stops:  # resumed here, from a checkpoint, with the epoch's own call once more
            state = json.loads(json.dumps(rotator.state_dict()))
            rotator = Rotator(SMALL, rotation)
            rotator.load_state_dict(state)
            assert step == 0 or rotator.epoch((step - 1) // steps) == ()
        rotator.epoch(step // steps + step % steps / steps)
    actual = [(round(event.epoch * steps), event.reason) for event in rotator.history]
    assert actual == timetable(epochs, back, rest, steps)


def test_whole_epochs_may_be_any_numbers():
    options = RotationOptions("random", epochs=(0, 1, 4, 5), swap_back_after=2, rest=1, k=2)
    same = RotationOptions("random", epochs=(0.0, 1.0, 4.0, 5.0), swap_back_after=2.0, rest=1.0, k=2)
    assert options == same
    assert json.dumps(dataclasses.asdict(options)) == json.dumps(dataclasses.asdict(same))
    assert not same.within_epochs
    assert RotationOptions("random", epochs=(0, 1.5)).within_epochs
    assert RotationOptions("random", epochs=(0,), swap_back_after=0.5).within_epochs
    assert RotationOptions("random", epochs=(0,), of_training=True).within_epochs


@pytest.mark.parametrize("moments", [True, False])
def test_moments_move_with_the_heads_if_asked(moments, calibration):
    model = bert(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**calibration[0]).last_hidden_state.sin().mean().backward()
    optimizer.step()
    query, other = (model.get_submodule(path).query.weight for path in (FIRST, SECOND))
    width = len(query) // 4
    before = [optimizer.state[weight]["exp_avg"].clone() for weight in (query, other)]
    weights = query.detach().clone()
    dense, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    rotation = RotationOptions("manual", epochs=(0,), pairs=(PAIR,), moments=moments, swap_back_after=1)
    rotator = Rotator(model, rotation)
    rotator.epoch(0, optimizer)
    after = [optimizer.state[weight]["exp_avg"] for weight in (query, other)]
    assert torch.equal(other[width : 2 * width], weights[:width])  # PAIR is head 0 and head 1
    expected = before[0][:width] if moments else before[1][width : 2 * width]
    assert torch.equal(after[1][width : 2 * width], expected)
    assert torch.equal(after[0], before[0]) is not moments
    rotator.epoch(1, optimizer)
    assert equal(model, dense)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_settings_survive_json():
    rotation = RotationOptions(
        "manual", epochs=(1, 2), pairs=(PAIR,), kinds=("encoder",), exclude=(1,), swap_back_after=3
    )
    assert RotationOptions(**json.loads(json.dumps(dataclasses.asdict(rotation)))) == rotation
    assert hash(rotation) == hash(copy.deepcopy(rotation))


def test_a_shared_layer_has_no_other_to_swap_with(make_tiny, calibration):
    with pytest.raises(HeadError, match=r"t_max is 1 for 1 layers .* more modules than a single shared one"):
        Rotator(make_tiny("albert"), RotationOptions("soft", epochs=(0,)))
    pairs = first_pairs(make_tiny("albert"), RotationOptions("hard", epochs=(0,)), calibration)
    assert len(pairs) == 1


def test_the_tokenizers_ends_do_not_count_for_importance(calibration):
    """A BERT's config names no end of a sequence; its tokenizer does."""
    tokenizer = SimpleNamespace(eos_token_id=None, sep_token_id=3)
    model, batches = bert(2), with_separators(calibration)
    rotation = RotationOptions("hard", epochs=(0,), k=4, importance="confidence")
    pairs = {}
    for name, excluded in (("words", (3,)), ("all", ())):
        order = ranked(confidence(model, batches, exclude=excluded))
        pairs[name] = tuple(zip(order[:4], order[::-1], strict=False))
    assert pairs["words"] != pairs["all"]
    for part in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):  # or a processor that has it
        (event,) = Rotator(copy.deepcopy(model), rotation, part).epoch(0, batches=batches)
        assert event.pairs == pairs["words"]
    images = SimpleNamespace(size=224)  # a processor without tokens
    for part, options in (
        (None, rotation),
        (images, rotation),
        (tokenizer, dataclasses.replace(rotation, exclude=())),
    ):
        (event,) = Rotator(copy.deepcopy(model), options, part).epoch(0, batches=batches)
        assert event.pairs == pairs["all"]


def with_separators(batches):
    """Return batches whose sequences end with token 3, as BERT's do with [SEP]."""
    ended = []
    for batch in batches:
        tokens, lengths = batch["input_ids"].clone(), batch["attention_mask"].sum(1)
        tokens[torch.arange(len(tokens)), lengths - 1] = 3
        ended.append({**batch, "input_ids": tokens})
    return ended


def test_a_call_needs_data_and_comes_after_the_last(calibration):
    rotator = Rotator(bert(), RotationOptions("hard", epochs=(1,)))
    rotator.epoch(0)
    with pytest.raises(HeadError, match="'hard' swaps heads by importance at epoch 1 and got no batches"):
        rotator.epoch(1)
    assert rotator.history == []
    assert len(rotator.epoch(1, batches=calibration)) == 1  # a failed call can be repeated
    with pytest.raises(HeadError, match="epoch 0 comes after epoch 1"):
        rotator.epoch(0)


def test_a_state_that_is_none_is_refused():
    rotator = Rotator(bert(), RotationOptions("random", epochs=(1,), swap_back_after=1))
    with pytest.raises(HeadError, match=r"cannot read the state of a Rotator .* pass what its"):
        rotator.load_state_dict({"latest": 1})
    rotator.epoch(1)
    state = rotator.state_dict()
    with pytest.raises(HeadError, match="no attention module 'nowhere'"):
        rotator.load_state_dict({**state, "history": [{**state["history"][0], "pairs": [(("nowhere", 0), PAIR[0])]}]})
    assert rotator.state_dict() == state


def _replica(rank, batches):
    model = bert(2)
    event = Rotator(model, RotationOptions("hard", epochs=(0,), k=4)).epoch(0, batches=batches[rank])[0]
    return event.pairs, model


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_measure_together():
    texts = [{"input_ids": torch.arange(5, 21).view(2, 8) + 20 * process} for process in range(2)]
    texts.append({"input_ids": texts[0]["input_ids"].flip(0, 1)})
    alone = [_replica(0, [batches]) for batches in (texts, texts[:1], texts[1:])]
    together = run_both(_replica, [texts[:1], texts[1:]])
    for pairs, model in together:
        assert pairs == alone[0][0]
        assert equal(model, alone[0][1])
    assert alone[0][0] not in (alone[1][0], alone[2][0])  # what each would swap on its own data
