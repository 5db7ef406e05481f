"""The table of heads, against the functions that it is made of."""

import pytest
import torch
from transformers import BertForSequenceClassification

from collab_compress.analysis import confidence, dominant_heads, head_patterns, head_table, induction
from collab_compress.analysis.table import change_of_outputs
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import head_importance


def column(table, name):
    return torch.tensor(table[name].to_numpy())


@pytest.mark.parametrize("labelled", [False, True])
def test_columns_are_those_of_their_functions(labelled, make_tiny, calibration):
    model, batches, loss = make_tiny("bert"), calibration[:2], change_of_outputs
    if labelled:
        model, loss = BertForSequenceClassification(model.config).eval(), None
        batches = [{**batch, "labels": torch.zeros(len(batch["input_ids"]), dtype=torch.long)} for batch in batches]
    table = head_table(model, iter(batches))
    sites = find_attention(model)
    assert list(table["module"]) == [site.name for site in sites for _ in range(site.heads)]
    assert list(table["head"]) == [head for site in sites for head in range(site.heads)]
    expected = {
        "importance": head_importance(model, batches, loss),
        "confidence": confidence(model, batches),
        "entropy": head_patterns(model, batches)["entropy"],
        "drift_without": dominant_heads(model, batches=batches).changes,
    }
    for name, values in expected.items():
        torch.testing.assert_close(column(table, name), torch.cat([*values.values()]).double())
        assert values.keys() == {site.name for site in sites}


def test_induction_is_measured_where_the_model_is_long_enough(make_tiny, calibration):
    config = make_tiny("bert").config
    for positions, measured in ((40, False), (64, True)):
        config.max_position_embeddings = positions
        model = type(make_tiny("bert"))(config).eval()
        values = head_table(model, calibration[:1])["induction"]
        assert values.notna().all() == measured
        if measured:
            torch.testing.assert_close(torch.tensor(values.to_numpy()), torch.cat([*induction(model).values()]))


def test_uses_of_one_module_are_averaged(make_tiny, calibration):
    model = make_tiny("albert")
    table, uses = head_table(model, calibration[:1]), head_patterns(model, calibration[:1])["entropy"]
    assert len(table) == 3
    torch.testing.assert_close(column(table, "entropy"), torch.stack([*uses.values()]).mean(0))


def test_a_head_that_hardly_writes_hardly_changes_outputs(make_tiny, calibration):
    model = make_tiny("bert")
    site = find_attention(model)[-1]
    with torch.no_grad():
        site.part(site.paths.output).weight[:, :8] *= 1e-3
    values = head_importance(model, calibration[:1], change_of_outputs)[site.name]
    assert values[0] < 0.01 * values[1:].min()


def test_outputs_at_padding_do_not_count():
    states, mask = torch.ones(2, 3, 4, requires_grad=True), torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss = change_of_outputs((states,), {"attention_mask": mask})
    assert loss.shape == (2,)
    loss.sum().backward()
    assert torch.equal(states.grad.abs(), mask[..., None].expand(2, 3, 4).float())


def test_no_batches_are_refused(make_tiny):
    with pytest.raises(HeadError, match="at least one batch"):
        head_table(make_tiny("bert"), [])
