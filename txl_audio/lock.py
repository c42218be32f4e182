"""A folder that one process writes at a time."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_audio.tokens import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

LOCK_FILE = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process; the system lets go of it when the process ends, however it ends.

    The file stays: a lock on a file that another process may delete would hold nothing. Where the file
    system has no locks, a line says so and nothing is held. Raises CheckpointError where another process
    holds the folder; it names that process.
    """
    with open(folder / LOCK_FILE, "a+", encoding="utf-8") as file:
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise CheckpointError(
                f"{folder} is being written by {holder}; wait for it, stop it, or choose another folder with "
                "out=DIR"
            ) from error
        except OSError as error:
            sys.stderr.write(
                f"warning: {folder} cannot be locked ({error}); let no other process train in it\n"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
