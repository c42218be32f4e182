"""Raw speech in figures: collects what was measured, writes docs/raw_audio.md and its pictures.

    python scripts/raw_audio_report.py --run                    # first measures what is missing: hours
    python scripts/raw_audio_report.py --run memory free        # only these parts of it
    python scripts/raw_audio_report.py "60 minutes=runs/long"   # with one more run in the tables

Everything lies in one folder, --study; scripts/raw_audio_study.py says what and how it is measured. With
--run the commands are printed as they begin, one after another; what is finished and was asked for in the
same words is not done again. All figures are also written to docs/raw_audio.json: what --study has no results
of stays as it is there, so that the parts may be measured at different times. What neither has is left out.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from compare import parameters
from free_running_report import statistics_table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from raw_audio_study import (
    CLOSE_BITS,
    KINDS,
    MEMORY_FRAME,
    MODEL,
    ONE_SAMPLE,
    PEERS,
    folder_of,
    heard,
    heard_run,
    measure,
    of_weights,
    rows_of,
)

from txl_audio.codecs.mulaw import mulaw_decode
from txl_audio.data.shards import Shards
from txl_audio.listening import verdict_table
from txl_audio.plots import plot_spectrograms
from txl_audio.tokens import DataError, TxlError

TITLES = {
    "floor": "no network: predictors and an adaptive mixture",
    "lstm": "LSTM 512",
    "wavenet": "WaveNet, 2 x 10 layers",
    "samplernn": "SampleRNN, 2 tiers",
    "sashimi": "SaShiMi, reduced",
    "megabyte": "MEGABYTE, P 8",
    "x-transformers": "x-transformers with memory",
}
LARGEST_PICTURE_BYTES = 150_000


@dataclass(frozen=True)
class Entry:
    """One model. bits: of the whole validation split, None while it trains; way: (minutes, bits) of
    validations before the end, over the first samples of the split."""

    name: str
    bits: float | None
    count: int
    parameters: int
    samples: int
    minutes: float
    threads: int | None
    way: list[tuple[float, float]]

    @classmethod
    def read(cls, name: str, folder: Path, minutes: float | None = None) -> Entry | None:
        """Of a peer's folder or of a run's; None where nothing was validated yet.

        minutes: what all of it counts as; default: the clock.
        """
        metrics, result = folder / "metrics.jsonl", folder / "result.json"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        records = [r for r in records if r["kind"] == "validation" and "bits_per_sample" in r]
        if result.is_file():
            last = json.loads(result.read_text())
        elif records and (folder / "model.safetensors").is_file():
            last = records[-1] | {"parameters": parameters(folder), "samples": records[-1]["symbols"]}
        else:
            return None
        scale = 1 / 60 if minutes is None else minutes / last["seconds"]
        return cls(
            name,
            bits=last["bits_per_sample"] if last.get("whole_split", True) else None,
            count=last["count"],
            parameters=last["parameters"],
            samples=last["samples"],
            minutes=last["seconds"] * scale,
            threads=last.get("threads"),
            way=[(r["seconds"] * scale, r["bits_per_sample"]) for r in records if not r["whole_split"]],
        )


def entries(folders: dict[str, Path], minutes: float | None = None) -> list[Entry]:
    read = (Entry.read(name, folder, minutes) for name, folder in folders.items())
    return [entry for entry in read if entry is not None]


# What is written: every section is lines of Markdown, none where its inputs are missing.


def table(*rows: Sequence[str]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|" + "---|" * len(rows[0]), *body, ""]


def comparison(title: str, models: list[Entry], minutes: str) -> list[str]:
    finished = sorted((e for e in models if e.bits is not None), key=lambda e: e.bits or 0.0)
    if not finished:
        return []
    rows = [("model", "bits per sample", "parameters", "minutes", "samples seen", "samples/s")]
    for e in finished:
        trained = (f"{e.minutes:.1f}", f"{e.samples / 1e6:.1f} M", f"{e.samples / e.minutes / 60:,.0f}")
        figures = trained if e.samples else ("-", "-", "-")
        rows.append((e.name, f"{e.bits:.3f}", f"{e.parameters / 1e6:.2f} M", *figures))
    scored = " or ".join(f"{count:,}" for count in sorted({e.count for e in finished}))
    threads = " or ".join(str(n) for n in sorted({e.threads for e in finished if e.threads}))
    return [
        f"## {title}",
        "",
        f"Every sample of the validation split is scored once ({scored} samples), documents begin without a "
        f"past. {minutes}" + (f" Peers trained on {threads} thread(s)." if threads else ""),
        "",
        *table(*rows),
    ]


def curves(models: list[Entry], docs: Path) -> list[str]:
    begun = [e for e in models if e.way]
    if not begun:
        return []
    axes = new_axes(xlabel="minutes of training", ylabel="bits per sample")
    for e in begun:
        (line,) = axes.plot(*zip(*e.way, strict=True), marker=".", label=e.name)
        if e.bits is not None:
            axes.plot([e.minutes], [e.bits], marker="*", markersize=9, color=line.get_color())
    lowest = min([bits for e in begun for _, bits in e.way] + [e.bits for e in begun if e.bits is not None])
    axes.set_ylim(lowest - 0.1, lowest + 2)
    axes.legend(fontsize="small")
    return [
        "## Bits against minutes",
        "",
        "Lines: validations on the way, over the first samples of the split; stars: all of it, at the end.",
        "",
        saved(axes, docs, "minutes", "bits per sample against minutes of training"),
    ]


def memory(rows: list[dict[str, Any]], docs: Path) -> list[str]:
    if not rows:
        return []
    axes = new_axes(xlabel="memory (s)", ylabel="bits per sample")
    axes.plot([float(r["name"]) for r in rows], [r["bits_per_sample"] for r in rows], marker="o")
    cells = [(r["name"], f"{r['bits_per_sample']:.4f}", f"{r['seconds'] / 60:.1f}") for r in rows]
    return [
        "## Memory",
        "",
        f"Each trained with that memory in every layer, {rows[0]['steps']:,} steps of equal samples; frames "
        f"of {MEMORY_FRAME} samples, so that the longest can be trained.",
        "",
        *table(("memory (s)", "bits per sample", "minutes"), *cells),
        saved(axes, docs, "memory", "bits per sample against the length of memory"),
    ]


def ablation(rows: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    first, second = ({r["name"]: r["bits_per_sample"] for r in seed} for seed in (rows, again))
    cells = [("variant", "bits per sample", "against the first", "with seed 1", "parameters", "steps")]
    for r in rows:
        name = r["name"]
        off = f"{first[name] - rows[0]['bits_per_sample']:+.4f}"
        off_again = f"{second[name] - again[0]['bits_per_sample']:+.4f}" if name in second else "-"
        sizes = f"{r['parameters'] / 1e6:.2f} M", f"{r['steps']:,}"
        cells.append((name, f"{r['bits_per_sample']:.4f}", off, off_again, *sizes))
    return [
        "## Part by part",
        "",
        f"Trained at equal cost: {rows[0]['steps']:,} steps of the first, as many of the others as take as "
        f"long. What came within {CLOSE_BITS} bits of the first was trained again, both with another seed.",
        "",
        *table(*cells),
    ]


def free_running(figures: dict[str, Any], given: argparse.Namespace, shards: Shards | None) -> list[str]:
    lines: list[str] = []
    if results := figures["free"]:
        lines += [
            sampled(results),
            "",
            *verdict_table(results["verdicts"]),
            "",
            *statistics_table(results),
            "",
        ]
        folder = given.study / "free"
        shown = "real speech, then prompts and how they go on"
        lines += found_picture(folder / "spectrograms.png", given.docs, shown)
        lines += against_truth(folder, results, shards, given.docs)
    if results := figures["hour"]:
        first, last = results["minutes"][0], results["minutes"][-1]
        lines += [
            f"{sampled(results)} The first minute took {first['real_time_factor']:.3f} of its time, the last "
            f"{last['real_time_factor']:.3f}; the state had {first['state_bytes']:,} bytes, then "
            f"{last['state_bytes']:,}, the process at most {last['peak_memory_bytes'] / 1e6:,.0f} MB.",
            "",
            *verdict_table(results["verdicts"]),
            "",
        ]
        shown = "the long run, minute by minute"
        lines += found_picture(given.study / "hour" / "minutes.png", given.docs, shown)
    return ["## Free-running", "", *lines] if lines else []


def sampled(results: dict[str, Any]) -> str:
    """What was continued, and how samples were drawn."""
    s = results["settings"]
    drawn = ("temperature", "top_k", "top_p", "tails", "weights", "seed")
    how = ", ".join(f"{name} {s[name]}" for name in drawn if s[name] is not None)
    passed = f" (the first {s['first']} in their order are passed over)" if s["first"] else ""
    return (
        f"{s['prompts']} prompt(s) of {s['prompt_seconds']:g} s from the {s['split']} split{passed}, each "
        f"continued by {s['seconds']:g} s; {how}; backend {results['backend']}."
    )


def against_truth(folder: Path, results: dict[str, Any], shards: Shards | None, docs: Path) -> list[str]:
    """Pictures of how documents really go on beside how the model does."""
    what = "left: how the recordings go on; right: how the model does. Line: end of the prompt"
    sounds: dict[str, np.ndarray] = {}
    if shards is not None:
        documents = {document.id: document for document in shards.documents}
        for name in list(dict.fromkeys(excerpt["prompt"] for excerpt in results["excerpts"]))[:3]:
            path = folder / f"{name}.flac"
            if name in documents and path.is_file():
                truth = mulaw_decode(shards.symbols(documents[name]).reshape(-1))
                continued, _ = soundfile.read(path, dtype="float32", stop=len(truth))
                sounds |= {f"{name}: truth": truth, f"{name}: continued": continued}
    if shards is None or not sounds:
        return earlier_picture(docs, "truth", what)
    ends = dict.fromkeys(sounds, results["settings"]["prompt_seconds"])
    figure = plot_spectrograms(sounds, shards.spec.sample_rate_hz, boundaries_s=ends, columns=2)
    return [picture(drawn(figure), docs, "truth", what)]


# Pictures.


def new_axes(**labels: str) -> Axes:
    axes = Figure(figsize=(8.0, 4.5), dpi=100, layout="constrained").subplots()
    axes.set(**labels)
    axes.grid(alpha=0.3)
    return axes


def drawn(figure: Figure) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer)


def saved(axes: Axes, docs: Path, name: str, what: str) -> str:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return picture(drawn(figure), docs, name, what)


def found_picture(path: Path, docs: Path, what: str) -> list[str]:
    name = f"free_{path.stem}"
    return (
        [picture(Image.open(path), docs, name, what)] if path.is_file() else earlier_picture(docs, name, what)
    )


def earlier_picture(docs: Path, name: str, what: str) -> list[str]:
    """The line of a picture that was drawn when its inputs were there."""
    path = docs / f"raw_audio_{name}.png"
    return [f"![{what}]({path.name})\n"] if path.is_file() else []


def picture(image: Image.Image, docs: Path, name: str, what: str) -> str:
    """Writes raw_audio_NAME.png, in 64 colours and small enough for a repository; its line of Markdown."""
    path = docs / f"raw_audio_{name}.png"
    image = image.convert("RGB")
    while True:
        image.quantize(64).save(path, optimize=True)
        if path.stat().st_size <= LARGEST_PICTURE_BYTES:
            return f"![{what}]({path.name})\n"
        image = image.resize((image.width * 4 // 5, image.height * 4 // 5), Image.Resampling.LANCZOS)


def collected(given: argparse.Namespace) -> dict[str, Any]:
    """What was measured, else what raw_audio.json has of it. Free running only of the weights of now."""
    study, path = given.study, given.docs / "raw_audio.json"
    figures: dict[str, Any] = {"equal": {}, "more": {}, "memory": [], "ablation": [], "ablation_seed_1": []}
    figures |= {"free": None, "hour": None, **(json.loads(path.read_text()) if path.is_file() else {})}
    folders = {TITLES[name]: study / "peers" / name for name in PEERS}
    folders |= {name: folder_of(name, study) for name in (MODEL, ONE_SAMPLE)}
    figures["equal"] |= {e.name: asdict(e) for e in entries(folders, given.minutes)}
    figures["more"] |= {e.name: asdict(e) for e in entries(dict(given.runs))}
    figures["memory"] = rows_of(study, "memory") or figures["memory"]
    if rows := rows_of(study, "ablation"):  # those with another seed belong to them
        figures |= {"ablation": rows, "ablation_seed_1": rows_of(study, "ablation_seed_1")}
    run = heard_run(given)
    for kind in ("free", "hour"):
        own = study / kind / "results.json"
        figures[kind] = heard(own, run) or figures[kind]
        if (own.is_file() or figures[kind]) and not of_weights(figures[kind], run):
            print(f"what is known of {kind} is not of the weights of {run}: left out", file=sys.stderr)
            figures[kind] = None
    return figures


def write(given: argparse.Namespace) -> Path:
    """Writes the report and its figures; its path. Raises DataError where nothing was measured."""
    study, docs, figures = given.study, given.docs, collected(given)
    equal, more = ([Entry(**e) for e in figures[kind].values()] for kind in ("equal", "more"))
    shards = Shards.open(given.data) if (given.data / "index.json").is_file() else None
    docs.mkdir(parents=True, exist_ok=True)
    sections = [
        *comparison(
            "Equal training cost",
            equal,
            f"Each was trained for as many steps as {given.minutes:g} minutes hold, by step times that were "
            "taken of all in turns.",
        ),
        *comparison("More runs", more, "Minutes are training time by the clock, without validations."),
        *curves([*equal, *more], docs),
        *memory(figures["memory"], docs),
        *ablation(figures["ablation"], figures["ablation_seed_1"]),
        *free_running(figures, given, shards),
    ]
    if not sections:
        raise DataError(f"nothing was measured in {study}; measure with --run, or name runs as NAME=FOLDER")
    head = ["# Raw speech", ""]
    if shards is not None:
        kept = "; ".join(f"{name} {value}" for name, value in shards.preparation.items() if value is not None)
        head += [f"Data: {given.data.name}. {kept}.", ""]
    head += ["Written by `python scripts/raw_audio_report.py --run`, which measures what is missing.", ""]
    path = docs / "raw_audio.md"
    path.write_text("\n".join([*head, *sections]).rstrip() + "\n")
    (docs / "raw_audio.json").write_text(json.dumps(figures, indent=1) + "\n")
    return path


def named_run(text: str) -> tuple[str, Path]:
    name, equals, folder = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=FOLDER")
    return name, Path(folder)


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("runs", nargs="*", type=named_run, help="NAME=FOLDER of more runs to compare")
    parser.add_argument("--study", type=Path, default=Path("out/raw_audio"))
    parser.add_argument("--data", type=Path, default=Path("data/kathleen"), help="prepared shards")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument(
        "--run", nargs="*", choices=KINDS, help="first measure what is missing, of all or of these parts"
    )
    parser.add_argument("--config", default="configs/audio/kathleen_likelihood.yaml", help="of this model")
    parser.add_argument("--model", type=Path, help="run that free-running judges; default: this model's")
    parser.add_argument("--minutes", type=float, default=8.0, help="training of peers and model")
    parser.add_argument("--steps", type=int, default=1000, help="of memory study, and ablation's first")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    try:
        if given.run is not None:
            measure(given)
        print(write(given))
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
