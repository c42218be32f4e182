"""What comes over the server is what `txl-audio sample` makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from tests.e2e.harness import run
from tests.serve.test_uploads import sound_file, tone
from txl_audio.serve import models
from txl_audio.serve.client import connect
from txl_audio.serve.running import running
from txl_audio.serve.service import Service


def test_the_same_seed_gives_the_same_sound(tmp_path: Path) -> None:
    prompt, out = tmp_path / "prompt.wav", tmp_path / "out.wav"
    prompt.write_bytes(sound_file(tone(0.11, 22_050), 22_050))
    with running(Service(models.load(["kathleen"]), slots=2)) as url:
        for seed, words, data in ((3, (), b""), (4, ("--prompt", prompt), prompt.read_bytes())):
            run("sample", "kathleen", "--seconds", 0.35, "--seed", seed, *words, "--out", out)
            alone = soundfile.read(out, dtype="int16")[0]
            with (
                connect(url, "kathleen", seconds=0.35, seed=seed, prompt=data) as stream,
                connect(url, "kathleen", seconds=0.35, seed=9) as other,
            ):
                np.testing.assert_array_equal(np.concatenate(list(stream)), alone)
                assert not np.array_equal(np.concatenate(list(other)), alone)
                assert stream.events["started"]["backend"] == "compiled cpu int8"
