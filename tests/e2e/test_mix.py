"""A run on two sets by weights, one of them behind a URL."""

from __future__ import annotations

from tests.e2e.conftest import Workspace
from tests.e2e.harness import run
from txl_audio.config import load
from txl_audio.recipe.config import MixConfig, RunConfig


def test_a_mix_trains_resumes_and_is_scored(workspace: Workspace) -> None:
    url = f"file://{workspace.data}"
    mix = f"data={{mix: [{{path: {workspace.data}}}, {{path: '{url}', weight: 2}}]}}"
    out, trained = workspace.train("mixed", mix)
    assert trained.code == 0, trained.err
    config = load(RunConfig, out / "config.yaml")
    assert isinstance(config.data, MixConfig)
    assert [(one.path, one.weight) for one in config.data.mix] == [(str(workspace.data), 1), (url, 2)]
    assert run("train", out / "config.yaml", "--resume", "train.steps=6").code == 0
    both = run("evaluate", out, "--json").json
    (one, there) = (run("evaluate", out, data, "--json").json for data in (workspace.data, url))
    assert one["nats"] == there["nats"] and both["count"] == 2 * one["count"]
    assert abs(both["nats"] - 2 * one["nats"]) < 1e-6 * both["nats"]
