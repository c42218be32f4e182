#!/usr/bin/env bash
# From nothing to generated speech in a few minutes on a laptop's CPU: five seconds of the model that ships; then
# makes a small set of speech, trains a small mu-law model on it, scores it and samples from it. Everything lands
# in out/quickstart.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out=out/quickstart
say() { printf '\n== %s\n' "$*"; }

say "five seconds of kathleen, the model that ships with the package"
txl-audio sample kathleen --seconds 5 --seed 0 --out "$out/kathleen.wav"
python -m txl_audio.plots "$out/kathleen.wav" "$out/kathleen.png"

say "speech, spoken by espeak-ng"
python scripts/make_speech.py "$out/speech"

say "samples to mu-law codes"
txl-audio prepare "$out/speech" --out "$out/data" --split every-10th

say "training (about two minutes)"
txl-audio train configs/audio/quickstart.yaml --overwrite

say "bits per sample on the utterances it has not seen"
txl-audio evaluate "$out/run"

say "three seconds of its own"
txl-audio sample "$out/run" --seconds 3 --seed 0 --out "$out/sample.wav"
python -m txl_audio.plots "$out/sample.wav" "$out/sample.png"
python -m txl_audio.plots "$out/run/metrics.jsonl" "$out/training.png"

say "look at"
printf '  %s\n' "$out/kathleen.wav  the shipped model's sound" "$out/kathleen.png  its waveform and spectrogram" \
    "$out/sample.wav    the generated sound" "$out/sample.png    its waveform and spectrogram" \
    "$out/training.png  bits per sample while it trained" "$out/run         the run: weights, config, metrics"
