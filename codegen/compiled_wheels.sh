#!/usr/bin/env bash
# compiled_wheels.sh FOLDER PYTHON...: builds the compiled wheel of each Python that there is, for any Linux whose C
# library is new enough, installs it in a new environment, and calls the server there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
tools=$(dirname "$(python3 tests/environments.py release)")
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for python in "$@"; do
    export PYENV_VERSION=${python#python} # Where pyenv has it.
    if ! "$python" -c 'import pip' 2>/dev/null; then
        echo "no $python with pip: no compiled wheel for it" >&2
        continue
    fi
    TRIGLOT_COMPILE=1 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$made" .
    (
        unset PYENV_VERSION
        PATH=$tools:$PATH "$tools/python" -m auditwheel repair --wheel-dir "$made/any-linux" "$made"/*.whl
    )
    "$python" tests/clean_install.py "$made"/any-linux/*.whl
    mv "$made"/any-linux/*.whl "$folder"
    rm "$made"/*.whl
done
