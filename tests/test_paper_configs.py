"""The configs of the paper: sizes as published, settings as in the paper's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from txl_audio import recipe
from txl_audio.config import load
from txl_audio.optim import OptimConfig

CONFIGS = Path(__file__).parents[1] / "configs" / "text"

# Parameters, vocabulary; layers, heads, d_head, d_model, d_inner; dropout, attention dropout; segment,
# batch; warm-up, steps; evaluation segment, memory, clamp.
PAPER = {
    "enwik8_base": (
        (41_055_436, 204),
        (12, 8, 64, 512, 2048),
        (0.1, 0.0),
        (512, 22),
        (0, 400_000),
        (80, 2100, 820),
    ),
    "enwik8_large": (
        (277_231_820, 204),
        (24, 8, 128, 1024, 3072),
        (0.15, 0.15),
        (768, 64),
        (4000, 400_000),
        (128, 3800, 1000),
    ),
    "text8_base": (
        (40_964_635, 27),
        (12, 8, 64, 512, 2048),
        (0.1, 0.0),
        (512, 22),
        (0, 400_000),
        (80, 2100, 820),
    ),
    "text8_large": (
        (277_050_395, 27),
        (24, 8, 128, 1024, 3072),
        (0.15, 0.15),
        (768, 64),
        (4000, 400_000),
        (128, 3800, 1000),
    ),
    "wt103_base": (
        (151_107_538, 267_735),
        (16, 10, 41, 410, 2100),
        (0.1, 0.0),
        (150, 60),
        (0, 200_000),
        (64, 640, 400),
    ),
    "wt103_large": (
        (285_170_506, 267_735),
        (18, 16, 64, 1024, 4096),
        (0.2, 0.2),
        (384, 128),
        (16_000, 4_000_000),
        (128, 1600, 1000),
    ),
    "lm1b_base": (
        (357_812_082, 793_471),
        (18, 8, 128, 1024, 4096),
        (0.0, 0.0),
        (32, 224),
        (20_000, 500_000),
        (32, 128, None),
    ),
    "lm1b_large": (
        (841_295_982, 793_471),
        (24, 16, 80, 1280, 8192),
        (0.05, 0.05),
        (32, 512),
        (30_000, 1_200_000),
        (32, 128, None),
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_and_settings_are_those_of_the_paper(name: str) -> None:
    (parameters, symbols), shape, dropouts, batch, budget, evaluation = PAPER[name]
    path = CONFIGS / f"{name}.yaml"
    config = load(recipe.RunConfig, path)
    model = recipe.describe(path)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.model.vocab_size == symbols
    core, train, scored = config.model.core, config.train, config.evaluate
    assert (core.n_layer, core.n_head, core.d_head, core.d_model, core.d_ff) == shape
    assert (core.dropout, core.attention_dropout) == dropouts
    assert (core.segment_len, train.lanes) == batch and core.mem_len == core.segment_len
    assert (train.warmup_steps, train.steps) == budget
    assert (scored.segment_len, scored.mem_len, scored.clamp_len) == evaluation
    assert scored.window == "same_length" and core.window == "segment" and core.norm == "post"


@pytest.mark.parametrize("name", [*PAPER, "ptb"])
def test_the_optimiser_is_the_authors(name: str) -> None:
    train = load(recipe.RunConfig, CONFIGS / f"{name}.yaml").train
    authors = OptimConfig(
        lr=2.5e-4, final_lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip=0.25,
        warmup_steps=train.warmup_steps,
    )  # fmt: skip
    assert OptimConfig(**train.model_dump(include=set(OptimConfig.model_fields))) == authors


def test_penn_treebank_has_the_size_of_the_paper() -> None:
    model = recipe.describe(CONFIGS / "ptb.yaml")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 24
