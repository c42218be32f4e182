"""Makes a small set of speech: sentences from a word list, spoken by espeak-ng in several voices.

    python scripts/make_speech.py OUT [--utterances 120] [--seed 0]

Writes OUT/utterance_0000.wav ... (mono, 16 bit, espeak-ng's own 22.05 kHz) and OUT/transcripts.tsv. The same
arguments give the same files. 120 utterances are about six minutes, spoken in a second.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import random
import sys
import tempfile
import wave
from pathlib import Path

# espeak-ng's speak_lib.h
_AUDIO_OUTPUT_SYNCHRONOUS = 2  # samples go to a callback, espeak_Synth returns when all are there
_INITIALIZE_DONT_EXIT = 0x8000
_POS_CHARACTER = 1
_CHARS_UTF8 = 1
_RATE, _PITCH = 1, 3
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

VOICES = ("en", "en-us", "en-us+m3", "en+m7", "en-us+f2", "en+f4")  # `en` is British, as espeak-ng has it

WHO = (
    "the old captain", "my youngest sister", "a patient teacher", "our neighbour", "the night nurse",
    "a tired farmer", "the choir", "nobody in the village", "the woman with the red umbrella", "his uncle",
    "every second passenger", "the clockmaker", "a boy from the valley", "the new engineer", "your cousin",
)  # fmt: skip
DOES = (
    "remembers", "was looking for", "has already sold", "carried", "never understood", "wants to repair",
    "drew a picture of", "is waiting for", "quietly opened", "found", "keeps asking about", "left behind",
    "could not describe", "paid twelve coins for", "brought back",
)  # fmt: skip
WHAT = (
    "the broken radio", "a basket of apples", "the longest bridge in the country", "three grey horses",
    "a letter without a name", "the shape of the clouds", "his first violin", "the key to the garden",
    "some fresh bread", "a map of the southern coast", "two pairs of shoes", "the story about the fox",
    "an empty glass jar", "the last train home", "the smell of wet wood",
)  # fmt: skip
WHEN = (
    "before breakfast", "in the middle of winter", "after the storm had passed", "every other Thursday",
    "while the others were asleep", "just outside the station", "for no good reason", "at a quarter to nine",
    "because the road was closed", "without saying a word", "as soon as the music stopped", "on the way back",
)  # fmt: skip


def sentence(rng: random.Random) -> str:
    """One sentence: who does what, sometimes when, sometimes as a question or with a number."""
    said = f"{rng.choice(WHO)} {rng.choice(DOES)} {rng.choice(WHAT)}"
    form = rng.random()
    if form < 0.2:
        said = f"{said} {rng.choice(WHEN)}"
    elif form < 0.3:
        said = f"{rng.choice(WHEN)}, {said}"
    elif form < 0.4:
        return f"Did you know that {said}?"
    elif form < 0.45:
        said = f"number {rng.randint(2, 999)}: {said}"
    return said[0].upper() + said[1:] + "."


class Speaker:
    """espeak-ng's library, with samples returned instead of played. One per process: it has global state."""

    def __init__(self, scratch: Path) -> None:
        """scratch: folder with a short path that outlives this object."""
        try:
            import espeakng_loader
        except ImportError as error:
            raise SystemExit("error: espeak-ng's library is missing; pip install espeakng-loader") from error
        try:
            self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        except OSError as error:
            raise SystemExit(
                f"error: espeak-ng's library does not load here ({error}); "
                "pip install --force-reinstall espeakng-loader"
            ) from error
        # The library keeps the path in 160 characters; a deep checkout has more.
        data = scratch / "espeak-ng-data"
        data.symlink_to(espeakng_loader.get_data_path(), target_is_directory=True)
        self.sample_rate_hz: int = self._library.espeak_Initialize(
            _AUDIO_OUTPUT_SYNCHRONOUS, 0, os.fsencode(data), _INITIALIZE_DONT_EXIT
        )
        if self.sample_rate_hz <= 0:
            raise SystemExit(
                f"error: espeak-ng cannot read its data in {espeakng_loader.get_data_path()}; "
                "pip install --force-reinstall espeakng-loader"
            )
        self._heard = bytearray()
        self._callback = _CALLBACK(self._hear)  # kept, or it would be collected while the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, pcm: ctypes._Pointer[ctypes.c_short], samples: int, _events: int | None) -> int:
        if pcm and samples > 0:
            self._heard += ctypes.string_at(pcm, 2 * samples)
        return 0  # go on

    def say(self, text: str, *, voice: str, words_per_minute: int, pitch: int) -> bytes:
        """text -> 16-bit samples in the machine's byte order. pitch: 0 to 100, 50 is the voice's own."""
        self._heard.clear()
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # breath is noise, by the clock otherwise
        encoded = text.encode() + b"\0"
        failed = (
            self._library.espeak_SetVoiceByName(voice.encode())
            or self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
            or self._library.espeak_SetParameter(_PITCH, pitch, 0)
            or self._library.espeak_Synth(
                encoded, ctypes.c_size_t(len(encoded)), 0, _POS_CHARACTER, 0, _CHARS_UTF8, None, None
            )
        )
        if failed or not self._heard:
            raise SystemExit(f"error: espeak-ng did not say {text!r} with voice {voice} (error {failed})")
        return bytes(self._heard)


def make_speech(out: Path, *, utterances: int, seed: int) -> float:
    """Writes the set to `out`, in place of one made before; returns its length in seconds."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("utterance_*.wav"):
        old.unlink()
    rng = random.Random(seed)
    samples = 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        (out / "transcripts.tsv").open("w", newline="", encoding="utf-8") as file,
    ):
        speaker = Speaker(Path(scratch))
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(("path", "voice", "words_per_minute", "pitch", "text"))
        for number in range(utterances):
            text, voice = sentence(rng), rng.choice(VOICES)
            words_per_minute, pitch = rng.randint(150, 220), rng.randint(30, 70)
            pcm = speaker.say(text, voice=voice, words_per_minute=words_per_minute, pitch=pitch)
            name = f"utterance_{number:04d}.wav"
            with wave.open(str(out / name), "wb") as wav:
                wav.setnchannels(1)
                wav.setsampwidth(2)
                wav.setframerate(speaker.sample_rate_hz)
                wav.writeframes(pcm)
            rows.writerow((name, voice, words_per_minute, pitch, text))
            samples += len(pcm) // 2
    return samples / speaker.sample_rate_hz


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--utterances", type=int, default=120, help="how many sentences (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="which sentences and voices (default 0)")
    given = parser.parse_args()
    if given.utterances < 1:
        parser.error(f"--utterances {given.utterances}: expected 1 or more")
    seconds = make_speech(given.out, utterances=given.utterances, seed=given.seed)
    print(f"{given.utterances} utterances, {seconds / 60:.1f} minutes, in {given.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
