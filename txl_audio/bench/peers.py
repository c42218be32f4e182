"""Other systems on the shape of `bench train`, each in a process of its own that works when it is its turn.

x-transformers (extra `baselines`) with its own memory, and Hugging Face's last TransfoXL that ran,
transformers 4.37.2. The latter cannot share a Python with newer ones: it lies in a folder of its own
(scripts/bench_train.sh makes it), which only its process looks into.

As a module it is such a process: `python -m txl_audio.bench.peers SYSTEM PRECISION DEVICE` reads seconds, a
line each, and answers with the tokens and the seconds of that turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_audio import runtime
from txl_audio.bench import shape
from txl_audio.optim import OptimConfig
from txl_audio.tokens import TxlError

Loss = Callable[[Tensor], Tensor]
HUGGING_FACE = "Hugging Face"


class Peer:
    """A system in a precision. Raises TxlError, with what it said, where it cannot train a step.

    folder: of transformers 4.37.2, in which Hugging Face's process looks first.
    """

    def __init__(self, system: str, precision: str, *, device: str, folder: Path) -> None:
        words = [sys.executable, "-W", "ignore", "-m", "txl_audio.bench.peers", system, precision, device]
        path = [Path(__file__).resolve().parents[2]]
        if system == HUGGING_FACE:
            if not (folder / "transformers").is_dir():
                raise TxlError(f"no transformers 4.37.2 in {folder}; scripts/bench_train.sh puts it there")
            path.insert(0, folder.resolve())
        self._process = subprocess.Popen(
            words,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, path)),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.rate(0.0)

    def rate(self, seconds: float) -> float:
        """Tokens per second of steps that take about `seconds`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
            tokens, passed = map(float, self._process.stdout.readline().split())
        except (ValueError, BrokenPipeError):
            said = self._process.communicate()[1].strip().splitlines()
            raise TxlError(said[-1] if said else "it ended without a word") from None
        return tokens / passed

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def x_transformers(*, flash: bool) -> tuple[nn.Module, Loss]:
    """Rotary positions; `flash`: through `scaled_dot_product_attention`."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.D_MODEL,
        depth=shape.LAYERS,
        heads=shape.HEADS,
        attn_dim_head=shape.D_HEAD,
        ff_mult=shape.D_FF // shape.D_MODEL,
        attn_flash=flash,
        rotary_pos_emb=True,
    )
    model = TransformerWrapper(
        num_tokens=shape.VOCAB_SIZE,
        max_seq_len=shape.SEGMENT_LEN,
        max_mem_len=shape.MEM_LEN,
        use_abs_pos_emb=False,
        attn_layers=layers,
    )
    memory: list[Tensor] | None = None

    def loss(tokens: Tensor) -> Tensor:
        nonlocal memory
        logits, memory = model(tokens[:, :-1], mems=memory, return_mems=True)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, loss


def transfo_xl() -> tuple[nn.Module, Loss]:
    """Hugging Face's model with a plain softmax. It shifts the labels itself, so one in 257 is not scored."""
    import transformers  # of the folder: 4.37.2

    names: Any = transformers
    config = names.TransfoXLConfig(
        vocab_size=shape.VOCAB_SIZE,
        cutoffs=[],
        d_model=shape.D_MODEL,
        d_embed=shape.D_MODEL,
        n_head=shape.HEADS,
        d_head=shape.D_HEAD,
        d_inner=shape.D_FF,
        div_val=1,
        n_layer=shape.LAYERS,
        mem_len=shape.MEM_LEN,
        clamp_len=-1,
        dropout=0.0,
        dropatt=0.0,
    )
    model = names.TransfoXLLMHeadModel(config)
    memory: Any = None

    def loss(tokens: Tensor) -> Tensor:
        nonlocal memory
        out = model(tokens[:, :-1], mems=memory, labels=tokens[:, :-1], return_dict=True)
        memory = out.mems
        return out.losses.mean()

    return model, loss


SYSTEMS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "x-transformers": lambda: x_transformers(flash=False),
    "x-transformers flash": lambda: x_transformers(flash=True),
    HUGGING_FACE: transfo_xl,
}


def main(system: str, precision: runtime.Precision, device: str) -> None:
    """Answers one turn for every line on standard input."""
    place = runtime.device(device)
    runtime.keep_freed_memory()
    model, loss = SYSTEMS[system]()
    model.to(place).train()
    config = OptimConfig()
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    tokens = torch.randint(shape.VOCAB_SIZE, (shape.LANES, shape.SEGMENT_LEN + 1), device=place)

    def step() -> int:
        with runtime.autocast(place, precision):
            nats = loss(tokens)
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()
        return shape.LANES * shape.SEGMENT_LEN

    for _ in range(2):  # the memory is full from the second on
        step()
    for line in sys.stdin:
        done, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < float(line) or not done:
            done += step()
        sys.stdout.write(f"{done} {passed}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])  # pyright: ignore[reportArgumentType]
