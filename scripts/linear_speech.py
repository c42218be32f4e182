"""What an adaptive linear predictor says when it continues its own output: what a network has to beat."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from txl_audio.codecs import predictors
from txl_audio.codecs.mulaw import SAMPLE_RATE_HZ, MuLawCodec, mulaw_decode

TELL_EVERY_S = 10.0


def linear_continuations(
    stage: predictors.Predictors, prompts: np.ndarray, samples: int, *, seed: int, tell: Callable[[str], None]
) -> np.ndarray:
    """Each of prompts [B, N] mu-law codes continued by the stage alone: pcm [B, samples] float32.

    A sample is the stage's reference plus a residual in units of its scale, drawn from those that the second
    half of the prompt had. `tell` gets a line of progress now and then.
    """
    codec = MuLawCodec()
    line = torch.from_numpy(prompts)[..., None]
    before = torch.cat([torch.full_like(line[:, :1], codec.spec.start_symbol), line[:, :-1]], dim=1)
    side, state = stage.run(before, line, stage.initial_state(len(prompts)))
    residuals = ((mulaw_decode(line) - side[..., 0]) / side[..., 1])[:, prompts.shape[1] // 2 :, 0].numpy()
    drawn = np.random.default_rng(seed).integers(residuals.shape[1], size=(len(prompts), samples))
    noise = np.take_along_axis(residuals, drawn, axis=1)
    codes, states = np.empty((len(prompts), samples), np.int64), state.numpy()
    side_row, edges, told = np.empty(stage.width, np.float32), codec.edges.numpy(), time.perf_counter()
    for lane in range(len(prompts)):
        newest, parts = prompts[lane, -1], stage.parts(states[lane])
        for at in range(0, samples, SAMPLE_RATE_HZ):
            piece = slice(at, at + SAMPLE_RATE_HZ)
            newest = _continue(
                newest, noise[lane, piece], codes[lane, piece], parts, side_row, edges,
                stage.levels, stage.orders, stage.settings, stage.shape,
            )  # fmt: skip
            if time.perf_counter() - told > TELL_EVERY_S:
                told = time.perf_counter()
                tell(f"prompt {lane + 1} of {len(prompts)}: {at // SAMPLE_RATE_HZ + 1} s")
    return mulaw_decode(codes)


@njit(cache=True)
def _continue(newest, noise, codes, parts, side, edges, levels, orders, settings, shape):
    """Writes codes [N] after `newest`; the last of them."""
    for t in range(len(codes)):
        predictors.observe(newest, parts, levels, orders, settings, shape)
        predictors.features(parts, orders, side)
        sample = min(max(side[0] + side[1] * noise[t], -1.0), 1.0)
        newest = np.searchsorted(edges, sample, side="right")
        codes[t] = newest
    return newest
