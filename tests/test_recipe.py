"""From configs to objects, and sound from the model to files and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.e2e.harness import TEXT, TINY
from tests.tiny import TEXT as TEXT_SPEC
from tests.tiny import wave_model
from txl_audio import recipe
from txl_audio.codecs.mulaw import MuLawCodec, mulaw_decode
from txl_audio.config import load, parse
from txl_audio.model.sequence import SINGLE
from txl_audio.sampling import sound, text
from txl_audio.sampling.filters import Filters
from txl_audio.tokens import CheckpointError, ConfigError, DataError, SpecError, TokenSpec

CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[1] / "configs").rglob("*.yaml")
    if path.parent.name not in ("codec", "scale")  # tests/codec_training, test_plan.py
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_builds(path: Path) -> None:
    config = load(recipe.RunConfig, path)
    assert config.name == path.stem and config.data is not None
    assert parse(recipe.RunConfig, config.to_yaml()) == config
    if config.part().head.kind == "depth":
        with pytest.raises(ConfigError, match="are not prepared, and only their codec says what a frame is"):
            recipe.describe(path, ["data=nowhere"])
        spec = TokenSpec("codes", 256, 8, 50.0, 16_000, "lyra", "0").with_text(40, "0")
        model = config.model.build({SINGLE: spec})
        assert sum(p.numel() for p in model.parameters()) < 20e6
        return
    model = recipe.describe(path)
    for name, part in config.model.parts().items():
        spec = model.streams[name].spec
        if spec.modality == "waveform":
            assert spec.stored == MuLawCodec(part.symbols_per_frame).spec
            assert bool(spec.stage) == (part.predictors is not None)
        else:
            assert spec.vocab_size == part.vocab_size


def test_the_folder_of_a_run() -> None:
    config = parse(recipe.RunConfig, TEXT)
    assert config.folder == Path("runs/text")
    assert parse(recipe.RunConfig, TEXT, ["out=a/b"]).folder == Path("a/b")


def test_the_same_seed_gives_the_same_model() -> None:
    config = parse(recipe.RunConfig, TINY)
    first, second = (recipe.new_model(config, {SINGLE: MuLawCodec().spec}).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = recipe.new_model(
        parse(recipe.RunConfig, TINY, ["seed=1"]), {SINGLE: MuLawCodec().spec}
    ).state_dict()
    assert not torch.equal(first["core.layers.0.qkv.weight"], other["core.layers.0.qkv.weight"])


def test_a_config_described_with_its_first_weights(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    drawn = recipe.describe(tmp_path / "tiny.yaml", draw=True).state_dict()
    first = recipe.new_model(parse(recipe.RunConfig, TINY), {SINGLE: MuLawCodec().spec}).state_dict()
    assert all(torch.equal(value, first[name]) for name, value in drawn.items())


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (TEXT, "kind: symbols", "kind: samples", "embedding samples needs a waveform codec"),
        (TEXT, "kind: softmax", "kind: frame", "head frame needs a waveform codec"),
        (TEXT, "\nmodel:", "\nmodel:\n  symbols_per_frame: 2", "only waveform streams can be regrouped"),
        (TINY, "head: {kind: frame", "head: {kind: softmax} #", "predicts 1 symbol per frame, got 4"),
    ],
)
def test_parts_that_do_not_fit_the_stream(text: str, old: str, new: str, message: str) -> None:
    model = parse(recipe.RunConfig, text.replace(old, new)).model
    with pytest.raises((ConfigError, SpecError), match=message):
        model.build({SINGLE: TEXT_SPEC if text is TEXT else MuLawCodec().spec})


JOINT = "model: {core: {n_layer: 1, d_model: 4, n_head: 1, d_head: 4, d_ff: 4, mem_len: 4, segment_len: 4}}"


@pytest.mark.parametrize("name", ["a", "speech", "text_2"])
def test_names_of_streams(name: str) -> None:
    part = "{embedding: {kind: symbols}, head: {kind: softmax}}"
    config = parse(recipe.RunConfig, f"name: x\n{JOINT}", [f"model.streams.{name}={part}"])
    model = config.model.build({name: TEXT_SPEC})
    assert list(model.streams) == [name]


@pytest.mark.parametrize("name", ["Text", "2nd", "my-text", "_text", "type", "keys", "training"])
def test_names_that_a_stream_cannot_have(name: str) -> None:
    part = "{embedding: {kind: symbols}, head: {kind: softmax}}"
    with pytest.raises(ConfigError, match=f"model.streams: a stream is called '{name}'"):
        parse(recipe.RunConfig, f"name: x\n{JOINT}", [f"model.streams.{name}={part}"])


@pytest.mark.parametrize(
    "setting", ["vocab_size=11", "symbols_per_frame=4", "delay_frames=1", "predictors={}"]
)
def test_settings_of_one_stream_beside_several(setting: str) -> None:
    part = "model.streams.text={embedding: {kind: symbols}, head: {kind: softmax}}"
    with pytest.raises(ConfigError, match=f"model: {setting.split('=')[0]}: of one stream"):
        parse(recipe.RunConfig, f"name: x\n{JOINT}", [part, f"model.{setting}"])


def test_names_of_the_bits_figure() -> None:
    names = [replace(TEXT_SPEC, name=name) for name in ("bytes", "characters", "words", "ids")]
    specs = [MuLawCodec().spec, replace(MuLawCodec().spec, modality="codes"), *names]
    units = ["sample", "code", "byte", "character", "word", "symbol"]
    assert [recipe.bits_name(spec) for spec in specs] == [f"bits_per_{unit}" for unit in units]


def test_a_codec_that_is_not_known() -> None:
    spec = MuLawCodec().spec
    fields: dict[str, Any] = {**spec.to_json(), "settings_hash": "another"}
    with pytest.raises(SpecError, match="settings_hash: .* != 'another'"):
        recipe.codec_of(type(spec).from_json(fields, origin="test"))


def test_a_codec_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherConfig:
        """Stands for a codec that somebody registered."""

        @staticmethod
        def for_spec(spec: TokenSpec, weights: str | None) -> MuLawCodec:
            codec = MuLawCodec(spec.symbols_per_frame)
            codec.spec = replace(codec.spec, name="other")
            return codec

    spec = replace(MuLawCodec().spec, name="other")
    with pytest.raises(SpecError, match="codec 'other', which is not known here; known: .*mulaw"):
        recipe.codec_of(spec)
    monkeypatch.setitem(recipe.CODECS, "other", OtherConfig)
    assert recipe.codec_of(spec.framed(4)).spec == spec.framed(4)
    model = parse(recipe.RunConfig, TINY).model.build({SINGLE: spec})
    assert model.spec == spec.framed(4)


def test_samples_that_the_embedding_would_miss() -> None:
    with pytest.raises(
        ConfigError, match=r"embedding.history_samples is 3, .* at least symbols_per_frame, 4"
    ):
        parse(recipe.RunConfig, TINY, ["model.embedding.history_samples=3"])
    parse(recipe.RunConfig, TINY, ["model.embedding.history_samples=4"])


@pytest.mark.parametrize("name", ["levels.wav", "levels.flac", "LEVELS.WAV", "levels.aiff"])
def test_every_level_survives_a_file(tmp_path: Path, name: str) -> None:
    codes = np.arange(256)
    with sound.sound_writer(tmp_path / name, 16_000) as write:
        write(mulaw_decode(codes[:100]))
        write(mulaw_decode(codes[100:]))
    assert soundfile.info(tmp_path / name).subtype == "PCM_16"
    np.testing.assert_array_equal(sound.read_symbols(tmp_path / name, MuLawCodec()), codes)


@pytest.mark.parametrize("frame_samples", [1, 16])
def test_reading_symbols_adds_none(tmp_path: Path, frame_samples: int) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(37), 16_000)
    symbols = sound.read_symbols(tmp_path / "a.wav", MuLawCodec(frame_samples))
    assert symbols.tolist() == [128] * 37


def test_sound_that_fails_on_the_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"old")

    def stopped() -> None:
        with sound.sound_writer(path, 16_000) as write:
            write(np.zeros(100, np.float32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot write .*folder"):
        recipe.write_tensors(tmp_path / "folder", {"nll": torch.zeros(1)})


def test_how_a_run_is_sampled() -> None:
    """What a config says under `sample` holds unless a caller says otherwise; tails are of waveforms only."""
    config = parse(recipe.RunConfig, f"{TEXT}\nsample: {{tails: 0.01, top_p: 0.9, weights: int8}}")
    wave = config.sample.filters(MuLawCodec().spec)
    assert wave == Filters(top_p=0.9, tails=0.01) and config.sample.weights == "int8"
    assert config.sample.filters(TEXT_SPEC) == Filters(top_p=0.9)
    # int8 is a wish, not a demand: where the compiled backend does not run, the model's own weights do.
    model = wave_model(d_head=6)
    assert config.sample.weights_for(model) == "int8"
    assert config.sample.weights_for(model, "torch") == "float32"
    assert config.sample.weights_for(wave_model(d_head=5)) == "float32"
    given = config.sample.filters(MuLawCodec().spec, temperature=0.5, tails=0.0, top_p=None)
    assert given == Filters(temperature=0.5, top_p=0.9)
    with pytest.raises(ConfigError, match=r"sample: tails is 0.7, expected at least 0 and less than 0.5"):
        parse(recipe.RunConfig, f"{TEXT}\nsample: {{tails: 0.7}}")


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match="cannot write sound to .*x.wav"),
        sound.sound_writer(tmp_path / "file" / "x.wav", 16_000),
    ):
        pass
    with (
        pytest.raises(DataError, match="cannot write text to .*x.txt"),
        text.text_writer(tmp_path / "file" / "x.txt"),
    ):
        pass


def test_the_run_of_a_codec_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kind: codec\nname: mine\n")
    with pytest.raises(CheckpointError, match="is the run of a codec.*--codec rvq --weights"):
        recipe.load_model(tmp_path)
