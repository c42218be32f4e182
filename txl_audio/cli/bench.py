"""The speed of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txl_audio.cli.common import Device, Json, Stream, app, say, tell

bench = typer.Typer(
    no_args_is_help=True, help="Speed, as ratios against a reference measured in the same run."
)
app.add_typer(bench, name="bench")


@bench.command("train")
def bench_train(
    seconds: Annotated[float, typer.Option(min=1, help="Measured time per setting.")] = 20.0,
    device: Device = "auto",
    beside: Annotated[
        Path | None,
        typer.Option(
            help="Also measure x-transformers and, from this folder, Hugging Face's TransfoXL, in the same "
            "turns; scripts/bench_train.sh does it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Training throughput of the plain text shape: 6 layers, d_model 256, segment and memory 256, batch 8."""
    from txl_audio.bench import train

    figures = train.train_throughput(seconds=seconds, device=device, tell=say, beside=beside)
    tell(figures, train.table(figures), as_json)


@bench.command("attention")
def bench_attention(
    segment_len: Annotated[int, typer.Option(min=1, help="Queries.")] = 512,
    mem_len: Annotated[int, typer.Option(min=0, help="Frames of memory, full.")] = 8192,
    lanes: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="64 wide each.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Passes of each path; the median counts.")] = 5,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time and peak memory of one layer's attention, forward and backward, beside the readable reference."""
    from txl_audio.bench import attention

    figures = attention.attention_cost(
        segment_len=segment_len,
        mem_len=mem_len,
        lanes=lanes,
        heads=heads,
        turns=turns,
        device=device,
        tell=say,
    )
    tell(figures, attention.table(figures), as_json)


@bench.command("sampler")
def bench_sampler(
    target: Annotated[
        str,
        typer.Argument(help="Config file for random weights, run folder, or kathleen: the model that ships."),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured time per setting.")] = 2.0,
    stream: Stream = None,
    as_json: Json = False,
) -> None:
    """Speed of sampling on one thread of the CPU, by backend, memory length and number of streams.

    With the codec's decoder where its weights are found.
    """
    from txl_audio import recipe
    from txl_audio.bench.sampler import sampler_speed
    from txl_audio.bench.sampler_table import table
    from txl_audio.tokens import TxlError

    model = recipe.describe(target, overrides or [], draw=True)
    chosen = model.streams[recipe.stream_name(model, stream, origin=target)]
    codec = None
    if chosen.spec.frame_rate_hz:
        try:
            codec = recipe.codec_for_sound(chosen.spec)
        except TxlError as error:
            say(f"measured without a decoder: {error}")
    figures = sampler_speed(chosen, codec=codec, seconds=seconds, tell=say)
    tell(figures, table(figures), as_json)
