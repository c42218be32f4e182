"""Codecs by themselves: sound to codes and back, and how much is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_audio.cli.common import Json, app, duration, progress_bar, say, tell
from txl_audio.tokens import ConfigError, SpecError

if TYPE_CHECKING:
    from txl_audio.codec_quality import Evaluation

codec_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Sound to codes and back, and how much is lost."
)
app.add_typer(codec_app, name="codec")

_PICTURES = (".png", ".svg", ".pdf")

CodecWord = Annotated[
    str,
    typer.Option("--codec", help="mulaw, lyra, rvq, encodec, dac or mimi; with settings: lyra:stages=46."),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Folder of the codec's weights, or their name on Hugging Face's hub."),
]


@codec_app.command()
def encode(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Audio file of any rate.")],
    codec: CodecWord,
    out: Annotated[Path, typer.Option(help="File to write: codes, spec and exact length (safetensors).")],
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Turn an audio file into a file of codes."""
    import torch

    from txl_audio.codecs import parse_codec
    from txl_audio.codecs.files import Codes, write_codes
    from txl_audio.codecs.mulaw import clipped_count
    from txl_audio.data.audio import load_audio

    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"--out is {source} itself, which would be lost; name another file for the codes")
    made = parse_codec(codec, weights=weights)
    spec = made.spec
    pcm = load_audio(source, sample_rate_hz=spec.sample_rate_hz)
    clipped = clipped_count(pcm)
    codes = made.encode(torch.from_numpy(pcm.clip(-1, 1))[None])[0]
    write_codes(out, Codes(codes, spec, len(pcm)))
    frames, places = codes.shape
    figures = {"out": str(out), "frames": frames, "symbols_per_frame": places, "vocab_size": spec.vocab_size}
    figures |= {"samples": len(pcm), "sample_rate_hz": spec.sample_rate_hz, "bit_rate": spec.bit_rate}
    figures |= {"clipped": clipped}
    if clipped:
        say(f"warning: {clipped} of {len(pcm)} samples lie beyond full scale and were clipped")
    tell(
        figures,
        f"{duration(len(pcm) / spec.sample_rate_hz)} of sound in {frames} frames of {places} symbols out of "
        f"{spec.vocab_size}, {spec.bit_rate:,.0f} bit/s, in {out}",
        as_json,
    )


@codec_app.command()
def decode(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="File that `codec encode` wrote.")],
    out: Annotated[Path, typer.Option(help="Sound file to write, .wav or .flac.")],
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Turn a file of codes into sound, exactly as long as it was."""
    from txl_audio.codecs import codec_of
    from txl_audio.codecs.files import read_codes
    from txl_audio.sampling.sound import sound_writer

    read = read_codes(source)
    try:
        codec = codec_of(read.spec, weights=weights)
    except SpecError as error:
        raise SpecError(
            f"{source} holds codes by other weights of {read.spec.name} or of another kind ({error}): name "
            "the weights that encoded it with --weights, or encode the recording again"
        ) from error
    pcm = codec.decode(read.codes[None], samples=read.samples)[0]
    rate_hz = read.spec.sample_rate_hz
    with sound_writer(out, rate_hz) as write:
        write(pcm.numpy())
    figures = {"out": str(out), "samples": read.samples, "sample_rate_hz": rate_hz}
    tell(figures, f"{duration(read.samples / rate_hz)} of sound at {rate_hz} Hz in {out}", as_json)


@codec_app.command()
def evaluate(
    sources: Annotated[list[Path], typer.Argument(metavar="FILES|DIR...", help="Recordings of speech.")],
    codecs: Annotated[
        list[str], typer.Option("--codec", help="As for encode; may be given several times, one row each.")
    ],
    weights: Weights = None,
    transcripts: Annotated[
        Path | None,
        typer.Option(
            help="What is said: lines of a file's name without suffix, tab, text. "
            "[default: what the recogniser hears in the original]"
        ),
    ] = None,
    words: Annotated[
        bool, typer.Option(help="Count word errors with PocketSphinx, which takes most of the time.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Picture of the first file's spectrograms.")] = None,
    as_json: Json = False,
) -> None:
    """Compare codecs: bit rate, PESQ-wb, STOI, log-spectral distance, word errors, real-time factor."""
    from txl_audio import codec_quality
    from txl_audio.codecs import parse_codec
    from txl_audio.data.transcripts import read_transcripts
    from txl_audio.plots import plot_spectrograms

    if transcripts is not None and not words:
        raise ConfigError("--transcripts is for word errors; leave out --no-words")
    if len(set(codecs)) < len(codecs):
        raise ConfigError(f"got the codecs {', '.join(codecs)}, expected each once")
    kinds = sorted({word.partition(":")[0] for word in codecs})
    if weights is not None and len(kinds) > 1:
        raise ConfigError(
            f"--weights is for all codecs, got {' and '.join(kinds)}; give each its own, as "
            f"--codec {kinds[-1]}:weights={weights}"
        )
    if plot is not None:
        if plot.suffix.lower() not in _PICTURES:
            raise ConfigError(f"--plot is {plot}, expected a file that ends with {' or '.join(_PICTURES)}")
        plot.parent.mkdir(parents=True, exist_ok=True)
    made = {word: parse_codec(word, weights=weights) for word in codecs}
    texts = None if transcripts is None else read_transcripts(transcripts)
    with progress_bar("judging") as update:
        found = codec_quality.evaluate_codecs(
            _files(sources),
            made,
            recognise=codec_quality.recogniser() if words else None,
            transcripts=texts,
            progress=update,
        )
    figures: dict[str, Any] = {
        "codecs": [row.to_json() for row in found.rows],
        "words": found.words,
        "files": found.files,
        "seconds": found.seconds,
        "plot": str(plot) if plot else None,
    }
    tell(figures, _table(found), as_json)
    if plot is not None:  # after the table, which took long: a picture that fails takes nothing away
        plot_spectrograms(found.sounds, codec_quality.SAMPLE_RATE_HZ, plot, columns=1)


def _files(sources: list[Path]) -> list[Path]:
    from txl_audio.data.audio import find_audio

    files: list[Path] = []
    for source in sources:
        files += find_audio(source) if source.is_dir() else [source]
    return files


def _table(found: Evaluation) -> str:
    """Columns for people; what is not known is a dash."""
    names = ("codec", "bit/s", "PESQ-wb", "STOI", "LSD dB", "word errors", "real-time factor")
    lines: list[tuple[str, ...]] = [names]
    for row in found.rows:
        values = (
            (row.bit_rate, ",.0f"),
            (row.pesq_wb, ".2f"),
            (row.stoi, ".3f"),
            (row.log_spectral_distance_db, ".2f"),
            (row.word_error_rate, ".1%"),
            (row.real_time_factor, ".3f"),
        )
        lines.append((row.codec, *(format(value, form) if value == value else "-" for value, form in values)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    against = {
        "transcripts": "word errors by PocketSphinx against the transcripts",
        "original": "word errors by PocketSphinx against what it hears in the original",
        "none": "no word errors counted",
    }[found.words]
    return "\n".join([*text, f"{found.files} files, {duration(found.seconds)}; {against}"])
