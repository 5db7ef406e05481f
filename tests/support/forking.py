"""A Python that imported large libraries once, and runs every program in a fork: a start takes no seconds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

# The child leaves the loop and runs its program as `python -c` would, with streams and arguments of its own; all but
# the taking down of what was imported, which takes longer than most programs.
SERVER = """
import atexit, gc, json, os, signal, sys, threading, traceback
import torch
import transformers.quantizers.auto
from transformers import AlbertModel, AutoModel, BertModel, DistilBertModel, MarianMTModel, Trainer
import datasets, scipy.stats, sklearn.metrics
gc.collect()
gc.freeze()
for line in sys.stdin:
    verb, job = json.loads(line)
    if verb == "poll":
        pid, status = os.waitpid(job, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
else:
    sys.exit()
for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
    os.dup2(os.open(job["streams"][stream], mode), stream)
sys.stdin = open(0)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(job["folder"])
os.environ |= job["environment"]
sys.argv = ["-c", *job["arguments"]]
code = 1
try:
    exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__", "sys": sys})
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
SCRIPT = """
import runpy
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class ForkingPython:
    """Run programs: code, with `sys` there, or the file of a script.

    Args:
        folder: an empty one, for what programs read and write, and for Transformers' cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        environment = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "1000",
            "PYTHONHASHSEED": "1",
        }
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, verb: str, job: object) -> int | None:
        """Send the server a request; return its answer."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps([verb, job]), file=self.server.stdin, flush=True)
        answer: int | None = json.loads(self.server.stdout.readline())
        return answer

    def start(
        self,
        program: str | Path,
        *arguments: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> "Fork":
        """Start a program in a fork.

        Args:
            program: code or a script.
            arguments: of the program.
            folder: where it runs.
            environment: variables that it gets beside those of the server.
            stdin: what it reads from standard input.
        """
        if isinstance(program, Path):
            program, arguments = SCRIPT, (program, *arguments)
        self.runs += 1
        streams = [str(self.folder / f"{self.runs}.{name}") for name in ("stdin", "stdout", "stderr")]
        Path(streams[0]).write_text(stdin, encoding="utf-8")
        job = {"code": program, "arguments": [str(argument) for argument in arguments], "streams": streams}
        job |= {"folder": str(folder or self.folder), "environment": dict(environment or {})}
        pid = self.ask("start", job)
        assert pid is not None
        return Fork(self, pid, [Path(stream) for stream in streams])

    def __call__(self, program: str | Path, *arguments: object, **options: Any) -> CompletedProcess[str]:
        return self.start(program, *arguments, **options).ended()

    def both(self, program: str | Path, *arguments: object, **options: Any) -> CompletedProcess[str]:
        """Run a program in two processes, as `torchrun` does; return their joined output."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        forks = [
            self.start(program, *arguments, environment={"RANK": rank, "LOCAL_RANK": rank, **shared}, **options)
            for rank in "01"
        ]
        one, other = (fork.ended() for fork in forks)
        return CompletedProcess(
            "", one.returncode or other.returncode, one.stdout + other.stdout, one.stderr + other.stderr
        )

    def close(self) -> None:
        self.server.communicate()


class Fork:
    """A process that was started, with what is needed of `subprocess.Popen`."""

    def __init__(self, python: ForkingPython, pid: int, streams: list[Path]) -> None:
        self.python, self.pid, self.streams = python, pid, streams
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.python.ask("poll", self.pid)
        return self.returncode

    def ended(self, seconds: float = 240) -> CompletedProcess[str]:
        """Wait for its end; return what it printed."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"not ended after {seconds} s: {self.printed()}")
            time.sleep(0.005)
        assert self.returncode is not None
        return CompletedProcess("", self.returncode, *self.printed())

    def printed(self) -> tuple[str, str]:
        """Return what it has written so far to standard output and standard error."""
        output, error = (path.read_text(encoding="utf-8") for path in self.streams[1:])
        return output, error

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
