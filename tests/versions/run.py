"""Run the tests that meet Transformers beside other versions of it: `make test-versions`.

    python tests/versions/run.py [VERSION ...]

Without arguments: the versions below, and the newest that the package index has, if pyproject.toml allows it and it
is newer than the one in constraints.txt, which `make test` tries. Each version gets a folder in `.venv-versions`,
with itself and what it needs in another version; all else is that of `.venv`. Prints one line for each version;
output of the tests is in that folder.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-versions"
# Version → what it needs beside itself in an older version than `.venv` has.
VERSIONS = {
    "5.0.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.5.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.15.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.20.2": (),
    "5.23.0": (),
}
TESTS = ("families", "checkpoint", "conversion/test_expand.py", "training/test_trainer.py", "cli/test_compress.py")
TESTS += ("attention/test_decoding.py", "attention/test_stock.py", "test_compatibility.py")


def newer_version(listing: str) -> str | None:
    """Return the newest version in a list of pip that pyproject.toml allows, or None if constraints.txt has it.

    Args:
        listing: output of `pip index versions transformers`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(line for line in map(Requirement, project["dependencies"]) if line.name == "transformers")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^transformers==(.+)$", constraints, re.M)[0]
    versions = re.findall(r"^Available versions: (.+)$", listing, re.M)[0].split(", ")
    newest = max((version for version in versions if version in allowed.specifier), key=Version)
    return newest if Version(newest) > Version(pinned) else None


def ask_for_newer() -> list[str]:
    """Return the newest version if it is to be tried, as the package index has it; print what it answers."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "transformers", "--disable-pip-version-check"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        print("The newest version is not tried: the package index could not be asked.", flush=True)
        return []
    version = newer_version(done.stdout)
    if version is None:
        print("constraints.txt has the newest version, which `make test` tries.", flush=True)
        return []
    print(f"Transformers {version} is newer than the version in constraints.txt.", flush=True)
    return [version]


def install(version: str) -> Path:
    """Install a version into a folder of its own, once; return the folder."""
    folder = FOLDER / version
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial)]
        # A newer version than those above comes with all that it needs, which may be newer too.
        subprocess.run(
            [*pip, *(["--no-deps"] if version in VERSIONS else []), f"transformers=={version}"], check=True
        )
        for package in VERSIONS.get(version, ()):
            options = [] if package == "httpx" else ["--no-deps"]
            subprocess.run([*pip, *options, package], check=True)
        partial.rename(folder)
    return folder


def run(version: str) -> bool:
    """Run the tests beside a version; return whether they pass."""
    folder = install(version)
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = ["-q", "-n", "2", "-m", "not slow", "-W", "default", "-p", "skip_newer"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in TESTS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (folder / "tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    print(f"Transformers {version}: {(done.stdout.splitlines() or ['no output'])[-1]}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    passed = [run(version) for version in sys.argv[1:] or [*VERSIONS, *ask_for_newer()]]
    sys.exit(0 if all(passed) else 1)
