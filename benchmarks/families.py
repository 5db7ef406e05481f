"""What narrower layers do to published models of two more families, and what can be done with models of any type.

    python benchmarks/families.py tried [--types bloom gptj]
    python benchmarks/models.py FOLDER rxnmapper t5
    python benchmarks/families.py reactions FOLDER/rxnmapper [--rows dense "shared dk=171" "shared dff=256"]
    python benchmarks/families.py titles FOLDER/t5 [--rows "stock dk=192 dv=192" "shared dff=512"]

tried: a small random model of each type of model that Transformers has and whose attention the table of families does
not describe (`small_models`). Whether feed-forward blocks become narrower, layers are removed and the vocabulary is
trimmed, so that `from_pretrained` loads a model with the same outputs; or why not.

reactions: an ALBERT, one layer used twelve times, of chemical reactions. The share of tokens of textbook reactions
that it fills in rightly; each is masked once, one in six at a time. Calibrated on reactions made from patterns
(texts), on random tokens (synthetic), or on none.

titles: a T5 that writes titles of what a program did; here of functions of Python's standard library, from names and
descriptions. Each conversion is saved as a plain model, and a process without this package loads it and writes 50
titles greedily: how many are the dense model's, and for how many tokens of the dense model's titles the converted
model predicts the same, given those before. Calibrated on other functions with the dense model's titles (texts), or
as above.
"""

import argparse
import copy
import importlib
import inspect
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import VOCABULARY, small_batch, small_model, undescribed_types
from speed import parse_row
from timing import cases, make_parser, measure_new, read_records
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AlbertForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from collab_compress import CalibrationOptions, CollabCompressError, Compression, Solver, compress, trim_vocabulary_
from collab_compress.architectures import FAMILIES
from collab_compress.calibration.gather import main_output, read_outputs
from collab_compress.conversion import to_stock

REACTIONS = 256  # to calibrate on
SECONDS = 60  # for each try with a small model
SCORED, CALIBRATED = 50, 100  # titles

TEXTBOOK = """
CC(=O)O.OCC>>CC(=O)OCC CC(=O)OCC.[OH-]>>CC(=O)[O-].OCC CC(=O)Cl.NCC>>CC(=O)NCC
CC(=O)OC(C)=O.Nc1ccccc1>>CC(=O)Nc1ccccc1 CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O
O=C(O)c1ccccc1.O=S(Cl)Cl>>O=C(Cl)c1ccccc1 O=C(Cl)c1ccccc1.OC>>COC(=O)c1ccccc1 BrCCCC.[OH-]>>OCCCC
BrCCCC.[C-]#N>>N#CCCCC BrCC.[O-]c1ccccc1>>CCOc1ccccc1 ICC.CC[O-]>>CCOCC BrCc1ccccc1.N>>NCc1ccccc1
ClCc1ccccc1.CNC>>CN(C)Cc1ccccc1 CC(C)(C)Br.O>>CC(C)(C)O CC(C)(C)O.Cl>>CC(C)(C)Cl CCCO.BrP(Br)Br>>CCCBr
CC(=O)C.[BH4-].[Na+]>>CC(C)O O=Cc1ccccc1.[BH4-].[Na+]>>OCc1ccccc1 COC(=O)c1ccccc1.[AlH4-].[Li+]>>OCc1ccccc1
N#Cc1ccccc1.[AlH4-].[Li+]>>NCc1ccccc1 O=[N+]([O-])c1ccccc1.[H][H]>>Nc1ccccc1
c1ccccc1.O=[N+]([O-])O>>O=[N+]([O-])c1ccccc1 c1ccccc1.BrBr>>Brc1ccccc1 c1ccccc1.CC(=O)Cl>>CC(=O)c1ccccc1
c1ccccc1.CCCl>>CCc1ccccc1 Cc1ccccc1.O=[N+]([O-])O>>Cc1ccc([N+](=O)[O-])cc1 Oc1ccccc1.BrBr>>Oc1ccc(Br)cc1
C=C.BrBr>>BrCCBr C=CC.Br>>CC(C)Br CC=C.O>>CC(C)O C1=CCCCC1.[H][H]>>C1CCCCC1 C#CC.[H][H]>>C=CC C=CC=C.C=C>>C1=CCCCC1
C=CC=C.O=C1C=CC(=O)O1>>O=C1OC(=O)C2CC=CCC12 CC(=O)C.C[Mg]Br>>CC(C)(C)O O=Cc1ccccc1.C[Mg]Br>>CC(O)c1ccccc1
O=C=O.Br[Mg]c1ccccc1>>O=C(O)c1ccccc1 O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1 CC=O.CC=O>>CC(O)CC=O
CCOC(C)=O.CCOC(C)=O>>CCOC(=O)CC(C)=O O=Cc1ccccc1.C=P(c1ccccc1)(c1ccccc1)c1ccccc1>>C=Cc1ccccc1
O=Cc1ccccc1.Nc1ccccc1>>C(=Nc1ccccc1)c1ccccc1 O=C1CCCCC1.NO>>ON=C1CCCCC1 O=C1CCCCC1.C1CCNC1>>C1=C(N2CCCC2)CCCC1
Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1 Brc1ccccc1.C=CC(=O)OC>>COC(=O)C=Cc1ccccc1
Ic1ccccc1.C#Cc1ccccc1>>C(#Cc1ccccc1)c1ccccc1 Fc1ccccc1[N+](=O)[O-].NCC>>CCNc1ccccc1[N+](=O)[O-]
CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCc1ccccc1>>CC(C)(C)OC(=O)NCc1ccccc1 CC(C)(C)OC(=O)NCc1ccccc1.Cl>>NCc1ccccc1
"""

PATTERNS = (
    "OC(=O){a}.O{b}>>{b}OC(=O){a}",
    "ClC(=O){a}.N{b}>>O=C(N{b}){a}",
    "OC(=O){a}.CN{b}.CN(C)C=O>>CN({b})C(=O){a}",
    "Br{b}.O=C([O-]){a}.[Na+]>>{b}OC(=O){a}",
    "Cl{b}.N#C{a}.[Na+].[H-]>>N#C{a}{b}",
    "O=C({a}){b}.[BH4-].[Na+].CO>>OC({a}){b}",
    "O=C{a}.N{b}.[BH4-].[Na+]>>{b}NC{a}",
    "CC(C)(C)OC(=O)N{b}.ClCCl.O=C(O)C(F)(F)F>>N{b}",
    "O=C=N{a}.N{b}.C1CCOC1>>O=C(N{b})N{a}",
    "O=S(=O)(Cl){a}.N{b}.c1ccncc1>>O=S(=O)(N{b}){a}",
    "O=C{a}.Br[Mg]{b}.C1CCOC1>>OC({b}){a}",
    "Br{a}.OB(O){b}.O=C([O-])[O-].[K+].[K+]>>{a}{b}",
)
FIRST = ("c1ccccc1", "c1ccc(F)cc1", "c1ccc(OC)cc1", "c1ccncc1", "CCC", "c1cccc(Cl)c1", "C1CCCCC1", "c1ccsc1")
SECOND = ("Cc1ccccc1", "CCC(C)C", "c1ccc(C#N)cc1", "CCOC", "C1CCOCC1", "c1ccc(C(F)(F)F)cc1", "CC(=O)OCC")

MODULES = """
argparse ast asyncio.tasks base64 bisect calendar cmd code codecs collections configparser contextlib copy csv
datetime decimal difflib dis email.utils enum fileinput fnmatch fractions ftplib functools getpass gettext glob gzip
heapq html http.client http.cookies http.server imaplib inspect ipaddress json linecache locale logging lzma mailbox
mimetypes multiprocessing.pool numbers os pathlib pickle pickletools pkgutil platform plistlib posixpath pprint
profile pstats queue random re reprlib sched secrets selectors shelve shlex shutil signal smtplib socket
socketserver ssl statistics string subprocess symtable tarfile tempfile textwrap threading timeit tokenize trace
traceback types unittest.case urllib.parse urllib.request uuid venv warnings wave weakref webbrowser xmlrpc.client
zipapp
"""

TITLES = """
import json, sys
from transformers import AutoTokenizer, T5ForConditionalGeneration
folder, tokenizer = sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[2])
model = T5ForConditionalGeneration.from_pretrained(folder).eval()
texts, titles = json.load(sys.stdin), []
for start in range(0, len(texts), 25):
    batch = tokenizer(texts[start : start + 25], padding=True, return_tensors="pt")
    titles += tokenizer.batch_decode(model.generate(**batch, max_new_tokens=24), skip_special_tokens=True)
assert not any(name.startswith("collab_compress") for name in sys.modules)
print(json.dumps(titles))
"""


PARTS = ("dff", "layers", "vocabulary")
GROUPS = {
    "no small model": "NOT BUILT",
    "reads more than tokens or images": "NOT RUN",
    "no setting of the blocks alone (experts share it, or there is none)": r"sets the width of all",
    "no blocks of plain linear layers (experts, convolutions, none)": r"has no feed-forward block",
    "no list of numbered layers": r"has no list of numbered layers",
    "layers that cannot be called alone": r"called alone|called again|called several times|passes on more",
    "weights that the model changes itself": r"divides its own weights",
    "layers of several kinds": r"would stay|are unlike|of its config",
    "layers that others read by number, or call in another order": r"cannot be removed|not called in turn",
    "one layer called several times": r"so that none can be removed",
    "layers that do not read what the one before returns": r"does not read|reads hidden states",
    "embeddings that are not plain, or other weights of the vocabulary": r"vocabulary|expected plain ones",
    "too few layers in the small model": r"and the deepest stack",
}
"""Why something is refused, in words → what the message says."""


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with as many tokens as small models know: letters, and words of two."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    tokens += [f"{one}{other}" for one, other in product(letters, letters)][: VOCABULARY - len(tokens)]
    inner = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def tried(args: argparse.Namespace) -> None:
    """Try each type of model that no record holds, and print how many work and why others do not."""
    version, described = transformers.__version__, FAMILIES
    types = args.types or undescribed_types(described)
    measure_new(
        args.records, ({"type": name, "transformers": version} for name in types), lambda case: verdicts(case["type"])
    )
    records = [record for record in read_records(args.records) if record.get("transformers") == version]
    records = [record for record in records if record["type"] in types]
    print(f"{len(records)} types; {sum('dff' in record for record in records)} built and run")
    for part in PARTS:
        reasons = [record[part] for record in records if part in record]
        groups = Counter("works" if reason == "works" else group_of(reason) for reason in reasons)
        print(f"{part}: " + "; ".join(f"{count} {group}" for group, count in groups.most_common()))


def group_of(reason: str) -> str:
    """Return the group of reasons that one belongs to."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, reason)), f"other: {reason:.120}")


def verdicts(model_type: str) -> dict[str, str]:
    """Return what can be done with a small model of a type: "works", or why not."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        dense = small_model(model_type)
    except Exception as error:
        return {"built": f"NOT BUILT: {error_line(error)}"}
    finally:
        signal.alarm(0)
    reasons = []
    for kinds in ("tokens", "images", "tokens and images"):
        data = [small_batch(dense, kinds, seed) for seed in range(4)]
        signal.alarm(SECONDS)
        try:
            one, other = (main_output(dense, read_outputs(dense, data[0]))[1] for _ in range(2))
            if not torch.equal(one, other):
                raise ValueError("its outputs are random")
            break
        except Exception as error:
            reasons.append(error_line(error))
        finally:
            signal.alarm(0)
    else:
        return {"built": f"NOT RUN: {reasons[0]}"}

    def narrow_(model: PreTrainedModel, _: Any) -> None:
        compress(model, Compression(dff=24), data)

    def shorten_(model: PreTrainedModel, _: Any) -> None:
        compress(model, Compression(layers=2), data)

    def trim_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        trim_vocabulary_(model, tokenizer, ["aa ab ac ba bb", "bb ca abc"] * 8, tokens=80)

    actions: dict[str, Callable[[PreTrainedModel, Any], None]] = {"dff": narrow_, "layers": shorten_}
    actions |= {"vocabulary": trim_} if kinds == "tokens" else {}
    return {"class": type(dense).__name__} | {part: _verdict(dense, act_, data[0]) for part, act_ in actions.items()}


def _verdict(dense: PreTrainedModel, act_: Callable[[PreTrainedModel, Any], None], batch: dict[str, Tensor]) -> str:
    """Return "works" if a changed copy of a model loads with the same outputs, or why not."""
    model = copy.deepcopy(dense)
    small = {name: value % 60 if name.endswith("input_ids") else value for name, value in batch.items()}
    signal.alarm(SECONDS)
    try:
        act_(model, small_tokenizer())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder, attn_implementation="eager").eval()
        (_, one), (_, other) = (main_output(one, read_outputs(one, small)) for one in (model, loaded))
        return "works" if torch.allclose(one, other, atol=1e-5, rtol=1e-4) else "LOADS WITH OTHER OUTPUTS"
    except CollabCompressError as error:
        return error_line(error)
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {error_line(error)}"
    finally:
        signal.alarm(0)


def _stop(*_: Any) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} seconds")


def error_line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def made_reactions(seed: int) -> list[str]:
    """Return reactions of all patterns, shuffled."""
    reactions = [pattern.format(a=a, b=b) for pattern, a, b in product(PATTERNS, FIRST, SECOND)]
    return random.Random(seed).sample(reactions, REACTIONS)


def reactions(args: argparse.Namespace) -> None:
    """Measure each row."""
    dense = AlbertForMaskedLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = args.rows or ["dense", "shared dk=171", "shared dk=128", "shared dff=256", "shared dk=171 dff=256"]

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        model, kind = copy.deepcopy(dense), case.get("calibration")
        if case["row"] != "dense":
            data: Any = made_reactions(case["seed"]) if kind == "texts" else kind
            options = None if kind in ("texts", "none") else CalibrationOptions(sequences=REACTIONS)
            convert_(model, case, data, tokenizer, options)
        right, total = filled(model, tokenizer, TEXTBOOK.split())
        return {"right": right, "tokens": total, "parameters": model.num_parameters()}

    measure_new(args.records, cases(args, rows), measure)


def filled(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], apart: int = 6) -> tuple[int, int]:
    """Return how many tokens are filled in rightly, and how many there are."""
    right = total = 0
    for text in texts:
        ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
        for first in range(1, 1 + apart):
            masked, places = ids.clone(), torch.arange(first, ids.shape[1] - 1, apart)
            masked[0, places] = tokenizer.mask_token_id
            with torch.no_grad():
                best = model(input_ids=masked).logits[0, places].argmax(-1)
            right, total = right + int((best == ids[0, places]).sum()), total + len(places)
    return right, total


def functions() -> list[str]:
    """Return what the T5 reads about functions of the standard library, in random order."""
    texts = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        for function, value in sorted(vars(module).items()):
            text = (inspect.getdoc(value) or "").split("\n\n")[0]
            own = inspect.isfunction(value) and value.__module__ == name and not function.startswith("_")
            if own and len(text) > 20:
                notes, file = " ".join(text.split())[:240], f"{name.rpartition('.')[2]}.py"
                slots = f"actions: view, edit | files: {file} | symbols: {function} | notes: {notes}"
                texts.append(f"summarize agent step: {slots}")
    random.Random(0).shuffle(texts)
    return texts


def titles(args: argparse.Namespace) -> None:
    """Measure each row."""
    dense = T5ForConditionalGeneration.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = functions()[: SCORED + CALIBRATED]
    wanted = written(args.model, args.model, texts)
    scored, pairs = texts[:SCORED], list(zip(texts[SCORED:], wanted[SCORED:], strict=True))
    rows = args.rows or ["shared dff=512", "stock dk=192 dv=192", "stock dk=192 dv=192 dff=512"]

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        model = copy.deepcopy(dense)
        convert_(model, case, pairs if case["calibration"] == "texts" else case["calibration"], tokenizer)
        model = to_stock(model) if case["row"].startswith("stock") else model
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            same = [one == other for one, other in zip(wanted, written(folder, args.model, scored), strict=False)]
        right, total = agreement(model, tokenizer, scored, wanted)
        figures = {"same": sum(same), "titles": len(same), "right": right, "tokens": total}
        return figures | {"parameters": model.num_parameters()}

    measure_new(args.records, cases(args, rows), measure)


def written(folder: Path | str, tokenizer: Path, texts: Sequence[str]) -> list[str]:
    """Return the titles of the model in a folder, which a process without this package loads."""
    command = [sys.executable, "-c", TITLES, str(folder), str(tokenizer)]
    done = subprocess.run(command, input=json.dumps(texts), check=True, stdout=subprocess.PIPE, text=True)
    result: list[str] = json.loads(done.stdout.splitlines()[-1])
    return result


def agreement(model: Any, tokenizer: Any, texts: Sequence[str], wanted: Sequence[str]) -> tuple[int, int]:
    """Return how many tokens of the titles come first given those before, and how many there are."""
    right = total = 0
    for text, title in zip(texts, wanted, strict=False):
        labels: Tensor = tokenizer(title, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            best = model(**tokenizer(text, return_tensors="pt"), labels=labels).logits.argmax(-1)
        right, total = right + int((best == labels).sum()), total + labels.numel()
    return right, total


def convert_(model: Any, case: dict[str, Any], data: Any, tokenizer: Any, options: Any = None) -> None:
    """Convert a model to the widths of a row; those of a stock T5 have heads as wide as the values'."""
    kind, widths = parse_row(case["row"])
    if kind == "stock":
        widths["head_dim"] = widths["dv"] // model.config.num_heads
    compression = Compression(**widths, solver=Solver(seed=case["seed"]))
    compress(model, compression, data, tokenizer, calibration_options=options)


def main() -> None:
    parser = make_parser(__doc__, ["reactions", "titles", "tried"])
    parser.add_argument("model", type=Path, nargs="?", help="folder of the published model")
    parser.add_argument("--types", nargs="+", help="of models to try; all by default")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--calibrations", nargs="+", choices=["texts", "synthetic", "none"], default=["texts"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--records", type=Path)
    args = parser.parse_args()
    if args.records is None:
        name = "tried.jsonl" if args.command == "tried" else "families.jsonl"
        args.records = Path(__file__).parent / "records" / name
    if args.command == "tried":
        args.records = (
            args.records.with_name("tried.jsonl") if args.records.name == "families.jsonl" else args.records
        )
        tried(args)
        return
    if args.model is None:
        parser.error(f"{args.command} takes the folder of a model")
    {"reactions": reactions, "titles": titles}[args.command](args)


if __name__ == "__main__":
    main()
