"""What benchmarks compare with is what it says it is, and what they count is what is there."""

import copy
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import families
import pytest
import speech
import speed
import torch
from conversion import STAGES, time_stages
from language_models import equal, shared
from quality import DEFAULT_ROWS, RECORDS, Row, table
from rivals import dropped, layers_of, low_rank_, pooled, svd_, without_heads_
from timing import append_record, has_wall_time, print_row, ratio, read_records
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from collab_compress import Compression, Solver, compress

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HEADS, HEAD_WIDTH, TIGHT = 3, 8, 1e-7
MINILM = BertConfig(hidden_size=384, num_attention_heads=12, num_hidden_layers=6)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=61, max_position_embeddings=40, initializer_range=0.4, **sizes)
    model = BertModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def batch():
    ids = torch.randint(1, 61, (12, 11), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state


def vectors(model, module, batch):
    """Return the inputs of a module, (N, D), in float64."""
    inputs = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return inputs[0].flatten(0, 1).double()


def best_error(matrix, rank):
    """Return the error of the best approximation of a matrix at this rank."""
    return torch.linalg.svdvals(matrix)[rank:].norm()


def test_products_of_two_leave_the_best_outputs_on_the_data(model, batch):
    projections = []
    for layer in model.encoder.layer:
        attention = layer.attention
        projections += [attention.self.query, attention.self.value, attention.output.dense]
    dense = copy.deepcopy(projections)
    inputs = [vectors(model, projection, batch) for projection in projections]
    for layer in layers_of(model, [batch]):
        low_rank_(layer, 5, damping=TIGHT)
    for x, before, after in zip(inputs, dense, projections, strict=True):
        wanted = x @ before.weight.double().T + before.bias.double()
        outputs = x @ after.weight.double().T + after.bias.double()
        assert torch.linalg.matrix_rank(after.weight.detach(), rtol=1e-4) == 5
        torch.testing.assert_close((outputs - wanted).mean(0), torch.zeros(24).double(), atol=1e-4, rtol=0)
        torch.testing.assert_close(
            (outputs - wanted).norm(), best_error(wanted - wanted.mean(0), 5), rtol=1e-3, atol=0
        )


def test_heads_by_themselves_leave_the_best_scores_and_outputs_on_the_data(model, batch):
    dense = copy.deepcopy(model)
    inputs = []
    for layer in model.encoder.layer:
        read = [layer.attention.self.query, layer.attention.output.dense]
        inputs.append([vectors(model, projection, batch) for projection in read])
    for layer in layers_of(model, [batch]):
        svd_(layer, 9, 14, damping=TIGHT)
    for (x, z), before, after in zip(inputs, dense.encoder.layer, model.encoder.layer, strict=True):
        for head, (size, value_width) in enumerate(zip((3, 3, 3), (5, 5, 4), strict=True)):
            rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
            wanted, actual = (scores(x, block.attention.self, rows) for block in (before, after))
            error = (actual - wanted) - (actual - wanted).mean(1, keepdim=True)  # the softmax ignores the mean
            centred = wanted - wanted.mean(1, keepdim=True)
            best = best_error(centred - centred.mean(0), size)
            torch.testing.assert_close(error.norm(), best, rtol=1e-3, atol=0)
            # the values keep what matters of this head's own part of the output
            head_inputs = z[:, rows]
            part = (head_inputs - head_inputs.mean(0)) @ before.attention.output.dense.weight[:, rows].double().T
            smaller = smaller_part(head_inputs - head_inputs.mean(0), before, after, rows)
            torch.testing.assert_close((part - smaller).norm(), best_error(part, value_width), rtol=1e-3, atol=0)


def scores(x, module, rows):
    """Return one head's scores of all pairs of vectors, query bias included."""
    query = x @ module.query.weight[rows].double().T + module.query.bias[rows].double()
    return query @ (x @ module.key.weight[rows].double().T + module.key.bias[rows].double()).T


def smaller_part(head_inputs, before, after, rows):
    """Return a head's part of the output with narrower values, from its old inputs: V̂ = V P."""
    dense, fewer = (layer.attention.self.value.weight[rows].double().T for layer in (before, after))
    channels = torch.linalg.lstsq(dense, fewer).solution  # (d, d), zeros at the end
    return head_inputs @ channels @ after.attention.output.dense.weight[:, rows].double().T


def test_full_widths_are_exact(model, batch):
    wanted = run(model, batch)
    for layer in layers_of(model, [batch]):
        svd_(layer, 24, 24)
        low_rank_(layer, 24)
    torch.testing.assert_close(run(model, batch), wanted, atol=2e-4, rtol=1e-3)


def test_the_most_important_heads_remain(model, batch):
    def loss(outputs, _):
        return outputs.last_hidden_state.square().sum((1, 2))

    without_heads_(model, 4, [batch], loss)
    head_counts = [layer.attention.self.num_attention_heads for layer in model.encoder.layer]
    assert sum(head_counts) == 4
    assert min(head_counts) >= 1


@pytest.mark.parametrize(
    "text", ["shared dk=64", "shared dv=252", "shared dk=192 head_dim=192 dv=252", "shared dk=192 head_dim=16"]
)
def test_a_rows_parameters_are_those_of_the_converted_model(text, minilm):
    row = Row.parse(text)
    before = minilm.num_parameters()
    widths = Compression(dk=row.dk, head_dim=row.head_dim, dv=row.dv, solver=Solver(sweeps=1 if row.dk else None))
    compress(minilm, widths, calibration=None)
    dense, ours = (one.parameters(MINILM) for one in (Row("dense"), row))
    assert before - minilm.num_parameters() == 6 * (dense - ours)


def test_rivals_have_as_many_parameters_and_hardly_more():
    for row in [row for row in map(Row.parse, DEFAULT_ROWS) if row.dk and row.dv]:
        ours = 6 * row.parameters(MINILM)
        low_rank = 6 * (8 * 384 * row.rank(MINILM) + 4 * 384)
        of_a_head = (4 * 384 + 3) * 32  # with three biases
        heads = row.remaining_heads(MINILM) * of_a_head + 6 * 384
        for theirs in (low_rank, heads):
            assert ours <= theirs < 1.02 * ours, row


def test_a_ratio_is_that_of_each_round():
    times = {"dense": [1.0, 2.0, 4.0, 8.0, 16.0], "ours": [0.5, 1.0, 2.0, 4.0, 8.0]}
    figures = ratio(times, "ours")
    assert (figures["low"], figures["ratio"], figures["high"]) == (0.5, 0.5, 0.5)
    assert (figures["rounds"], figures["baseline_ms"]) == (5, 4000.0)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=61, max_position_embeddings=40, initializer_range=0.2, **sizes)
    return LlamaForCausalLM(config).eval()


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def test_rotary_rivals_are_exact_at_full_width(llama, batch):
    wanted = logits(llama, batch)
    torch.testing.assert_close(logits(pooled(llama, 1.0, True), batch), wanted)
    torch.testing.assert_close(logits(dropped(llama, 1.0, True, [batch]), batch), wanted, atol=2e-4, rtol=1e-3)


def test_ours_beside_the_rotary_rivals(llama, batch):
    wanted = logits(llama, batch)
    for converted in (shared(llama, 1.0, True, [batch]), equal(llama, 1.0, True, [batch])):
        torch.testing.assert_close(logits(converted, batch), wanted, atol=2e-4, rtol=1e-3)
    attention = shared(llama, 0.5, True, [batch], seed=1).model.layers[0].self_attn
    assert (attention.k_proj.width, attention.v_proj.width) == (16, 16)


def test_dropped_pairs_are_the_weakest(llama, batch):
    narrow = dropped(llama, 0.25, True, [batch])
    for before, layer in zip(llama.model.layers, narrow.model.layers, strict=True):
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            zero = (projection.weight == 0).all(1).view(4, 2, 4)  # heads, the two channels of a pair, frequencies
            assert torch.equal(zero[:, 0], zero[:, 1])
            assert zero[:, 0].sum() == 12
        assert not torch.equal(attention.q_proj.weight, before.self_attn.q_proj.weight)
        for rows in torch.arange(32).split(8):
            assert torch.linalg.matrix_rank(attention.v_proj.weight[rows].detach()) == 2
            assert torch.linalg.matrix_rank(attention.o_proj.weight[:, rows].detach()) == 2
    for layer in dropped(llama, 0.25, False, [batch], alike=True).model.layers:  # equally many in each head
        zero = (layer.self_attn.q_proj.weight == 0).all(1).view(4, 2, 4)
        assert zero[:, 0].sum(1).tolist() == [3] * 4


def test_values_are_narrowed_to_what_matters_on_the_data(llama, batch):
    z = vectors(llama, llama.model.layers[0].self_attn.o_proj, batch)
    fewer = dropped(llama, 0.5, True, [batch]).model.layers[0].self_attn
    dense = llama.model.layers[0].self_attn
    for rows in torch.arange(32).split(8):
        part = z[:, rows] @ dense.o_proj.weight[:, rows].double().T
        before, after = (attention.v_proj.weight[rows].double().T for attention in (dense, fewer))
        channels = torch.linalg.lstsq(before, after).solution
        smaller = z[:, rows] @ channels @ fewer.o_proj.weight[:, rows].double().T
        torch.testing.assert_close((part - smaller).norm(), best_error(part, 4), rtol=1e-2, atol=0)


def test_pooled_heads_are_those_of_grouped_queries(llama, batch):
    grouped = pooled(llama, 0.5, True)
    assert grouped.config.num_key_value_heads == 2
    assert grouped.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    keys_alone = pooled(llama, 0.5, False)
    for layer, smaller in zip(keys_alone.model.layers, grouped.model.layers, strict=True):
        values = smaller.self_attn.v_proj.weight.view(2, 1, 8, 32).expand(-1, 2, -1, -1).reshape(32, 32)
        layer.self_attn.v_proj.weight.data.copy_(values)
    torch.testing.assert_close(logits(keys_alone, batch), logits(grouped, batch))


def test_the_figures_are_those_of_the_records(capsys):
    table(Namespace(records=RECORDS))
    kinds = capsys.readouterr().out.split("Calibrated on: ")
    (with_texts,) = (kind for kind in kinds if kind.startswith("text\n"))
    found = {line.split(" | ")[0]: line.removesuffix(" |").split(" | ") for line in with_texts.splitlines()}
    page = (Path(__file__).parents[1] / "docs" / "figures.md").read_text(encoding="utf-8")
    for row, start in {"| shared dff=768": "| dff=768 (half) |", "| shared dff=512": "| dff=512 (a third) |"}.items():
        (line,) = (line for line in page.splitlines() if line.startswith(start))
        embeddings, *_, four_tasks = (cell.strip(" |*") for cell in line.removeprefix(start).split(" | "))
        assert [embeddings, four_tasks] == [found[row][number].replace("-", "−") for number in (1, -1)]


def test_every_script_is_imported():
    for script in sorted(BENCHMARKS.glob("*.py")):
        assert import_module(script.stem).__doc__


@pytest.mark.parametrize("row", ["shared dff=16", "shared layers=1", "shared keep=0.6"])
def test_rows_whose_time_is_measured(row, model, monkeypatch):
    tokens = torch.randint(1, 61, (2, 8))
    monkeypatch.setattr(speed, "token_batch", lambda *_: {"input_ids": tokens, "attention_mask": tokens.clamp(max=1)})
    converted = speed.converted(model, row)
    assert converted.num_parameters() < model.num_parameters()


def test_the_stages_of_a_conversion_take_its_time(model, batch):
    settings = Compression(dk=12, dv=12, dff=16)
    times = time_stages(lambda: compress(model, settings, [batch, batch]))
    assert list(times.index[-2:]) == ["all else", "all"]
    assert {stage for stage, *_ in STAGES} == {*times.index[:-2]}
    assert (times > 0).all(axis=None)
    assert times.seconds[:-1].sum() == pytest.approx(times.seconds["all"])


def test_word_errors_are_the_fewest_changes():
    heard = {"a b c": 0, "a c": 1, "a x c": 1, "a b b c d": 2, "": 3}
    assert {text: speech.distance(["a", "b", "c"], text.split()) for text in heard} == heard


def test_records_say_the_number_of_threads_and_the_clock(tmp_path, set_threads):
    """Processor time of several threads grows while they wait, so these are timed by wall time."""
    place, figures = tmp_path / "records.jsonl", ratio({"dense": [1.0, 1.0], "a": [0.5, 0.5]}, "a")
    for threads in (1, 2):
        set_threads(threads)
        append_record(place, {"score": 1.0})
        print_row({}, "a", figures, Namespace(threads=threads, wall=False, records=place))
    settings = [(record["threads"], record.get("clock")) for record in read_records(place)]
    assert settings == [(1, None), (1, "processor"), (2, None), (2, "wall")]
    assert has_wall_time(Namespace(threads=1, wall=True))


def test_verdicts_on_small_models_of_a_type():
    assert families.verdicts("gptj") == {
        "class": "GPTJForCausalLM",
        "dff": "works",
        "layers": "works",
        "vocabulary": "works",
    }
    reasons = families.verdicts("bloom")
    assert families.group_of(reasons["dff"]) == "no setting of the blocks alone (experts share it, or there is none)"
    assert reasons["layers"] == reasons["vocabulary"] == "works"
    assert "NOT RUN" in families.verdicts("lxmert")["built"]  # it reads regions of images
