"""What a training tells people: a progress bar, lines to read, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from txl_audio.checkpoint import write_atomically
from txl_audio.evaluate import Totals


class Reporter:
    """One training's reports. Use as a context manager; everything goes to standard error and files.

    Args:
        unit: name of the bits figure, such as `bits_per_sample`.
        flops_per_symbol: arithmetic of a training step per symbol, forward and backward.
        machine_flops: the machine's measured matrix-product rate.
    """

    def __init__(
        self, folder: Path, *, unit: str, flops_per_symbol: float, machine_flops: float, resumed_at: int = 0
    ) -> None:
        self.unit, self.folder = unit, folder
        self.flops_per_symbol, self.machine_flops = flops_per_symbol, machine_flops
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
        self._started: tuple[int, float] | None = None

    def __enter__(self) -> Reporter:
        self.bar.start()
        self.task = self.bar.add_task("training", total=1.0, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.metrics.close()
        self.writer.close()

    def _forget_after(self, step: int) -> None:
        """Drops records newer than the checkpoint that training continues from."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def step(self, step: int, symbols: int, seconds: float, progress: float, totals: Totals) -> None:
        if self._started is None:
            self._started = (symbols, seconds)
        rate = (symbols - self._started[0]) / max(1e-9, seconds - self._started[1])
        shown = f"step {step}  {totals.bits:.3f} bits  {rate:,.0f}/s"
        self.bar.update(self.task, completed=min(1.0, progress), rate=shown)

    def train(self, at: Mapping[str, Any], totals: Totals, *, gradient_norm: float, lr: float) -> None:
        rate = at["symbols"] / max(1e-9, at["seconds"])
        self._record(
            "train",
            at,
            {
                self.unit: totals.bits,
                "lr": lr,
                "gradient_norm": gradient_norm,
                "symbols_per_s": rate,
                "share_of_matmul_rate": rate * self.flops_per_symbol / self.machine_flops,
            },
        )
        if not self.console.is_terminal:  # a log file has no progress bar
            self._line("training", at, totals, f"  {rate:,.0f} symbols/s")

    @contextmanager
    def validating(self, limit: int | None) -> Iterator[Callable[[int], None]]:
        """Shows how many symbols have been scored."""
        task = self.bar.add_task("validating", total=limit, rate="")
        try:
            yield lambda count: self.bar.update(task, completed=count, rate=f"{count:,} symbols")
        finally:
            self.bar.remove_task(task)

    def validation(self, at: Mapping[str, Any], totals: Totals, *, whole: bool) -> None:
        self._record("validation", at, {self.unit: totals.bits, "count": totals.count, "whole_split": whole})
        part = "" if whole else f" (first {totals.count:,} symbols)"
        self._line("validation", at, totals, part)

    def _line(self, kind: str, at: Mapping[str, Any], totals: Totals, note: str) -> None:
        figure = f"{kind} {totals.bits:.4f} {self.unit.replace('_', ' ')}{note}"
        self.console.print(f"step {at['step']:>6}  {at['seconds']:>6.0f} s  {figure}", soft_wrap=True)

    def _record(self, kind: str, at: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.metrics.write(json.dumps({"kind": kind, **at, **values}) + "\n")
        self.metrics.flush()
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", float(value), at["step"])
