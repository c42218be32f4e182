#!/usr/bin/env bash
# Makes the model that ships as `kathleen` anew: bash scripts/make_kathleen.sh FOLDER_OF_RECORDINGS
# Shards, training (as long as the model's config says), how it sounds, the files of the package. Called again
# after Ctrl-C, the training continues where it was.
set -euo pipefail
recordings="$(cd "${1:?expected the folder of recordings}" && pwd)"
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

txl-audio prepare "$recordings" --out data/kathleen --split every-20th
if [ -d runs/kathleen/state ]; then
    txl-audio train runs/kathleen/config.yaml --resume
else
    txl-audio train txl_audio/models/kathleen/config.yaml data=data/kathleen out=runs/kathleen
fi
# The first 20 prompts are left to the choice of settings.
python scripts/free_running.py runs/kathleen --data data/kathleen --first 20 --prompts 20 --out out/kathleen
python scripts/ship_model.py runs/kathleen --name kathleen --free-running out/kathleen/results.json
