"""What a run stands on: device, precision, random state, rank and world size."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import distributed
from torch.nn import init
from torch.overrides import TorchFunctionMode

from txl_audio.tokens import CheckpointError, ConfigError

Precision = Literal["float32", "bfloat16"]
F = TypeVar("F", bound=Callable[..., Any])


def device(name: str = "auto") -> torch.device:
    """The device that `name` stands for: `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is CUDA where there is one and else the CPU. `cuda` without a number is this process's own
    (LOCAL_RANK, as `torchrun` sets it). Raises ConfigError for a device that is not here.
    """
    kind, colon, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(f"device {name!r} is not known; expected auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = torch.version.cuda
        why = (
            f"PyTorch was built for CUDA {build} but sees no GPU" if build else "this PyTorch is a CPU build"
        )
        raise ConfigError(f"device {name!r} was asked for, but {why}; use device auto or cpu")
    number = int(index) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"device cuda:{number} was asked for, but there are {count} GPUs, numbered from 0")
    return torch.device("cuda", number)


def choose_precision(name: Precision | Literal["auto"], device: torch.device) -> Precision:
    """The precision that `name` stands for; `auto` is bfloat16 where this machine is faster with it.

    A GPU is asked, a CPU is measured (0.2 s): one without bfloat16 instructions is ten times slower
    with it. Raises ConfigError where bfloat16 is asked for and the GPU has none.
    """
    if name != "auto":
        autocast(device, name)  # raises where it cannot be had
        return name
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bfloat16, float32 = (matmul_flops(device, d, seconds=0.1) for d in (torch.bfloat16, torch.float32))
        faster = bfloat16 > float32
    return "bfloat16" if faster else "float32"


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Context in which matrix products run in `precision`; weights, softmax and losses stay float32.

    Raises ConfigError where the precision is unknown or the GPU has no bfloat16.
    """
    if precision == "float32":
        return torch.autocast(device.type, enabled=False)
    if precision != "bfloat16":
        raise ConfigError(f"precision {precision!r} is not known; expected float32 or bfloat16")
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(f"precision bfloat16 was asked for, but {gpu} has none; use precision float32")
    return torch.autocast(device.type, dtype=torch.bfloat16)


def keep_freed_memory() -> None:
    """Lets the C library keep large freed blocks for the next step instead of giving them back.

    A training step on a CPU frees and takes the same megabytes again and again; giving them to the
    system costs thousands of page faults a step, about 6 % of the time. Only glibc has the setting.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)


@contextmanager
def single_thread(device: torch.device) -> Iterator[None]:
    """One thread on a CPU: products with a single vector are too small to share, and waiting for the
    other threads costs more than the work, many times more on a busy machine."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class no_initialisation(TorchFunctionMode):  # noqa: N801 - used like a function
    """Context in which modules are built without drawing their weights, which are then undefined.

    For a model whose every weight is about to be read: drawing hundreds of millions takes longer.
    """

    # Those of `nn.init` come here themselves, and this mode is off inside them.
    _DRAWS = frozenset(
        {torch.Tensor.normal_, torch.Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (every device). Raises ConfigError outside [0, 2**32)."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed} is out of range; expected 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Random state of Python, NumPy, torch and the current GPU.

    `torch` and `cuda` (only where CUDA is in use) are uint8 tensors, for safetensors; `python` and `numpy`
    are lists of numbers and strings, for JSON, which gives back every one of them exactly.
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts back what `rng_state` gave, also after a way through JSON and safetensors.

    A GPU's state is put back only where there is a GPU. Raises CheckpointError unless it is such a state.
    """
    missing = {"python", "numpy", "torch"} - set(state)
    if missing:
        raise CheckpointError(
            f"random state lacks {sorted(missing)}, expected python, numpy and torch; start a new run"
        )
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"random state is damaged ({error}); start a new run") from error


def rank() -> int:
    """This process's number among all that train together; 0 alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes train together; 1 alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measured rate of large square matrix products, in FLOP/s (2 n^3 for a product).

    What a run is held against: no data sheet knows this machine's clock, cores and neighbours.
    """
    n, products = (8192, 4) if device.type == "cuda" else (768, 1)
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.inference_mode():
        run()  # loads the kernels
        done, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or done == 0:
            run()
            done += products
    return 2.0 * n**3 * done / elapsed


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable, where the system allows opening folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def compiled(**options: Any) -> Callable[[F], F]:
    """numba's `njit`, without the interpreter's lock and kept on disk where there is a place for it.

    Where there is none (a package and a home that cannot be written to), every process compiles anew.
    """
    from numba import njit  # not needed by all that needs this file

    def decorate(function: F) -> F:
        try:
            return cast(F, njit(cache=True, nogil=True, **options)(function))
        except RuntimeError:
            return cast(F, njit(nogil=True, **options)(function))

    return decorate


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect when the block ends, a second one at once.

    For calls that compile: an exception in one of LLVM's callbacks is ignored, and the interrupt with it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _frame: object) -> None:
        held.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)
