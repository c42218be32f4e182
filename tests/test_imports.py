"""What importing needs: nothing for the package itself, no torchaudio and no extras for its modules."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import txl_audio

MODULES = sorted(module.name for module in pkgutil.walk_packages(txl_audio.__path__, "txl_audio."))

# torchaudio's wheels do not load beside a CPU-only torch; the others are optional extras.
NOT_NEEDED = ("torchaudio", "lhotse", "ai_edge_litert", "transformers", "vector_quantize_pytorch", "wandb")


def run(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_package_alone_loads_no_library() -> None:
    run(
        "import sys\nbefore = set(sys.modules)\nimport txl_audio\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new == {'txl_audio'}, new\n"
        "assert txl_audio.__version__\n"
    )


def test_every_module_loads_without_torchaudio_and_extras() -> None:
    assert {"txl_audio.tokens", "txl_audio.config", "txl_audio.runtime"} <= set(MODULES)
    run(
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"  # None there makes an import fail
        f"for name in {MODULES!r}:\n    importlib.import_module(name)\n"
    )
