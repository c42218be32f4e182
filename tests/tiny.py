"""Tiny models for tests. Every weight is random: what starts at zero would hide faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from txl_audio.codecs.mulaw import MuLawCodec
from txl_audio.codecs.predictors import PredictorsConfig, RlsConfig
from txl_audio.model.contracts import Waveform
from txl_audio.model.depth import DepthHeadConfig
from txl_audio.model.embeddings import SampleEmbeddingConfig, SymbolEmbeddingConfig
from txl_audio.model.heads import FrameHead, FrameHeadConfig, SoftmaxHeadConfig
from txl_audio.model.positions import AbsoluteConfig, AlRfouConfig, RelativeConfig, ShawConfig
from txl_audio.model.sequence import JointModel, SequenceModel, SequenceState
from txl_audio.model.transformer import CoreConfig, TransformerXL
from txl_audio.tokens import TokenSpec

M = TypeVar("M", bound=nn.Module)

TEXT = TokenSpec("text", 11, 1, 0.0, 0, "test", "0")

BACKENDS = ("reference", "shifted", "biased", "shift_free")
WINDOWS = ("segment", "same_length", "sliding")

# Position schemes as changes to `core_config`; the last two number frames inside a segment.
RELATIVE: dict[str, dict[str, Any]] = {
    "relative": {},
    "untied": {"positions": RelativeConfig(untie_r=True)},
    "clamped": {"positions": RelativeConfig(clamp_len=3)},
    "shaw": {"positions": ShawConfig(kind="shaw", max_distance=4)},
}
NUMBERED: dict[str, dict[str, Any]] = {
    "absolute": {"positions": AbsoluteConfig(kind="absolute", segment_len=4)},
    "alrfou": {"positions": AlRfouConfig(kind="alrfou", segment_len=4)},
}
for _changes in NUMBERED.values():
    _changes |= {"mem_len": 0, "window": "segment"}

# Every scheme with every window it allows, by name.
CORES: dict[str, dict[str, Any]] = {
    f"{scheme}-{window}": {**changes, "window": window}
    for scheme, changes in RELATIVE.items()
    for window in WINDOWS
} | NUMBERED

PREDICTORS = PredictorsConfig(
    filters=(
        RlsConfig(order=4, forgetting=0.98, weighting=0.5, ridge=1e-4),
        RlsConfig(order=2, forgetting=0.95, weighting=0.7, ridge=1e-4),
    )
)

# Streams: symbols per frame, embedding and head; with predictors where the name says staged.
_SAMPLES = SampleEmbeddingConfig(kind="samples", history_samples=9, width=12)
STREAMS: dict[str, tuple[int, Any, Any]] = {
    "p1-softmax": (1, SymbolEmbeddingConfig(), SoftmaxHeadConfig()),
    "p1-logistic": (1, _SAMPLES, FrameHeadConfig(kind="frame", history_samples=7, width=8, mixtures=2)),
    "p4-logistic": (4, _SAMPLES, FrameHeadConfig(kind="frame", history_samples=7, width=8, mixtures=2)),
    "staged-p4": (4, _SAMPLES, FrameHeadConfig(kind="frame", history_samples=7, width=8, mixtures=2)),
    "p4-codes": (
        4,
        SymbolEmbeddingConfig(d_embed=6),
        FrameHeadConfig(kind="frame", history_samples=3, width=8, output="softmax"),
    ),
}

# Streams of a neural codec with 3 codes a frame: the head, and the delay.
CODES = TokenSpec("codes", 7, 3, 50.0, 16_000, "test", "0")
CODE_STREAMS = {
    "codes-depth": (DepthHeadConfig(kind="depth", width=8), 0),
    "codes-delay": (DepthHeadConfig(kind="depth", width=8, walk=False), 1),
    "codes-both": (DepthHeadConfig(kind="depth", width=8, blocks=0), 2),
}


def core_config(**changes: Any) -> CoreConfig:
    sizes = {"n_layer": 2, "d_model": 12, "n_head": 2, "d_head": 5, "d_ff": 16, "mem_len": 6}
    return CoreConfig(**{**sizes, "segment_len": 4, "window": "sliding", **changes})


def core(**changes: Any) -> TransformerXL:
    return randomised(lambda: core_config(**changes).build())


def text_model(spec: TokenSpec = TEXT, **changes: Any) -> SequenceModel:
    def build() -> SequenceModel:
        config = core_config(**changes)
        embedding = SymbolEmbeddingConfig().build(spec, config.d_model)
        head = SoftmaxHeadConfig().build(spec, config.d_model, embedding)
        return SequenceModel(spec, embedding=embedding, core=config.build(), head=head)

    return randomised(build)


def codes_model(stream: str = "codes-depth", *, text_size: int = 0, **changes: Any) -> SequenceModel:
    """Of a stream of CODE_STREAMS, with `text_size` symbols of text and marks beside the codes."""

    def build() -> SequenceModel:
        (head_config, delay), config = CODE_STREAMS[stream], core_config(**changes)
        spec = (CODES.with_text(text_size, "0") if text_size else CODES).delayed(delay)
        embedding = SymbolEmbeddingConfig().build(spec, config.d_model)
        head = head_config.build(spec, config.d_model, embedding)
        return SequenceModel(spec, embedding=embedding, core=config.build(), head=head)

    return randomised(build)


def stream_model(stream: str, **changes: Any) -> SequenceModel:
    """A model of any stream by its name: `text`, of STREAMS, or of CODE_STREAMS."""
    if stream == "text":
        return text_model(**changes)
    return codes_model(stream, **changes) if stream in CODE_STREAMS else wave_model(stream, **changes)


def joint_model(**changes: Any) -> JointModel:
    """Speech (P 4) and text over one core; the text has a longer memory and segments of its own."""
    single = {"speech": wave_model(**changes), "text": text_model(**changes)}
    core = single["speech"].core
    cores = {"speech": core, "text": core.view(mem_len=9, segment_len=5)}
    streams = {
        name: SequenceModel(m.spec, embedding=m.embedding, core=cores[name], head=m.head)
        for name, m in single.items()
    }
    return JointModel(core, streams)


def wave_model(stream: str = "p4-logistic", **changes: Any) -> SequenceModel:
    def build() -> SequenceModel:
        places, embedding_config, head_config = STREAMS[stream]
        codec, config = MuLawCodec(places), core_config(**changes)
        stage = PREDICTORS.build(codec.levels) if stream.startswith("staged") else None
        waveform = Waveform(codec.levels, codec.edges, stage)
        embedding = embedding_config.build(codec.spec, config.d_model, waveform)
        head = head_config.build(codec.spec, config.d_model, embedding, waveform)
        if isinstance(head, FrameHead) and head.predict is not None:
            # Wide components: random codes, which no sharp prediction expects, then cost less than
            # the floor of the likelihood, where nothing would depend on anything.
            torch.nn.init.constant_(head.output.bias[2 * head.mixtures :], 2.0)
        return SequenceModel(codec.spec, embedding=embedding, core=config.build(), head=head, stage=stage)

    return randomised(build)


def randomised(build: Callable[[], M], std: float = 0.1) -> M:
    """A module in eval mode; the same sizes give the same weights, and other draws are left alone."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        module = build().eval()
        for parameter in module.parameters():
            parameter.add_(std * torch.randn(parameter.shape))
    return module


def audio_frames(
    model: SequenceModel, lanes: int, frames: int, begins: Iterable[tuple[int, int]] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Random (inputs, targets, reset) of lanes whose documents begin at frame 0 and at `begins`."""
    spec = model.spec
    line = torch.randint(spec.vocab_size, (lanes, frames + 1, spec.symbols_per_frame))
    inputs, targets = line[:, :-1].clone(), line[:, 1:].clone()
    reset = torch.zeros(lanes, frames, dtype=torch.bool)
    for lane, frame in begins:
        reset[lane, frame] = True
    reset[:, 0] = True
    if spec.scores_first:
        inputs[reset] = spec.start_symbol
    return inputs, targets, reset


def run_core(model: TransformerXL, x: Tensor, lengths: Iterable[int], reset: Tensor | None = None) -> Tensor:
    """Hidden [B, N, D] of x [B, N, D] fed in segments of `lengths`."""
    memory, at, out = model.first_memory(x.size(0)), 0, []
    for n in lengths:
        part = None if reset is None else reset[:, at : at + n]
        hidden, memory = model(x[:, at : at + n], memory, part)
        out.append(hidden)
        at += n
    assert at == x.size(1)
    return torch.cat(out, dim=1)


def run_nll(
    model: SequenceModel, inputs: Tensor, targets: Tensor, lengths: Iterable[int], reset: Tensor | None = None
) -> tuple[Tensor, SequenceState]:
    """Nats [B, N, K] of a stream fed in segments of `lengths`, and the state after it."""
    state, at, out = model.initial_state(inputs.size(0)), 0, []
    for n in lengths:
        part = slice(at, at + n)
        nats, state = model.nll(
            inputs[:, part], targets[:, part], state, None if reset is None else reset[:, part]
        )
        out.append(nats)
        at += n
    assert at == inputs.size(1)
    return torch.cat(out, dim=1), state


def lengths_of(total: int, segment: int) -> list[int]:
    """[segment, segment, ..., rest]."""
    return [min(segment, total - at) for at in range(0, total, segment)]
