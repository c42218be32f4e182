#!/usr/bin/env bash
# Makes the model that ships as `kathleen` anew: bash scripts/make_kathleen.sh FOLDER
# Shards, training (as long as the model's config says), how it sounds, the files of the package. Called again
# after Ctrl-C, the training continues where it was.
#
# FOLDER holds 1,075 sound files and no others, from github.com/rhasspy/dataset-voice-kathleen: of every prompt
# the last take (in arctic_PROMPT_TIME.wav the largest TIME), and of those the first 1,075 by name. Each is mono,
# 16 kHz and 16 bits, with its upstream base name and its level untouched, as sox makes them:
#   sox -D data/NAME.wav -b 16 -r 16000 -c 1 FOLDER/NAME.flac rate -v
# The split follows the order of the names: files 0, 20, 40, ... are validation, 10, 30, 50, ... test.
set -euo pipefail
recordings="$(cd "${1:?expected the folder of recordings; what it holds stands at the top of this script}" && pwd)"
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

txl-audio prepare "$recordings" --out data/kathleen --split every-20th
if [ -d runs/kathleen/state ]; then
    txl-audio train runs/kathleen/config.yaml --resume
else
    txl-audio train txl_audio/models/kathleen/config.yaml data=data/kathleen out=runs/kathleen
fi
# The first 20 prompts and seed 0 were there for choosing settings.
python scripts/free_running.py runs/kathleen --data data/kathleen --out out/kathleen --prompts 20 --first 20 --seed 1
python scripts/ship_model.py runs/kathleen --name kathleen --free-running out/kathleen/results.json
