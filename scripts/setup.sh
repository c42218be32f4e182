# shellcheck shell=bash
# Sourced by the other scripts: goes to the repository root and activates .venv with the package and its
# development tools in it. Works from any folder; a second run only compares a hash.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

_is_supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if _is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: got no Python 3.10 to 3.13 (looked for ${PYTHON:-python3 and python3.10 to python3.13});" \
        "install one, or name it: PYTHON=/path/to/python3 bash scripts/test.sh" >&2
    return 1
}

if [ ! -x .venv/bin/python ]; then
    _python="$(_find_python)" || exit 1
    echo "set-up: making .venv with $("$_python" --version)" >&2
    if ! "$_python" -m venv .venv; then
        rm -rf .venv
        echo "error: $_python could not make a virtual environment; on Debian and Ubuntu:" \
            "apt-get install python3-venv" >&2
        exit 1
    fi
elif ! _is_supported .venv/bin/python; then
    echo "error: .venv holds $(.venv/bin/python --version 2>&1), expected Python 3.10 to 3.13;" \
        "remove .venv and run again" >&2
    exit 1
fi
# shellcheck disable=SC1091
. .venv/bin/activate

# The folder is part of the hash: an editable install points at it.
_hash="$( (pwd; cat pyproject.toml) | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [ "$(cat .venv/txl-audio.stamp 2>/dev/null)" != "$_hash" ]; then
    echo "set-up: installing txl-audio and its libraries into .venv (minutes the first time)" >&2
    _status=0
    python -m pip install --disable-pip-version-check --progress-bar off -e '.[dev]' 2>&1 | tee .venv/setup.log |
        { grep --line-buffered -E '^ *(Downloading|Installing collected|Successfully)' | cut -c 1-110 >&2 || true; } ||
        _status=$?
    if [ "$_status" -ne 0 ]; then
        tail -n 15 .venv/setup.log >&2
        echo "error: pip could not install the libraries (the whole log: .venv/setup.log)" >&2
        exit 1
    fi
    echo "$_hash" >.venv/txl-audio.stamp
fi
