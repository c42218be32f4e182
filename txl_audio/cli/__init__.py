"""The command line: thin verbs. Figures go to standard output, everything else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Each import adds its verbs, in the order that `--help` lists them.
# isort: off
import txl_audio.cli.prepare
import txl_audio.cli.codec
import txl_audio.cli.train
import txl_audio.cli.bench
import txl_audio.cli.plan
import txl_audio.cli.evaluate
import txl_audio.cli.context
import txl_audio.cli.sample
import txl_audio.cli.serve
import txl_audio.cli.weights  # noqa: F401

# isort: on
from txl_audio.cli.common import app, say
from txl_audio.tokens import ConfigError, TxlError


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 bad usage or config, 1 anything else."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        app(words, prog_name="txl-audio")
    except SystemExit as stop:
        if stop.code != 130:  # Typer's answer to Ctrl-C
            raise
        say("interrupted")
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        foreseen = isinstance(error, (TxlError, OSError, MemoryError))
        said = str(error) if foreseen else f"{type(error).__name__}: {error}; --debug shows where"
        say(f"error: {' '.join(said.split())}")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@app.callback()
def _root() -> None:
    """Transformer-XL for streams: train on speech, generate it while you listen, model text.

    Add --debug to any command for a traceback.
    """
