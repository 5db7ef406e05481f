"""Word errors of Whisper on synthetic speech, dense and narrowed, and its time.

    python -m pip install espeakng_loader
    python benchmarks/models.py FOLDER whisper
    python benchmarks/speech.py words FOLDER/whisper [--rows dense "shared dff=1024"] [--calibrations speech noise]
    python benchmarks/speech.py time FOLDER/whisper [--rows "shared dff=1024"]

words: espeak-ng speaks plain sentences of the built-in calibration texts, each with one of four English voices at a
random speed and pitch. The model writes down fifty of them, greedily. Calibration data are other sentences, joined to
clips of 5 to 28 seconds, with their words for the decoder (speech), or noise and random tokens of the same
shapes (noise). Words are compared after Whisper's normalizer of English.

time: of the encoder for a clip, and of a decoder with 32 tokens, over the dense model's.
"""

import argparse
import copy
import ctypes
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from scipy.signal import resample_poly
from speed import DENSE, parse_row, with_dense
from timing import add_timing_arguments, cases, make_parser, measure_new, report
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from collab_compress import Compression, Solver, compress
from collab_compress.calibration.builtin import builtin_texts

RATE = 16_000  # samples a second that Whisper reads
VOICES = ("gmw/en", "gmw/en-US", "gmw/en+m3", "gmw/en-US+m3")
SCORED, BATCH = 50, 4  # sentences; clips
PLAIN = re.compile(r"[A-Z](?:[a-z ,;'-]|\bI\b)*[.?!]")  # a sentence without names, digits and symbols
ROWS = ["dense", "shared dff=1024", "shared dk=256 dv=256", "shared dk=256 dv=256 dff=1024"]


class Speaker:
    """Speak texts by espeak-ng."""

    def __init__(self) -> None:
        import espeakng_loader

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.parts: list[np.ndarray] = []
        synchronous = 2
        self.rate = self.library.espeak_Initialize(synchronous, 0, espeakng_loader.get_data_path().encode(), 0)
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = callback(self._receive)  # the library has no reference to it
        self.library.espeak_SetSynthCallback(self.callback)

    def _receive(self, samples: Any, count: int, _: Any) -> int:
        if count:
            self.parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def speak(self, text: str, draw: random.Random) -> np.ndarray:
        """Return a sound of `RATE` samples a second, with a random voice, speed and pitch."""
        self.parts.clear()
        data, character_position, utf8 = text.encode() + b"\0", 1, 1
        speed, pitch = (1, draw.randint(130, 170)), (3, draw.randint(35, 65))  # words a minute; of 100
        failures = [
            self.library.espeak_SetVoiceByName(draw.choice(VOICES).encode()),
            self.library.espeak_SetParameter(*speed, 0),
            self.library.espeak_SetParameter(*pitch, 0),
            self.library.espeak_Synth(data, len(data), 0, character_position, 0, utf8, None, None),
        ]
        if any(failures):
            raise SystemExit(f"espeak-ng cannot speak {text!r}: {failures}")
        return resample_poly(np.concatenate(self.parts) / 2**15, RATE, self.rate).astype(np.float32)


class Recognizer:
    """Whisper in a folder, with spoken sentences."""

    def __init__(self, folder: Path) -> None:
        self.dense = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.extractor = AutoFeatureExtractor.from_pretrained(folder)
        self.normalize = EnglishTextNormalizer({})
        self.speaker = Speaker()
        texts = [text for text in dict.fromkeys(builtin_texts(pairs=False, more=False)) if PLAIN.fullmatch(text)]
        texts = [text for text in texts if 6 <= len(text.split()) <= 30]
        draw = random.Random(0)
        draw.shuffle(texts)
        self.scored = [(text, self.speaker.speak(text, draw)) for text in texts[:SCORED]]
        self.others = texts[SCORED:]

    def features(self, sounds: Sequence[np.ndarray]) -> Tensor:
        """Return spectrograms of 30 seconds, (N, bins, frames)."""
        features: Tensor = self.extractor(list(sounds), sampling_rate=RATE, return_tensors="pt").input_features
        return features

    def clips(self, count: int, seed: int) -> list[tuple[str, np.ndarray]]:
        """Return words and sounds of several sentences each."""
        draw = random.Random(seed + 1)
        spoken = [(text, self.speaker.speak(text, draw)) for text in draw.sample(self.others, len(self.others))]
        pause, clips = np.zeros(RATE // 3, np.float32), []
        for _ in range(count):
            words, sound = spoken.pop()
            length = draw.uniform(5, 28) * RATE
            while spoken and len(sound) + len(spoken[-1][1]) < length:
                text, more = spoken.pop()
                words, sound = f"{words} {text}", np.concatenate([sound, pause, more])
            clips.append((words, sound))
        return clips

    def batches(self, clips: Sequence[tuple[str, np.ndarray]]) -> list[dict[str, Tensor]]:
        """Return batches of spectrograms with the decoder's tokens, as it reads them in training."""
        settings = self.dense.generation_config
        start = [settings.decoder_start_token_id, settings.lang_to_id["<|en|>"], settings.task_to_id["transcribe"]]
        start.append(settings.no_timestamps_token_id)
        batches = []
        for first in range(0, len(clips), BATCH):
            words, sounds = zip(*clips[first : first + BATCH], strict=True)
            ids = [start + self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"] for text in words]
            longest = max(map(len, ids))
            padded = [row + [settings.pad_token_id] * (longest - len(row)) for row in ids]
            mask = [[1] * len(row) + [0] * (longest - len(row)) for row in ids]
            decoder = {"decoder_input_ids": torch.tensor(padded), "decoder_attention_mask": torch.tensor(mask)}
            batches.append({"input_features": self.features(sounds), **decoder})
        return batches

    def errors(self, model: WhisperForConditionalGeneration) -> tuple[int, int]:
        """Return the number of word errors and of words."""
        errors = count = 0
        for first in range(0, SCORED, BATCH):
            texts, sounds = zip(*self.scored[first : first + BATCH], strict=True)
            ids = model.generate(self.features(sounds), language="en", task="transcribe", max_length=128)
            written = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            for text, heard in zip(texts, written, strict=True):
                words = self.normalize(text).split()
                errors, count = errors + distance(words, self.normalize(heard).split()), count + len(words)
        return errors, count


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many words are replaced, inserted or left out."""
    row = list(range(len(other) + 1))
    for number, word in enumerate(one, 1):
        previous, row[0] = row[0], number
        for place, candidate in enumerate(other, 1):
            changes = (row[place] + 1, row[place - 1] + 1, previous + (word != candidate))
            previous, row[place] = row[place], min(changes)
    return row[-1]


def _noise_like(batch: dict[str, Tensor], tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return noise with the spread of some spectrograms, and random tokens in place of their words."""
    sounds, ids = batch["input_features"], batch["decoder_input_ids"]
    noise = sounds.std() * torch.randn(sounds.shape, generator=generator)
    drawn = torch.randint(tokens, ids.shape, generator=generator)
    return {**batch, "input_features": noise, "decoder_input_ids": drawn}


def words(recognizer: Recognizer, args: argparse.Namespace) -> None:
    """Measure the word errors of all rows, and append them to the records."""

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        model, figures = recognizer.dense, dict[str, Any]()
        if case["row"] != "dense":
            model, started = copy.deepcopy(model), process_time()
            data = recognizer.batches(recognizer.clips(args.clips, case["seed"]))
            if case["calibration"] == "noise":
                generator = torch.Generator().manual_seed(case["seed"])
                data = [_noise_like(batch, len(recognizer.tokenizer), generator) for batch in data]
            compression = Compression(**parse_row(case["row"])[1], solver=Solver(seed=case["seed"]))
            made = compress(model, compression, data, recognizer.tokenizer)
            figures = {"parameters": made.parameters_after, "conversion_seconds": round(process_time() - started)}
        errors, count = recognizer.errors(model)
        return figures | {"errors": errors, "words": count}

    measure_new(args.records, cases(args, args.rows, clips=args.clips), measure)


def time(recognizer: Recognizer, args: argparse.Namespace) -> None:
    """Time the encoder and the decoder of all rows."""
    batch = recognizer.batches(recognizer.clips(1, seed=0))
    models = with_dense(recognizer.dense, [row for row in args.rows if row != DENSE], batch * 2)
    with torch.inference_mode():
        features, tokens = batch[0]["input_features"], torch.full((1, 32), recognizer.tokenizer.eos_token_id)
        heard = recognizer.dense.model.encoder(features)[0]
        encoders = {name: partial(model.model.encoder, features) for name, model in models.items()}
        report({"part": "encoder", "batch": 1}, encoders, args)
        decoders = {
            name: partial(model.model.decoder, tokens, encoder_hidden_states=heard) for name, model in models.items()
        }
        report({"part": "decoder", "T": 32, "batch": 1}, decoders, args)


def main() -> None:
    parser = make_parser(__doc__, ["words", "time"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--calibrations", nargs="+", choices=["speech", "noise"], default=["speech"], help="words")
    parser.add_argument("--clips", type=int, default=40, help="words: of calibration data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="words: of calibration data")
    add_timing_arguments(parser)
    parser.set_defaults(records=Path(__file__).parent / "records" / "speech.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"words": words, "time": time}[args.command](Recognizer(args.model), args)


if __name__ == "__main__":
    main()
