"""Trains a peer of the speech model on the same data for the same time, and scores it the same way.

    python scripts/baselines/train.py lstm --data data/kathleen --minutes 8 --out out/baselines/lstm

Every peer sees mu-law codes through an embedding, predicts each by a softmax over 256 and is trained with
AdamW, a warm-up and a cosine over the budget; the time of validations does not count. Where a peer has a
state, documents run through it from segment to segment (truncated backpropagation) and begin with none.
Every validation sample is scored once. OUT gets metrics.jsonl, like a run folder's, and result.json.
The peer x-transformers needs the package of that name: pip install -e '.[baselines]'
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lstm import LSTM
from megabyte import MEGABYTE
from peer import START, Peer, reset
from samplernn import SampleRNN
from sashimi import SaShiMi
from torch import Tensor
from torch.nn import functional as F
from wavenet import WaveNet
from x_transformers_xl import XTransformersXL

from txl_audio import runtime
from txl_audio.data.shards import Shards
from txl_audio.data.stream import Documents, TokenStream
from txl_audio.optim import OptimConfig
from txl_audio.recipe.runs import SplitDocuments
from txl_audio.tokens import IGNORE, TokenSpec, TxlError

PEERS: dict[str, type[Peer]] = {
    "lstm": LSTM,
    "wavenet": WaveNet,
    "samplernn": SampleRNN,
    "sashimi": SaShiMi,
    "megabyte": MEGABYTE,
    "x-transformers": XTransformersXL,
}
VALIDATIONS = 6
"""On the way, over the first VALIDATION_SAMPLES."""
VALIDATION_SAMPLES = 400_000
REPORT_EVERY_S = 10.0

Segment = tuple[Tensor, Tensor, Tensor]
"""inputs [B, T], targets [B, T], begins [B]."""


def segments(documents: Documents, spec: TokenSpec, peer: Peer, *, seed: int | None) -> Iterator[Segment]:
    """Lanes of documents, cut so that each begins with a segment; endless where a seed shuffles them.

    To the stream a segment is one frame, and it pads the last of a document with IGNORE.
    """
    stream = TokenStream(
        documents,
        spec.framed(peer.segment_samples),
        lanes=peer.lanes,
        segment_len=1,
        seed=seed,
        epochs=1 if seed is None else None,
    )
    for batch in stream:
        targets = batch.targets[:, 0]
        inputs = torch.cat([batch.inputs[:, 0, -1:], targets[:, :-1]], dim=1)
        yield inputs.where(inputs != IGNORE, START), targets, batch.reset[:, 0]


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all targets but IGNORE."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(
    peer: Peer, documents: Documents, spec: TokenSpec, precision: runtime.Precision, limit: int | None = None
) -> tuple[float, int]:
    """Bits per sample and how many: all, or about the first `limit`. Documents begin without a past."""
    peer.eval()
    device, initial = torch.device("cpu"), peer.initial_state(peer.lanes)
    state, total, count = initial, 0.0, 0
    for inputs, targets, begins in segments(documents, spec, peer, seed=None):
        with runtime.autocast(device, precision):
            logits, state = peer(inputs, reset(state, initial, begins))
        total += nats(logits, targets).item()
        count += int((targets != IGNORE).sum())
        if limit is not None and count >= limit:
            break
    peer.train()
    return total / count / math.log(2), count


class Log:
    """metrics.jsonl and lines to read."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = open(out / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115

    def validation(self, at: dict[str, Any], bits: float, count: int, *, whole: bool) -> None:
        record = {"kind": "validation", **at, "bits_per_sample": bits, "count": count, "whole_split": whole}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        text = f"validation {bits:.4f} bits per sample ({'all' if whole else f'first {count:,}'})"
        print(f"step {at['step']:>6}  {at['seconds']:>5.0f} s  {text}", file=sys.stderr, flush=True)

    @staticmethod
    def progress(at: dict[str, Any], share: float, bits: float) -> None:
        rate = at["symbols"] / at["seconds"]
        text = f"{share:>4.0%}  {bits:.4f} bits per sample  {rate:,.0f} samples/s"
        print(f"step {at['step']:>6}  {at['seconds']:>5.0f} s  {text}", file=sys.stderr, flush=True)


class Training:
    """A peer, its optimiser and the segments it is trained on."""

    def __init__(self, peer: Peer, shards: Shards, *, lr: float | None, seed: int, precision: str) -> None:
        self.peer = peer
        self.precision = runtime.choose_precision(precision, torch.device("cpu"))
        self.settings = OptimConfig(lr=peer.lr if lr is None else lr, weight_decay=0.01)
        self.optimiser = self.settings.build(peer)
        self.steps, self._warmed_up = 0, 0.0
        self._initial = self._state = peer.initial_state(peer.lanes)
        self._segments = segments(SplitDocuments(shards, "train"), shards.spec, peer, seed=seed)

    def step(self, share: float = 0.0) -> tuple[float, int]:
        """The next segment of every lane; its nats and number of samples. share: of the budget done."""
        inputs, targets, begins = next(self._segments)
        with runtime.autocast(torch.device("cpu"), self.precision):
            logits, self._state = self.peer(inputs, reset(self._state, self._initial, begins))
        loss, count = nats(logits, targets), int((targets != IGNORE).sum())
        (loss / max(1, count)).backward()
        torch.nn.utils.clip_grad_norm_(self.peer.parameters(), self.settings.clip)
        if self.steps == self.settings.warmup_steps:
            self._warmed_up = share
        self.optimiser.set_rate(self.settings.rate(self.steps, share, self._warmed_up))
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.steps += 1
        return loss.item(), count


def train(training: Training, shards: Shards, given: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Trains to the end of the budget and scores the validation split; what result.json holds."""
    peer, precision, valid = training.peer, training.precision, SplitDocuments(shards, "val")
    at: dict[str, Any] = {"step": 0, "symbols": 0, "seconds": 0.0}
    share = reported_s = recent_nats = 0.0
    recent_count = validations = 0
    while share < 1:
        begun = time.perf_counter()
        loss, count = training.step(share)
        at = {
            "step": training.steps,
            "symbols": at["symbols"] + count,
            "seconds": at["seconds"] + time.perf_counter() - begun,
        }
        share = at["step"] / given.steps if given.steps else at["seconds"] / (60 * given.minutes)
        recent_nats, recent_count = recent_nats + loss, recent_count + count
        if at["seconds"] - reported_s >= REPORT_EVERY_S or share >= 1:
            log.progress(at, min(1.0, share), recent_nats / recent_count / math.log(2))
            reported_s, recent_nats, recent_count = at["seconds"], 0.0, 0
        if 1 > share >= (validations + 1) / (VALIDATIONS + 1):
            validations += 1
            bits, scored = evaluate(peer, valid, shards.spec, precision, VALIDATION_SAMPLES)
            log.validation(at, bits, scored, whole=False)
    bits, scored = evaluate(peer, valid, shards.spec, precision)
    log.validation(at, bits, scored, whole=True)
    return {
        "name": given.peer,
        "bits_per_sample": bits,
        "count": scored,
        "parameters": sum(parameter.numel() for parameter in peer.parameters()),
        "samples": at["symbols"],
        "samples_per_s": at["symbols"] / at["seconds"],
        "seconds": at["seconds"],
        "steps": at["step"],
        "threads": given.threads,
        "precision": precision,
        "lr": training.settings.lr,
        "seed": given.seed,
        "torch": torch.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--data", type=Path, required=True, help="shards made by `txl-audio prepare`")
    parser.add_argument("--out", type=Path, required=True)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="training time by the clock")
    budget.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="peak rate; default: the peer's own")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    runtime.keep_freed_memory()
    runtime.seed_everything(given.seed)
    try:
        shards = Shards.open(given.data)
        training = Training(
            PEERS[given.peer](), shards, lr=given.lr, seed=given.seed, precision=given.precision
        )
        result = {"arguments": words} | train(training, shards, given, Log(given.out))
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (given.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
