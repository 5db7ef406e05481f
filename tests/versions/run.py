"""Run the tests that meet Transformers beside older versions of it: `make test-versions`.

    python tests/versions/run.py [VERSION ...]

Each version gets a folder in `.venv-versions`, with itself and what it needs older; all else is that of `.venv`.
Prints one line for each version; output of the tests is in that folder.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-versions"
# Version → what it needs beside itself in an older version than `.venv` has.
VERSIONS = {
    "5.0.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.5.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.15.0": ("huggingface_hub<2", "tokenizers<=0.23.0", "httpx"),
    "5.20.2": (),
}
TESTS = ("families", "checkpoint", "conversion/test_expand.py", "training/test_trainer.py", "cli/test_compress.py")
TESTS += ("test_compatibility.py",)


def install(version: str) -> Path:
    """Install a version into a folder of its own, once; return the folder."""
    folder = FOLDER / version
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial)]
        subprocess.run([*pip, "--no-deps", f"transformers=={version}"], check=True)
        for package in VERSIONS[version]:
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
    passed = [run(version) for version in sys.argv[1:] or VERSIONS]
    sys.exit(0 if all(passed) else 1)
