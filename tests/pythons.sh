#!/usr/bin/env bash
# Checks the wheel on each supported Python, without a compiler, and writes the result into docs/compatibility.md.
# Takes the interpreters of the machine (with pyenv, its newest ones), and those of Debian sid, which are unpacked into
# a folder. Needs apt-get, dpkg-deb and unshare.
set -euo pipefail
cd "$(dirname "$0")/.."

of_machine=(/usr/bin/python3 python3.12 python3.13)
of_sid=(python3.14 python3.15)
page=docs/compatibility.md
folder=$PWD/.venv/pythons
sid=$folder/sid
rm -rf "$sid" "$folder/dist"
mkdir -p "$sid" "$folder"/apt/{state/lists,cache/archives}/partial

"$(python3 tests/environments.py release)" -m build --wheel --outdir "$folder/dist" . >/dev/null

# An apt that knows nothing of the packages that this machine has.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' 'Created-By: Packages' | head -n 1)
echo "deb $mirror sid main" >"$folder/apt/sources.list"
: >"$folder/apt/status"
export APT_CONFIG=$folder/apt/apt.conf
cat >"$APT_CONFIG" <<END
Dir::State "$folder/apt/state";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "-";
Acquire::Languages "none";
END
apt-get update --quiet=2
rm -f "$folder"/apt/cache/archives/*.deb
apt-get install --quiet=2 --yes --download-only --no-install-recommends \
    "${of_sid[@]/%/-venv}" bash coreutils libstdc++6 >/dev/null
for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb --extract "$package" "$sid"; done

in_sid() {
    local user=()
    [ "$(id -u)" = 0 ] || user=(--map-root-user)
    # /bin, /lib and /lib64 are links into /usr, whose libc is sid's from here on.
    unshare "${user[@]}" --mount sh -c 'mount --bind "$0/usr" /usr && exec "$@"' "$sid" "$@"
}

rows=
check() {
    echo "$* …" >&2
    rows+=$("$@" tests/clean_install.py "$folder"/dist/*.whl)$'\n'
}
for python in "${of_machine[@]}"; do
    export PYENV_VERSION=${python#*python}
    if "$python" -c 'import ensurepip' 2>/dev/null; then check "$python"; else echo "no $python with venv" >&2; fi
done
unset PYENV_VERSION
for python in "${of_sid[@]}"; do check in_sid "$python"; done

table="<!-- pythons: begin -->
| CPython, C library, machine | libraries | result of $(date +%Y-%m-%d) |
|---|---|---|
$rows<!-- pythons: end -->"
TABLE=$table python3 - "$page" <<'END'
import os, re, sys
from pathlib import Path

page = Path(sys.argv[1])
text, count = re.subn("<!-- pythons: begin -->.*<!-- pythons: end -->", lambda _: os.environ["TABLE"], page.read_text(), flags=re.S)
assert count == 1
page.write_text(text)
END
