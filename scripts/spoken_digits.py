"""How well a model of spoken digits speaks and writes them.

    txl-audio prepare --dataset fsdd --root PATH/fsdd_8k --codec lyra --variants 8 --out data/fsdd_lyra
    txl-audio train configs/audio/fsdd_lyra.yaml
    python scripts/spoken_digits.py runs/fsdd_lyra --data data/fsdd_lyra

Says every digit --each times from its name and asks a recogniser that never heard the model which digit it
was (PocketSphinx with a grammar of the ten digits; pip install 'txl-audio[codec-quality]'). The same for real
recordings through the codec. Then the model writes down --heard recordings of the split, from their codes.
Writes JSON, and with --out the sound of every digit one after another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from txl_audio import recipe, runtime
from txl_audio.codec_quality import recogniser
from txl_audio.codecs.mulaw import SAMPLE_RATE_HZ
from txl_audio.data.transcripts import Transcripts
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Sampler
from txl_audio.sampling.text import transcription
from txl_audio.tokens import Codec, TxlError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LONGEST_S = 2.0
"""Of a digit; one that has not ended by then is cut off."""


def listener() -> Callable[[np.ndarray], str]:
    """pcm [N] float32 at 16 kHz -> the digit that is heard, or nothing."""
    recognise, quiet = recogniser(DIGITS), np.zeros(SAMPLE_RATE_HZ // 4, np.float32)
    # It needs to hear where speech begins and ends.
    return lambda pcm: recognise(np.concatenate([quiet, pcm, quiet]))


def say(model: Any, transcripts: Transcripts, text: str, *, lanes: int, filters: Filters, seed: int) -> list:
    """Codes [N, K] of `lanes` ways to say a text."""
    prompt = torch.from_numpy(transcripts.speak_prompt(text).reshape(1, -1)).expand(lanes, -1)
    sampler = Sampler(model, prompt=prompt, filters=filters, seed=seed)
    frames = sampler.next_frames(round(LONGEST_S * model.spec.frame_rate_hz))
    ends = (frames[..., 0] >= model.spec.codes).int()
    ends[:, -1] = 1
    return [lane[: int(end)] for lane, end in zip(frames, ends.argmax(1), strict=True)]


def spoken(codec: Codec, codes: torch.Tensor) -> np.ndarray:
    return codec.decode(codes[None])[0].numpy() if len(codes) else np.zeros(0, np.float32)


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--heard", type=int, default=300)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="sound file")
    given = parser.parse_args(arguments)
    try:
        figures = measure(given)
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


def measure(given: argparse.Namespace) -> dict[str, Any]:
    config, model = recipe.load_run(given.run)
    speaks, writes = (recipe.transcripts_of_run(given.run, config, model, o) for o in ("speak", "transcribe"))
    codec = recipe.codec_for_sound(model.spec, config.part().codec_weights)
    shards = recipe.open_shards(given.data, model, origin=str(given.run))
    documents = shards.of_split(given.split)
    filters = config.sample.filters(model.spec, temperature=given.temperature, top_p=given.top_p)
    recognise, sounds = listener(), []
    heard: dict[str, Counter[str]] = {}
    real: list[bool] = []
    written: list[bool] = []
    with runtime.single_thread(next(model.parameters()).device):
        for digit in DIGITS:
            made = say(model, speaks, digit, lanes=given.each, filters=filters, seed=given.seed)
            pcm = [spoken(codec, codes) for codes in made]
            heard[digit] = Counter(recognise(sound) for sound in pcm)
            sounds += pcm
        step = max(1, len(documents) // given.heard)
        for document in documents[::step][: given.heard]:
            codes = np.asarray(shards.symbols(document)).astype(np.int64)
            written.append(transcription(model, writes, codes) == document.text)
            real.append(recognise(spoken(codec, torch.from_numpy(codes))) == document.text)
    if given.out is not None:
        pause = np.zeros(SAMPLE_RATE_HZ // 5, np.float32)
        line = np.concatenate([part for sound in sounds for part in (sound, pause)])
        soundfile.write(given.out, line, SAMPLE_RATE_HZ, subtype="PCM_16")
    right = {digit: counts[digit] / given.each for digit, counts in heard.items()}
    return {
        "spoken_right": sum(right.values()) / len(right),
        "real_right": float(np.mean(real)),
        "written_right": float(np.mean(written)),
        "spoken": given.each * len(DIGITS),
        "written": len(written),
        "split": given.split,
        "by_digit": right,
        "mean_s": float(np.mean([len(sound) for sound in sounds])) / SAMPLE_RATE_HZ,
        "temperature": filters.temperature,
        "top_p": filters.top_p,
        "seed": given.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
