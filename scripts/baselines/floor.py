"""What is possible without a network: adaptive linear prediction, and a mixture that adapts too.

    python scripts/baselines/floor.py --data data/kathleen --out out/baselines/floor

The reference of the project's predictors, the mean of two recursive-least-squares filters, is the centre of
logistic distributions whose scales are multiples of the recent error; their weights follow how well each
has predicted lately. Nothing is trained: filters, scales and weights begin anew with each document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numba import njit

from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.codecs.predictors import PredictorsConfig
from txl_audio.data.shards import Shards
from txl_audio.data.stream import document_frames
from txl_audio.recipe.runs import SplitDocuments
from txl_audio.tokens import TxlError

AVERAGES = np.array([0.1, 0.01])
"""Rates of the two averages of the absolute residual that scales are multiples of."""
MULTIPLES = 2.0 ** np.arange(-2.5, 2.0)
WEIGHT_RATE = 0.02
ALL_ALIKE, ANY_CODE = 0.02, 1e-4
"""What the weights keep of equal shares, and the codes of a uniform distribution."""


@njit(cache=True)
def mixture_nats(codes: np.ndarray, levels: np.ndarray, edges: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Nats of each code [N], given the centre of its distribution, [N] amplitudes.

    levels [256]: amplitudes of the codes; edges [257]: of the quantiser's bins, the outer ones infinite.
    """
    count = len(AVERAGES) * len(MULTIPLES)
    errors = np.full(len(AVERAGES), 2e-5)
    weights, masses = np.full(count, 1.0 / count), np.empty(count)
    nats = np.empty(len(codes))
    for t in range(len(codes)):
        low, high = edges[codes[t]] - centres[t], edges[codes[t] + 1] - centres[t]
        if low > 0:  # the tail where differences of the distribution function keep their digits
            low, high = -high, -low
        total = 0.0
        for k in range(count):
            scale = errors[k // len(MULTIPLES)] * MULTIPLES[k % len(MULTIPLES)]
            mass = 1 / (1 + math.exp(-high / scale)) - 1 / (1 + math.exp(-low / scale))
            masses[k] = weights[k] * mass + 1e-12 / count
            total += masses[k]
        nats[t] = -math.log((1 - ANY_CODE) * total + ANY_CODE / len(levels))
        for k in range(count):
            kept = (1 - ALL_ALIKE) * masses[k] / total + ALL_ALIKE / count
            weights[k] += WEIGHT_RATE * (kept - weights[k])
        residual = abs(levels[codes[t]] - centres[t]) + 2e-5
        errors += AVERAGES * (residual - errors)
    return nats


def score(shards: Shards, split: str) -> dict[str, float | int]:
    """Scores every sample of a split once; what result.json holds of it."""
    codec, begun = MuLawCodec(), time.perf_counter()
    levels = codec.levels.double().numpy()
    edges = np.concatenate([[-np.inf], codec.edges.numpy(), [np.inf]])
    # Nothing is sampled, so nothing need be stable: whole bandwidth, no limit that decays.
    filters = PredictorsConfig().filters[:2]
    stage = PredictorsConfig(filters=filters, expansion=1, peak_decay=1).build(codec.levels)
    documents, total, count = SplitDocuments(shards, split), 0.0, 0
    for index in range(len(documents)):
        codes = documents[index]
        inputs, targets = (torch.from_numpy(part)[None] for part in document_frames(codes, shards.spec))
        side, _ = stage.run(inputs, targets, stage.initial_state(1))
        centres = side[0, :, 0, 0].double().numpy()
        total += float(mixture_nats(codes, levels, edges, centres).sum())
        count += len(codes)
    seconds = time.perf_counter() - begun
    return {"bits_per_sample": total / count / math.log(2), "count": count, "seconds": seconds}


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--data", type=Path, required=True, help="shards made by `txl-audio prepare`")
    parser.add_argument("--out", type=Path, required=True)
    words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    try:
        result = score(Shards.open(given.data), "val")
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"arguments": words, "name": "floor", "parameters": 0, "samples": 0, **result}
    (given.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
