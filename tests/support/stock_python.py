"""A Python that cannot import this package; Transformers is imported once, and every piece of code runs in a fork."""

import json
import subprocess
import sys
from pathlib import Path

SERVER = """
import json, os, sys, traceback
sys.modules["collab_compress"] = None
import torch
import transformers.quantizers.auto
from transformers import AlbertModel, AutoModel, BertModel, DistilBertModel, MarianMTModel
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, path in ((1, job["stdout"]), (2, job["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["-c", *job["arguments"]]
        failed = 0
        try:
            exec(job["code"], {"__name__": "__main__", "sys": sys})
        except BaseException:
            traceback.print_exc()
            failed = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class StockPython:
    """Run code, with `sys` there, where `import collab_compress` fails.

    Args:
        folder: an empty one, for what the code writes to its streams and for Transformers' cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        self.runs += 1
        streams = {name: str(self.folder / f"{self.runs}.{name}") for name in ("stdout", "stderr")}
        job = {"code": code, "arguments": [str(argument) for argument in arguments], **streams}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(job), file=self.server.stdin, flush=True)
        returned = int(self.server.stdout.readline())
        written = {name: Path(path).read_text(encoding="utf-8") for name, path in streams.items()}
        return subprocess.CompletedProcess(code, returned, **written)

    def close(self) -> None:
        self.server.communicate()
