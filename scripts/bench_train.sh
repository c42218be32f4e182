#!/usr/bin/env bash
# Training throughput beside x-transformers and Hugging Face's TransfoXL, in turns of one run:
#   bash scripts/bench_train.sh [options of `txl-audio bench train`]
# transformers 4.37.2 is the last release whose TransfoXL runs. It goes into .transfo-xl, where only its own
# process looks for it, and uses the PyTorch of .venv; its tokenizers has wheels for Python 3.10 to 3.12.
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python -c 'import x_transformers' 2>/dev/null || pip install --quiet -e '.[baselines]'
if [ ! -d .transfo-xl/transformers ]; then
    echo "set-up: installing transformers 4.37.2 into .transfo-xl" >&2
    pip install --quiet --disable-pip-version-check --target .transfo-xl --no-deps \
        transformers==4.37.2 tokenizers==0.15.2 'huggingface-hub>=0.19.3,<1.0'
    pip install --quiet --disable-pip-version-check regex requests tqdm filelock pyyaml packaging fsspec
fi
exec txl-audio bench train --beside .transfo-xl "$@"
