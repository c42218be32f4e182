"""Codes are sampled as they are scored: walked or delayed, with text before or after them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import CODE_STREAMS, CODES, codes_model, run_nll
from txl_audio.data.stream import document_frames
from txl_audio.data.text import CharacterVocabulary
from txl_audio.data.transcripts import Transcripts
from txl_audio.model.sequence import SequenceModel
from txl_audio.sampling.filters import Filters
from txl_audio.sampling.sampler import Sampler
from txl_audio.tokens import SpecError

TRANSCRIPTS = Transcripts(CharacterVocabulary("ab"), CODES)


def offline(model: SequenceModel, frames: Tensor) -> Tensor:
    """Nats [steps, K] of one document [N, K]."""
    inputs, targets = (torch.from_numpy(f)[None] for f in document_frames(frames.numpy(), model.spec))
    return run_nll(model, inputs, targets, [inputs.size(1)])[0][0]


@pytest.mark.parametrize("frames", [0, 1, 6])
@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_what_is_drawn_costs_what_it_is_scored_with(stream: str, frames: int) -> None:
    model = codes_model(stream)
    prompt = torch.randint(7, (2, 3 * frames))
    sampler, nats, made = Sampler(model, prompt=prompt, seed=3), [], []
    for _ in range(12):
        made.append(sampler.next_frame())
        nats.append(sampler.nats)
    ahead = 2 * model.spec.delay_frames  # steps that the first place is ahead of the last
    for lane in range(2):
        document = torch.cat([prompt[lane].view(-1, 3), torch.stack(made)[:, lane]])
        scored = offline(model, document)[frames + ahead : frames + 12]
        drawn = torch.stack(nats)[: 12 - ahead, lane]
        torch.testing.assert_close(drawn, scored, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_calls_and_backends_change_nothing(stream: str) -> None:
    model, prompt = codes_model(stream), torch.randint(7, (2, 6))
    expected = Sampler(model, prompt=prompt, seed=3).next_frames(9)
    parts = Sampler(model, prompt=prompt, seed=3)
    assert torch.equal(torch.cat([parts.next_frames(n) for n in (1, 3, 5)], dim=1), expected)
    for backend in ("torch", "graph"):
        other = Sampler(model, prompt=prompt, seed=3, backend=backend)
        assert torch.equal(other.next_frames(9), expected)


@pytest.mark.parametrize("backend", ["torch", "compiled", "graph"])
@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_sound_after_text(stream: str, backend: str) -> None:
    """Only codes, or the mark of the end, follow the text."""
    model = codes_model(stream, text_size=TRANSCRIPTS.spec.text_size)
    prompt = torch.from_numpy(TRANSCRIPTS.speak_prompt("abba")).reshape(1, -1).expand(3, -1)
    frames = Sampler(model, prompt=prompt, backend=backend).next_frames(40)  # pyright: ignore
    assert frames[..., 0].max() == TRANSCRIPTS.end and frames[..., 1:].max() < CODES.vocab_size


@pytest.mark.parametrize("backend", ["torch", "compiled", "graph"])
@pytest.mark.parametrize("stream", CODE_STREAMS)
def test_text_after_sound(stream: str, backend: str) -> None:
    """Only characters, or the end, follow, alone in their frames, and cost what they are scored with."""
    model = codes_model(stream, text_size=TRANSCRIPTS.spec.text_size)
    codes = np.random.default_rng(0).integers(0, 7, (5, 3))
    prompt = torch.from_numpy(TRANSCRIPTS.transcribe_prompt(codes))
    sampler = Sampler(model, prompt=prompt.reshape(1, -1), writes=True, backend=backend)  # pyright: ignore
    frames = sampler.next_frames(6)[0]
    assert (frames[:, 1:] == model.spec.start_symbol).all()
    assert all(int(symbol) in TRANSCRIPTS.spec.written for symbol in frames[:, 0])
    # The newest step holds a character whose frame is not whole before the delay has passed.
    ahead = 2 * model.spec.delay_frames
    again = Sampler(model, prompt=prompt.reshape(1, -1), writes=True).next_frames(6 + ahead)[0]
    scored = offline(model, torch.cat([prompt, again]))[len(prompt) + 5 + ahead]
    torch.testing.assert_close(sampler.nats[0], scored, rtol=1e-4, atol=1e-4)


class Decoder:
    """Ten samples per frame, the first three held back."""

    spec = CODES

    def stream_decoder(self) -> Decoder:
        self.pushed = 0
        return self

    def push(self, codes: Tensor) -> Tensor:
        assert codes.max() < CODES.vocab_size
        held = 3 if self.pushed == 0 else 0
        self.pushed += codes.size(1)
        return codes[..., :1].expand(-1, -1, 10).flatten(1)[:, held:].float()

    def flush(self) -> Tensor:
        return torch.zeros(1, 3 if self.pushed else 0)


def test_sound_ends_with_its_mark() -> None:
    model = codes_model(text_size=TRANSCRIPTS.spec.text_size)
    prompt = torch.from_numpy(TRANSCRIPTS.speak_prompt("ab")).reshape(1, -1)
    frames = Sampler(model, prompt=prompt, seed=1).next_frames(200)[0, :, 0]
    end = int((frames == TRANSCRIPTS.end).int().argmax())
    assert 0 < end < 200
    chunks = Sampler(model, prompt=prompt, seed=1).pcm(Decoder(), samples=64_000)  # pyright: ignore
    pcm = torch.cat(list(chunks), dim=1)
    assert pcm.size(1) == 10 * end
    torch.testing.assert_close(pcm[0, :-3], frames[:end].repeat_interleave(10)[3:].float())


def test_greedy_text_is_the_most_likely() -> None:
    model = codes_model(text_size=TRANSCRIPTS.spec.text_size)
    prompt = torch.from_numpy(TRANSCRIPTS.transcribe_prompt(np.ones((4, 3), dtype=np.int64))).reshape(1, -1)
    greedy = [
        Sampler(model, prompt=prompt, writes=True, filters=Filters(temperature=0), seed=seed).next_frames(5)
        for seed in (0, 1)
    ]
    assert torch.equal(*greedy)


def test_errors() -> None:
    with pytest.raises(SpecError, match="symbols of test have no text beside them, so none can be written"):
        Sampler(codes_model(), writes=True)
    with pytest.raises(SpecError, match="symbols 7 to 7, expected 0 to 6"):
        Sampler(codes_model(), prompt=torch.tensor([[7, 7, 7]]))
