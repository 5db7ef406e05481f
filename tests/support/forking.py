"""A Python that imported large libraries once, and runs every program in a fork: a start takes no seconds."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

SECONDS = 240  # until a program is killed

# The child leaves the loop and runs its program as `python -c` would, with streams and arguments of its own; all but
# the taking down of what was imported, which takes longer than most programs. Its parent writes down its exit code.
SERVER = f"""
import atexit, gc, json, os, signal, sys, threading, traceback
import torch
import transformers.quantizers.auto
from transformers import AlbertModel, AutoModel, BertModel, DistilBertModel, MarianMTModel, Trainer
import datasets, scipy.stats, sklearn.metrics
gc.collect()
gc.freeze()
for line in sys.stdin:
    if os.fork() == 0:
        break
else:
    sys.exit()
job = json.loads(line)
stdin, stdout, stderr, ended = (f"{{job['run']}}.{{name}}" for name in ("stdin", "stdout", "stderr", "code"))
program = os.fork()
if program:
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with open(ended + ".partial", "w") as file:
        file.write(str(code))
    os.rename(ended + ".partial", ended)
    os._exit(0)
signal.alarm({SECONDS})
for stream, path in enumerate((stdin, stdout, stderr)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if stream else os.O_RDONLY), stream)
sys.stdin = open(0)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(job["folder"])
os.environ |= job["environment"]
sys.argv = ["-c", *job["arguments"]]
code = 1
try:
    exec(compile(job["code"], "<string>", "exec"), {{"__name__": "__main__", "sys": sys}})
    code = 0
except SystemExit as stop:
    code = stop.code or 0
    if not isinstance(code, int):
        code = print(code, file=sys.stderr) or 1
except BaseException:
    traceback.print_exc()
try:
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
finally:
    os._exit(code)
"""


class ForkingPython:
    """Runs programs, code with `sys` there; an empty folder is for their streams and Transformers' cache."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        environment = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "1000",
            "PYTHONHASHSEED": "1",
        }
        pipe = subprocess.PIPE  # standard output as well, for a file would be one to seek in
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, text=True, stdin=pipe, stdout=pipe
        )

    def start(
        self,
        code: str,
        *arguments: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Path:
        """Start a program in a fork, in `folder`, with further environment variables; return the path of its run."""
        self.runs += 1
        run = self.folder / str(self.runs)
        run.with_suffix(".stdin").write_text(stdin, encoding="utf-8")
        job = {"code": code, "arguments": [str(argument) for argument in arguments], "run": str(run)}
        job |= {"folder": str(folder or self.folder), "environment": dict(environment or {})}
        assert self.server.stdin is not None
        print(json.dumps(job), file=self.server.stdin, flush=True)
        return run

    def wait(self, run: Path) -> CompletedProcess[str]:
        """Wait for the end of a program; return what it printed."""
        while not run.with_suffix(".code").exists():
            assert self.server.poll() is None
            time.sleep(0.005)
        code, *printed = (run.with_suffix(f".{name}").read_text("utf-8") for name in ("code", "stdout", "stderr"))
        return CompletedProcess("", int(code), *printed)

    def __call__(self, code: str, *arguments: object, **options: Any) -> CompletedProcess[str]:
        return self.wait(self.start(code, *arguments, **options))

    def both(self, code: str, *arguments: object) -> CompletedProcess[str]:
        """Run a program in two processes, as `torchrun` does; return their joined output."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runs = [
            self.start(code, *arguments, environment={"RANK": rank, "LOCAL_RANK": rank, **shared}) for rank in "01"
        ]
        one, other = map(self.wait, runs)
        code_of_both = one.returncode or other.returncode
        return CompletedProcess("", code_of_both, one.stdout + other.stdout, one.stderr + other.stderr)

    def close(self) -> None:
        self.server.communicate()
