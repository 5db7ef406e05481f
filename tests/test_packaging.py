"""Wheel and editable install both give the console script, and neither a top-level `cli`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pip(*arguments):
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)], check=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = ["collab_compress", "cli", "pyproject.toml", "README.md", "LICENSE"]
    source.mkdir()
    subprocess.run(["cp", "-r", *[ROOT / name for name in tracked], source], check=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


def run_script(target):
    """Run the installed console script with only `target` and what the tests' environment has."""
    script = target / "bin" / "collab-compress"
    code = f"import sys; sys.path.insert(0, {str(target)!r}); sys.argv = ['collab-compress', '--help']\n"
    code += f"exec(compile(open({str(script)!r}).read(), 'script', 'exec'), {{'__name__': '__main__'}})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_wheel_holds_all_packages_and_no_top_level_cli(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "collab_compress_cli/compress.py" in names
    assert "collab_compress/py.typed" in names
    assert not any(name.startswith(("cli/", "tests/")) for name in names)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "collab_compress").rglob("*.py")}
    assert modules <= set(names)


def test_wheel_gives_the_command(wheel, tmp_path):
    pip("install", "--no-deps", "--target", tmp_path, wheel)
    assert "--dk N" in run_script(tmp_path)
    assert not (tmp_path / "cli").exists()


def test_editable_install_gives_the_command(tmp_path):
    """The environment the tests run in is the editable install that `make test` made."""
    script = Path(sys.executable).with_name("collab-compress")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "--dk N" in done.stdout
    code = "import collab_compress_cli, importlib.util as u; assert u.find_spec('cli') is None"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
