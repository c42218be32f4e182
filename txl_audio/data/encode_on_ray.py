"""Recordings to symbols on Ray Data (extra `ray`): what `encode` does, on the processors of a Ray cluster.

https://docs.ray.io/en/latest/data/data.html
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

import torch

from txl_audio.data.encode import Prepared, Settings, encode_or_reason
from txl_audio.data.recordings import Recording
from txl_audio.tokens import DataError

_PER_BLOCK, _BLOCKS = 16, 10_000
"""Recordings that go to a process at once, unless there were more blocks than that."""


def encoded_on_ray(
    recordings: Sequence[Recording], settings: Settings, workers: int | None
) -> Generator[Prepared | str, None, None]:
    """Results in the order of the recordings, as `encode.encoded`; what waits is held by Ray.

    Runs on the cluster that the program is connected to, or that the variable RAY_ADDRESS names, else on one
    that is started on this machine and ended with the last result. At most `workers` processes, None: as many
    as it has processors. All machines see the files under the same paths.

    Raises DataError where the package is missing, the cluster cannot be reached, or processes are lost more
    often than Ray starts them anew.
    """
    try:
        import ray
        import ray.data
        from ray.exceptions import RayError
    except ImportError as error:
        raise DataError(f"this needs the package ray ({error}); pip install 'txl-audio[ray]'") from error
    if not recordings:
        return
    started = not ray.is_initialized()
    log = logging.getLogger("ray.data")
    level = log.level
    try:
        if started:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        log.setLevel(logging.ERROR)
        if workers is None:
            workers = int(ray.cluster_resources().get("CPU", 1))
        blocks = min(-(-len(recordings) // _PER_BLOCK), _BLOCKS)
        rows = ray.data.from_items([{"recording": r} for r in recordings], override_num_blocks=blocks)
        rows.context.execution_options.preserve_order = True
        rows.context.enable_progress_bars = False
        encoder: Any = _Encoder
        pool = ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, workers))
        results = rows.map(encoder, fn_constructor_args=[settings], compute=pool)
        for recording, row in zip(recordings, results.iter_rows(), strict=True):
            assert row["id"] == recording.id
            yield row["result"]
    except (RayError, ConnectionError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise DataError(f"Ray cannot go on: {reason}; run the same again to continue") from error
    finally:
        log.setLevel(level)
        if started:
            ray.shutdown()


class _Encoder:
    """A process of the cluster, which holds the codec."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)  # the processes are the parallelism
        self._settings = settings

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        recording: Recording = row["recording"]
        return {"id": recording.id, "result": encode_or_reason(recording, self._settings)}
