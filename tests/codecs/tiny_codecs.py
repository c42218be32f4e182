"""A codec of every kind for tests: tiny random models where weights are trained elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from txl_audio.codecs.rvq_model import RvqModelConfig


def codec_settings(kind: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Settings with which `build_codec(kind, ...)` works; skips where a package or file is missing."""
    if kind in ("encodec", "dac", "mimi"):
        return {"weights": str(save_tiny(kind, folder)), "codebooks": 3}
    if kind == "lyra":
        return {"weights": str(lyra_weights(request))}
    if kind == "rvq":
        return {"weights": str(_save_tiny_rvq(folder))}
    return {}


def lyra_weights(request: pytest.FixtureRequest) -> Path:
    """Folder of Lyra's weights among the reference data."""
    pytest.importorskip("ai_edge_litert")
    return request.getfixturevalue("shared") / "data" / "lyra_v2_soundstream"


def save_tiny(kind: str, folder: Path, **changes: Any) -> Path:
    """A random model of `transformers`, saved as people have them; 16 entries a codebook."""
    transformers = pytest.importorskip("transformers")
    encodec = {"sampling_rate": 16_000, "num_filters": 4, "hidden_size": 8, "num_lstm_layers": 1}
    encodec |= {"codebook_dim": 8, "upsampling_ratios": [8, 5, 4, 2], "target_bandwidths": [0.2, 0.8]}
    # A ratio of 5: odd strides leave out samples, as those of the 16 kHz model do.
    dac = {"encoder_hidden_size": 4, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4, 5, 8]}
    dac |= {"n_codebooks": 4, "codebook_dim": 4}
    mimi = {"num_filters": 4, "hidden_size": 16, "codebook_dim": 8, "num_quantizers": 4}
    mimi |= {"vector_quantization_hidden_dimension": 8, "upsample_groups": 16, "num_hidden_layers": 1}
    mimi |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    name = {"encodec": "Encodec", "dac": "Dac", "mimi": "Mimi"}[kind]
    settings = {"encodec": encodec, "dac": dac, "mimi": mimi}[kind] | {"codebook_size": 16} | changes
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("embed", "embed_sum")):  # codebooks, which start at zero
            buffer.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def _save_tiny_rvq(folder: Path) -> Path:
    """A run folder of the project's own codec with random weights and codebooks."""
    config = RvqModelConfig(codebooks=3, codebook_size=16, latent=8, width=16, blocks=1)
    torch.manual_seed(1)
    model = config.build()
    (folder / "config.yaml").write_text(f"kind: codec\nmodel: {config.model_dump_json()}\n")
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder
