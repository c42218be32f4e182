"""Time and peak memory with a checkpoint of the released size: import, score, generate.

    python scripts/real_size_checkpoint.py FOLDER [--small]

Makes FOLDER/transfo-xl-wt103 as Hugging Face's folder of that name is (18 layers, 267,735 words, random
values), imports it into FOLDER/run, scores a text of 1,000 words and generates 20 words. Every step is a
process of its own. --small has two narrow layers, to try the script. FOLDER needs 2.5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch

REAL = {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
}
SMALL = {
    "vocab_size": 500,
    "cutoffs": [50, 100, 300],
    "d_model": 64,
    "d_embed": 64,
    "n_head": 2,
    "d_head": 32,
    "d_inner": 128,
    "n_layer": 2,
    "mem_len": 40,
    "clamp_len": 30,
}
# As transformers 4.37.2 writes them.
OTHER_SETTINGS = {
    "adaptive": True,
    "architectures": ["TransfoXLLMHeadModel"],
    "attn_type": 0,
    "div_val": 4,
    "dropatt": 0.0,
    "dropout": 0.1,
    "eos_token_id": 0,
    "init": "normal",
    "init_range": 0.01,
    "init_std": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "transfo-xl",
    "pre_lnorm": False,
    "proj_init_std": 0.01,
    "same_length": True,
    "sample_softmax": -1,
    "tie_projs": [False, True, True, True],
    "torch_dtype": "float32",
    "transformers_version": "4.37.2",
    "untie_r": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="two narrow layers, 500 words")
    parser.add_argument("--only-make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    source, run = arguments.folder / "transfo-xl-wt103", arguments.folder / "run"
    sizes = SMALL if arguments.small else REAL
    if arguments.only_make:
        make(source, sizes)
        return
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        sys.exit(f"{arguments.folder} is not empty; give a new folder")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = arguments.folder / "text.txt"
    text.write_text("".join(f"{line}\n" for line in lines(sizes["vocab_size"])))
    verb = [sys.executable, "-m", "txl_audio.cli"]
    steps = {
        "make": [sys.executable, __file__, *sys.argv[1:], "--only-make"],
        "import": [*verb, "import", source, "--out", run],
        "score": [*verb, "score", run, text, "--json"],
        "generate": [*verb, "sample", run, "--prompt", "word7 word8", "--tokens", "20"],
    }
    print(f"{'step':<10}{'seconds':>9}{'peak MB':>9}")
    for name, command in steps.items():
        seconds, peak_mb, said = measured([str(word) for word in command])
        print(f"{name:<10}{seconds:>9.1f}{peak_mb:>9.0f}  {said}", flush=True)
    print(f"weights: {(run / 'model.safetensors').stat().st_size / 1e6:.0f} MB")


def measured(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak resident megabytes and standard output of a command, which has to succeed."""
    begun = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    per_mb = 1e6 if sys.platform == "darwin" else 1e3  # the unit of ru_maxrss
    return time.perf_counter() - begun, usage.ru_maxrss / per_mb, " ".join(said.split())


def lines(words: int) -> Iterator[str]:
    """50 lines of 20 tokens with the mark of their end, some of which are rare words or unknown."""
    for line in range(50):
        yield " ".join(f"word{(7919 * (19 * line + i)) % (words + 9)}" for i in range(19))


def make(folder: Path, sizes: dict[str, int | list[int]]) -> None:
    """Writes config.json, pytorch_model.bin and vocab.pkl."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps({**OTHER_SETTINGS, **sizes}, indent=2))
    torch.save(weights(sizes), folder / "pytorch_model.bin")
    words = ["<eos>", "<unk>", *(f"word{i}" for i in range(int(sizes["vocab_size"]) - 2))]
    ids = OrderedDict((word, index) for index, word in enumerate(words))
    fields = {"counter": Counter(words), "special": ["<eos>"], "lower_case": False}
    (folder / "vocab.pkl").write_bytes(pickle.dumps({**fields, "idx2sym": words, "sym2idx": ids}))


def weights(c: dict[str, int | list[int]]) -> OrderedDict[str, torch.Tensor]:
    """A state dict of Hugging Face's TransfoXLLMHeadModel, tied tensors shared."""
    d, heads, d_head, inner = (int(c[name]) for name in ("d_model", "n_head", "d_head", "d_inner"))
    width = heads * d_head
    found: OrderedDict[str, torch.Tensor] = OrderedDict()

    def put(name: str, *shape: int) -> None:
        found[name] = torch.randn(shape) * 0.02

    bounds = [0, *c["cutoffs"], c["vocab_size"]]  # type: ignore[misc]
    for i in range(4):
        put(f"transformer.word_emb.emb_layers.{i}.weight", bounds[i + 1] - bounds[i], d // 4**i)
        put(f"transformer.word_emb.emb_projs.{i}", d, d // 4**i)
    for layer in range(int(c["n_layer"])):
        at = f"transformer.layers.{layer}."
        for name, shape in {
            "dec_attn.r_r_bias": (heads, d_head),
            "dec_attn.r_w_bias": (heads, d_head),
            "dec_attn.qkv_net.weight": (3 * width, d),
            "dec_attn.o_net.weight": (d, width),
            "dec_attn.layer_norm.weight": (d,),
            "dec_attn.layer_norm.bias": (d,),
            "dec_attn.r_net.weight": (width, d),
            "pos_ff.CoreNet.0.weight": (inner, d),
            "pos_ff.CoreNet.0.bias": (inner,),
            "pos_ff.CoreNet.3.weight": (d, inner),
            "pos_ff.CoreNet.3.bias": (d,),
            "pos_ff.layer_norm.weight": (d,),
            "pos_ff.layer_norm.bias": (d,),
        }.items():
            put(at + name, *shape)
        for norm in ("dec_attn.layer_norm", "pos_ff.layer_norm"):
            found[f"{at}{norm}.weight"] += 1
    found["transformer.pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, d, 2.0) / d)
    put("crit.cluster_weight", 3, d)
    put("crit.cluster_bias", 3)
    put("crit.out_projs.0", d, d)
    for i in range(4):
        found[f"crit.out_layers.{i}.weight"] = found[f"transformer.word_emb.emb_layers.{i}.weight"]
        put(f"crit.out_layers.{i}.bias", bounds[i + 1] - bounds[i])
        if i > 0:
            found[f"crit.out_projs.{i}"] = found[f"transformer.word_emb.emb_projs.{i}"]
    return found


if __name__ == "__main__":
    main()
