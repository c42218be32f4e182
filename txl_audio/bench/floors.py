"""What this machine can do at most: the rates that a training is held against."""

from __future__ import annotations

import time

import torch

NEAR, FAR = 2**24, 2**30
"""Bytes of a tensor: as large as those of a training step, which a CPU's caches may hold, and beyond any."""


def copy_bytes_per_s(device: torch.device, size: int, seconds: float = 0.5) -> float:
    """Rate of copying a tensor of `size` bytes to another, every byte counted as read and as written."""
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))

    def run() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    done, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds or done == 0:
        run()
        done += 1
    return 2 * size * done / passed
