"""How a training stops before its end: by a signal, or by a loss that is no number."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from txl_audio import runtime
from txl_audio.checkpoint import RunFolder
from txl_audio.data.stream import Batch, Span
from txl_audio.lanes import StreamData
from txl_audio.tokens import CheckpointError, TxlError


class DivergedError(TxlError):
    """A training whose loss or gradient is no longer finite."""


def diverged(
    folder: RunFolder,
    name: str,
    data: StreamData,
    batches: Sequence[tuple[Batch, Sequence[Span]]],
    *,
    step: int,
    what: str,
) -> DivergedError:
    """The error for a step of stream `name` that is not finite; puts its batches into the run folder.

    `diverged_step_N.safetensors` has the tensors of `Batch` with all lanes, of each batch that the step
    accumulates, and as metadata the stream, the step and what every lane read.
    """
    read = [
        [
            {
                "lane": span.lane,
                "document": data.name_of(span.document),
                "begin_frame": span.begin,
                "end_frame": span.end,
            }
            for span in spans
        ]
        for _, spans in batches
    ]
    path = folder.path / f"diverged_step_{step}.safetensors"
    kept = f"its batches are in {path}"
    if runtime.rank() == 0:
        tensors = {
            f"{i}.{name}": value.clone()  # what is heard may be the targets themselves
            for i, (batch, _) in enumerate(batches)
            for name, value in vars(batch).items()
        }
        facts = {"stream": name, "step": str(step), "read": json.dumps(read)}
        try:
            folder.save_tensors(path.name, tensors, metadata=facts)
        except CheckpointError as error:
            kept = str(error)
    first = read[0][0]
    return DivergedError(
        f"{what} is not finite at step {step} of stream {name}, whose first lane was at document "
        f"{first['document']}, frame {first['begin_frame']}; {kept}; look at them, lower train.lr or "
        "train.clip, and continue with --resume from the last checkpoint, which is intact"
    )


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C and SIGTERM into a flag that is looked at between steps; a second one kills."""
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stderr.write("\nstopping after this step and saving ...\n")

    previous = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
