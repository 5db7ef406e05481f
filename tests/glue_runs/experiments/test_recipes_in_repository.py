"""Recipes and sweeps in the repository: they can be run, and those of a paper's table are what the table is about.

The first line of one that follows a paper may say `# paper: KEY, Table 1, Table 2`, and lines `# also: field=value …`
give settings with which it makes more of the table; they may go on in lines that are indented.
"""

import itertools
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml
from collab_compress_glue_runs.commands import run as command
from collab_compress_glue_runs.experiments import read_recipe, read_sweep
from collab_compress_glue_runs.experiments.outputs import CONVERTED_FIELDS, TUNED_FIELDS
from collab_compress_glue_runs.experiments.workload import WORKLOADS
from collab_compress_glue_runs.tasks import TASKS
from transformers import MarianConfig, MarianMTModel

from collab_compress.heads import Rotator

FOLDER = Path(__file__).parents[3] / "glue_runs"
RECIPES = sorted(FOLDER.glob("recipes/*.yaml"))
SWEEPS = sorted(FOLDER.glob("sweeps/*.yaml"))
CLAIMS = yaml.safe_load((FOLDER / "papers/claims.yaml").read_text(encoding="utf-8"))
PAPERS = {
    paper: about["tables"]
    for paper, about in yaml.safe_load((FOLDER / "papers/printed.yaml").read_text(encoding="utf-8")).items()
}


def top_lines(path, what):
    """Return the lines `# what: …` at the top of a file."""
    top = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0]
    matches = re.findall(rf"^# {what}: (.+(?:\n#   .+)*)$", top, re.MULTILINE)
    return [lines.replace("\n#  ", "") for lines in matches]


def tables(path):
    """Return the tables of printed.yaml that a file names, by paper and name; it may name figures too."""
    result = {}
    for line in top_lines(path, "paper"):
        key, *names = line.split(", ")
        assert names, line
        assert all(name in PAPERS[key] or name.startswith("Figure ") for name in names), line
        result |= {(key, name): PAPERS[key][name] for name in names if name in PAPERS[key]}
    return result


@cache
def sweeps(path):
    """Read a sweep at each of its scales, or as it stands where it has none, and with the settings it names."""
    scales = [f"scale={name}" for name in yaml.safe_load(path.read_text(encoding="utf-8")).get("scales", ())]
    return [read_sweep(path, shlex.split(settings)) for settings in (*(scales or [""]), *top_lines(path, "also"))]


@cache
def recipes(path):
    if path in RECIPES:
        return [read_recipe(path, ["output=out"])]
    return [recipe for sweep in sweeps(path) for recipe in sweep.recipes()]


def column(recipe):
    """Return the column of a recipe's score in the papers' tables."""
    if TASKS[recipe.task].kind != "translation":
        return recipe.task
    return f"{recipe.task} {recipe.translation.source}-{recipe.translation.target}"


def sweep_of(name, scale="paper", *settings):
    return read_sweep(FOLDER / "sweeps" / f"{name}.yaml", [f"scale={scale}", *settings])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_run_at_the_small_scale_by_default(path):
    ours = read_sweep(path)
    assert ours == sweep_of(path.stem, "small")
    assert {recipe.fresh and recipe.fresh.width for recipe in ours.recipes()} <= {128, None}


@pytest.mark.parametrize("path", [*RECIPES, *SWEEPS], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_can_be_run(path, tmp_path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    runs = recipes(path)
    folders = {(str(recipe.output).lower(), recipe.conversion_name) for recipe in runs}
    assert len(folders) == len(runs), "two runs are in one folder"
    assert not any(recipe.output.is_absolute() or recipe.data_dir for recipe in runs)
    tunings = {
        (WORKLOADS[TASKS[recipe.task].kind].arguments_class, str(tuning.arguments)): tuning.arguments
        for recipe in runs
        for tuning in (recipe.tuning, recipe.again)
        if tuning is not None
    }
    for (arguments_class, _), arguments in tunings.items():
        fixed = {"report_to": "none", "use_cpu": True, "save_strategy": "epoch"}  # as the recipes' own trainers
        arguments_class(str(tmp_path), **(fixed | arguments))  # raises on invalid arguments


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_settings_that_make_more_of_a_table_have_their_own_output(path):
    outputs = [(sweep.output, *sweep.tasks) for sweep in sweeps(path)]
    assert len(set(outputs)) == len(outputs)


def test_sweeps_that_share_an_output_agree():
    settings_of = {}
    for path in SWEEPS:
        for recipe in recipes(path):
            for folder, fields in ((None, TUNED_FIELDS), (recipe.conversion_name, CONVERTED_FIELDS)):
                settings = {name: getattr(recipe, name) for name in fields}
                assert settings_of.setdefault((recipe.output, folder, fields), settings) == settings, path


def test_small_scales_run_what_claims_compare():
    runs = {"minilm-distilbert": set(), None: set()}
    for path in SWEEPS:
        for sweep in sweeps(path):
            for recipe in sweep.recipes() if sweep.scale == "small" or "small-" in str(sweep.scale) else ():
                model = "minilm-distilbert" if recipe.model == "outputs/minilm-distilbert" else None
                stages = ("tuned", recipe.conversion_name, recipe.again_name)
                runs[model] |= {(column(recipe), f"{recipe.method}/{stage}") for stage in stages}
    for claim in itertools.chain.from_iterable(CLAIMS.values()):
        labels = [label if "/" in label else f"{label}/tuned" for label in (claim["method"], claim["than"])]
        compared = set(itertools.product(claim["tasks"], labels))
        missing = compared - runs["minilm-distilbert" if "model" in claim else None]
        assert not missing, claim["says"]


def test_collaborate_table_2_has_each_model_and_conversion():
    models = {"google-bert/bert-base-cased": "BERT-base", "distilbert": "DistilBERT", "albert-base": "ALBERT"}
    path = FOLDER / "sweeps" / "glue.yaml"
    rows = {
        (models[recipe.model], stage)
        for sweep in sweeps(path)
        if sweep.scale == "paper" and sweep.output.parent.name == "collaborate"
        for recipe in sweep.recipes()
        for stage in ("tuned", recipe.again_name)
    }
    (table,) = tables(path).values()
    controls = {(model, "dense-again") for model in models.values()}  # ours
    assert rows == {(row["model"], row["stage"]) for row in table["rows"]} | controls
    tuned = {recipe.task: recipe for recipe in sweep_of("glue").recipes()}
    longer = {task for task, recipe in tuned.items() if recipe.tuning.epochs == recipe.again.epochs == 10}
    assert longer == {"sst2", "rte"}


def test_rotations_name_heads_that_the_model_has():
    rotating = [recipe for recipe in sweep_of("rotation", "small").recipes() if recipe.heads.rotation is not None]
    assert len(rotating) > 1
    for recipe in rotating:
        layers, heads = recipe.fresh.layers, recipe.fresh.heads
        sizes = {"encoder_layers": layers, "decoder_layers": layers, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4}
        sizes |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads, "d_model": 2 * heads}
        tokens = {"vocab_size": 8, "pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
        config = MarianConfig(**sizes, **tokens, eos_token_id=1, max_position_embeddings=8)
        Rotator(MarianMTModel(config), recipe.heads.rotation)


@pytest.mark.parametrize("path", [RECIPES[0], SWEEPS[0]], ids=lambda path: path.stem)
def test_one_is_found_by_its_name_in_any_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command._file(path.name, path.parent.name).samefile(path)
    (tmp_path / path.name).write_text("task: mrpc\n")
    assert command._file(path.name, path.parent.name) == Path(path.name)  # one's own goes first
