"""The commands as processes: interrupts, what nobody installed, outputs that are full, and code that is not run."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from collab_compress_cli import start
from collab_compress_cli.command import errors_in_one_line

from collab_compress.errors import CheckpointError

START = "import sys; sys.argv[0] = 'x'; from {} import start; start.{}()"
# What runs in the background ignores SIGINT, and so would what it starts.
HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
STEP = re.compile(r"collab-\w+: \d+ s: ")
IMPORTING = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "{module}":
            {statement}
sys.meta_path.insert(0, Finder())
"""


def program(command):
    """Return a program that starts a command."""
    name = command.removeprefix("collab-")
    return START.format("collab_compress_cli" if hasattr(start, name) else "collab_compress_glue_runs.commands", name)


def steps(printed):
    """Return what a command says that it is doing, on standard error."""
    return [line.partition(" s: ")[2] for line in printed.splitlines() if STEP.match(line)]


def without_steps(printed):
    """Return the other lines of standard error."""
    return [line for line in printed.splitlines() if not STEP.match(line)]


@pytest.fixture
def run(python):
    def in_a_process(command, *arguments, before="", **options):
        return python(before + program(command), *arguments, **options)

    return in_a_process


def test_an_interrupt_while_libraries_are_loaded(tmp_path):
    slow = IMPORTING.format(module="torch", statement="import time; print('importing', flush=True); time.sleep(60)")
    code = HEARING + slow + program("collab-compress")
    command = [sys.executable, "-c", code, "minilm", "--dk", "8"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)
    try:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error == (
        "collab-compress: 0 s: loading PyTorch and Transformers\n"
        "collab-compress: interrupted; nothing half-written is left\n"
    )
    assert os.listdir(tmp_path) == []


TYPED = """
import sys
from collab_compress_cli import start
for words in (["minilm", "--dkk", "8"], ["minilm", "--dk", "8", "--output", "."], ["./modle", "--dk", "8"]):
    sys.argv = ["x", *words]
    try:
        start.compress()
    except SystemExit as stop:
        assert stop.code == 2
loaded = {"torch", "transformers", "huggingface_hub", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""


def test_a_typing_error_costs_no_import_of_torch():
    done = subprocess.run([sys.executable, "-c", TYPED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *option, output, model = done.stderr.splitlines()
    assert "Unrecognized options: --dkk" in "".join(option)
    assert ". exists; choose another output or remove it" in output
    assert "./modle is not a directory; pass a model directory or a hub name" in model


@pytest.mark.parametrize(
    ("command", "arguments", "package"),
    [
        ("collab-results", ["folder"], "pyarrow"),
        ("collab-analyze", ["minilm", "--task", "mrpc", "--output", "out"], "datasets"),
    ],
)
def test_missing_optional_packages(run, tmp_path, command, arguments, package):
    done = run(command, *arguments, before=f"sys.modules['{package}'] = None\n", folder=tmp_path)
    assert done.returncode == 2
    assert len(without_steps(done.stderr)) == 1, done.stderr
    assert package in done.stderr
    assert "pip install" in done.stderr
    assert os.listdir(tmp_path) == []


RECORDS = Path(__file__).parents[2] / "glue_runs/records/trec.jsonl"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_is_full_or_gone(run):
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    done = run("collab-results", RECORDS, before=full)
    assert (done.returncode, done.stderr) == (
        2,
        "collab-results: cannot write the output: No space left on device\n",
    )
    gone = "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
    done = run("collab-results", RECORDS, before=gone)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_after_its_cleanup(capsys, number):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    before, cleared, cleanup = signal.getsignal(number), [], ExitStack()
    cleanup.callback(cleared.append, True)
    with pytest.raises(SystemExit) as stop, errors_in_one_line("x"), cleanup:
        signal.raise_signal(number)
    assert (stop.value.code, cleared) == (130, [True])
    assert capsys.readouterr().err == "x: interrupted; nothing half-written is left\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "x: out of memory: "),
        (MemoryError(), "x: out of memory"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"),
            "x: cannot write a checkpoint: ",
        ),
        (ImportError("pip install liger-kernel"), "x: pip install liger-kernel\n"),
        (OverflowError("int too big"), "x: a number is too large: int too big"),
        (OSError(2, "No such file", "a\x1b[2J"), "x: a\\x1b[2J: No such file\n"),
        (CheckpointError("a\x07\nb"), "x: a\\x07 b\n"),
    ],
)
def test_an_error_that_users_can_mend_is_one_line(capsys, error, words):
    def fail():
        logging.getLogger("collab_compress.calibration").warning("not beside an error")
        raise error

    with pytest.raises(SystemExit) as stop, errors_in_one_line("x"):
        fail()
    shown = capsys.readouterr().err
    assert (stop.value.code, shown.count("\n")) == (2, 1)
    assert words in shown


def test_another_error_is_raised():
    with pytest.raises(ZeroDivisionError), errors_in_one_line("x"):
        raise ZeroDivisionError


def test_warnings_are_shown_once_at_the_end(capsys):
    with errors_in_one_line("x"):
        for _ in range(2):
            logging.getLogger("collab_compress.calibration").warning("3 texts are cut")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "x: 3 texts are cut\n"


def test_an_output_in_ascii(run, tmp_path, make_tiny):
    make_tiny("bert").save_pretrained(tmp_path / "tiny")
    options = ("--dk", 8, "--calibration", "none", "--output", "out")
    ascii_only = "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
    done = run("collab-compress", "tiny", *options, before=ascii_only, folder=tmp_path)
    assert (done.returncode, without_steps(done.stderr)) == (0, [])
    assert "\\u2192" in done.stdout


@pytest.mark.parametrize("names", [("LOCAL_RANK",), ("WORLD_SIZE", "RANK", "LOCAL_RANK")])
def test_variables_of_a_launcher_that_is_gone(run, tmp_path, make_tiny, names):
    make_tiny("bert").save_pretrained(tmp_path / "tiny")
    statements = f"import os; os.environ.update(dict.fromkeys({names!r}, '2'))\n"
    done = run("collab-compress", "tiny", "--dk", 8, "--calibration", "none", before=statements, folder=tmp_path)
    assert (done.returncode, len(without_steps(done.stderr))) == (2, 1), done.stderr
    assert "the environment says that several processes were started" in done.stderr
    assert "unset these variables" in done.stderr
    assert os.listdir(tmp_path) == ["tiny"]


LOADING = "loading PyTorch and Transformers"
RUNNING = "running the model on calibration data"


@pytest.mark.usefixtures("model_dir")
def test_commands_say_what_they_do(run, tmp_path):
    """A line for each step, on standard error alone, from before libraries are loaded."""
    layers = [f"bert.encoder.layer.{number} ({number} of 2 done)" for number in range(2)]
    data = ("--calibration", "synthetic", "--sequences", 16, "--length", 8)
    said = {
        ("collab-compress", "tiny", "--plan", *data): [
            "reading calibration data",
            RUNNING,
            *(f"measuring {layer}" for layer in layers),
            "measured all layers (2 of 2 done)",
        ],
        ("collab-compress", "tiny", "--dk", 8, *data, "--output", "shared", "--json", "out.json"): [
            "reading calibration data",
            RUNNING,
            *(f"fitting {layer}" for layer in layers),
            "fitted all layers (2 of 2 done)",
            "measuring output error",
            "timing both models",
            "saving to shared",
        ],
        ("collab-expand", "shared", "--output", "dense"): ["expanding attention", "saving to dense"],
        ("collab-analyze", "tiny", "--sections", "mixing", "similarity", "--sentences", 8, "--output", "page"): [
            "reading the data",
            "measuring mixing",
            "measuring similarity",
            "measuring heads (1 of 1 done)",
            "writing page",
        ],
    }
    for (command, model, *arguments), expected in said.items():
        done = run(command, model, *arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        shown = list(dict.fromkeys(steps(done.stderr)))  # once, though some step took seconds
        assert shown == [LOADING, f"loading {model}", *expected]
        assert not STEP.search(done.stdout)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["model"] == "tiny"
    done = run("collab-expand", "shared", "--output", "again", "--quiet", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
ENDING = f"import os, torch; print(*map(os.environ.get, {VARIABLES}), flush=True); os._exit(0)"


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("collab-compress", {}, "1000 1 None"),
        ("collab-run", {}, "1000 1 None"),
        ("collab-compress", {"GOMP_SPINCOUNT": "7"}, "7 None None"),
        ("collab-compress", {"KMP_BLOCKTIME": "50"}, "None 50 None"),
    ],
)
def test_waiting_threads_spin_for_a_moment_only(command, environment, expected):
    """Unless the user decides; OpenMP reads these variables when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | environment
    code = IMPORTING.format(module="transformers", statement=ENDING) + program(command)
    words = [sys.executable, "-c", code, "minilm"]
    environment |= {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == f"{expected}\n", done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:  # where torch comes with GNU's OpenMP
        assert f"GOMP_SPINCOUNT = '{expected.partition(' ')[0]}'" in done.stderr or expected.startswith("None")
