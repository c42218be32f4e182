"""What a training tells people: a progress bar, lines to read, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from txl_audio.evaluate import Totals
from txl_audio.states import write_atomically
from txl_audio.tokens import CheckpointError


@dataclass(frozen=True)
class StreamFacts:
    """What is said of one stream.

    unit: name of the bits figure, such as `bits_per_sample`; flops_per_symbol: arithmetic of a training
    step per symbol, forward and backward; form: of a text that can be had in several, such as `newlines
    drop`, named with every validation; frame_rate_hz: of a neural codec's codes, whose validation is also
    recorded per second, frame and stage.
    """

    unit: str
    flops_per_symbol: float
    form: str = ""
    frame_rate_hz: float = 0.0


class Silence:
    """Stands in for a Reporter where another process reports."""

    def begin(self, *_: Any) -> None: ...
    def step(self, *_: Any) -> None: ...
    def train(self, *_: Any) -> None: ...


class Reporter:
    """One training's reports. Use as a context manager; everything goes to standard error and files.

    Args:
        streams: facts of every stream by name. With several, records and lines name theirs.
        machine_flops: the machine's measured matrix-product rate.
    """

    def __init__(
        self, folder: Path, *, streams: Mapping[str, StreamFacts], machine_flops: float, resumed_at: int = 0
    ) -> None:
        self.streams, self.folder, self.machine_flops = streams, folder, machine_flops
        self.console = Console(stderr=True, highlight=False, markup=False)
        self.writer = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)
        if resumed_at:
            self._forget_after(resumed_at)
        self.metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.begin(0, 0.0)

    def __enter__(self) -> Reporter:
        self.bar.start()
        self.task = self.bar.add_task("training", total=1.0, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        for file in (self.metrics, self.writer):
            with suppress(OSError):  # a full disk has been named by then
                file.close()

    def _forget_after(self, step: int) -> None:
        """Drops records newer than the checkpoint that training continues from."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def begin(self, symbols: int, seconds: float) -> None:
        """Where training begins or continues: rates are of what comes after."""
        self._begun, self._flops = (symbols, seconds), 0.0

    def step(
        self, stream: str, step: int, symbols: int, seconds: float, progress: float, totals: Totals
    ) -> None:
        self._flops += totals.count * self.streams[stream].flops_per_symbol
        rate, _ = self._rates(symbols, seconds)
        shown = f"step {step}  {self._named(stream)}{totals.bits:.3f} bits  {rate:,.0f}/s"
        self.bar.update(self.task, completed=min(1.0, progress), rate=shown)

    def _rates(self, symbols: int, seconds: float) -> tuple[float, float]:
        """Symbols and operations per second."""
        passed = max(1e-9, seconds - self._begun[1])
        return (symbols - self._begun[0]) / passed, self._flops / passed

    def _named(self, stream: str) -> str:
        return f"{stream} " if len(self.streams) > 1 else ""

    def train(self, stream: str, at: Mapping[str, Any], totals: Totals, facts: Mapping[str, float]) -> None:
        rate, flops = self._rates(at["symbols"], at["seconds"])
        speed = {"symbols_per_s": rate, "share_of_matmul_rate": flops / self.machine_flops}
        self._record("train", stream, at, {self.streams[stream].unit: totals.bits, **facts, **speed})
        if not self.console.is_terminal:  # a log file has no progress bar
            self._line("training", stream, at, totals, f"  {rate:,.0f} symbols/s")

    @contextmanager
    def validating(self, limit: int | None) -> Iterator[Callable[[int], None]]:
        """Shows how many symbols have been scored."""
        task = self.bar.add_task("validating", total=limit, rate="")
        try:
            yield lambda count: self.bar.update(task, completed=count, rate=f"{count:,} symbols")
        finally:
            self.bar.remove_task(task)

    def validation(self, stream: str, at: Mapping[str, Any], totals: Totals, *, whole: bool) -> None:
        facts = self.streams[stream]
        of_codes = totals.of_codes(facts.frame_rate_hz)
        values = {facts.unit: totals.bits, **of_codes, "count": totals.count, "whole_split": whole}
        self._record("validation", stream, at, values)
        notes = [facts.form] if facts.form else []
        notes += [f"{of_codes['bits_per_second']:,.0f} bits per second"] if of_codes else []
        notes += [] if whole else [f"first {totals.count:,} symbols"]
        self._line("validation", stream, at, totals, f" ({', '.join(notes)})" if notes else "")

    def _line(self, kind: str, stream: str, at: Mapping[str, Any], totals: Totals, note: str) -> None:
        unit = self.streams[stream].unit
        figure = f"{kind} {self._named(stream)}{totals.bits:.4f} {unit.replace('_', ' ')}{note}"
        self.console.print(f"step {at['step']:>6}  {at['seconds']:>6.0f} s  {figure}", soft_wrap=True)

    def _record(self, kind: str, stream: str, at: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        several = len(self.streams) > 1
        name = {"stream": stream} if several else {}
        form = self.streams[stream].form
        name |= {"form": form} if form and kind == "validation" else {}
        try:
            self.metrics.write(json.dumps({"kind": kind, **name, **at, **values}) + "\n")
            self.metrics.flush()
            for key, value in values.items():
                tag = f"{kind}/{stream}/{key}" if several else f"{kind}/{key}"
                self.writer.add_scalar(tag, float(value), at["step"])
        except OSError as error:
            raise CheckpointError(
                f"records cannot be written in {self.folder}: {error}; see that there is room, then continue "
                "with --resume from the last checkpoint, which is as it was"
            ) from error
