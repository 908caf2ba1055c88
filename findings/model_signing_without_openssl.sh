#!/usr/bin/env bash
# model-signing 1.1.1, installed by pip with everything that it declares, cannot be imported, whatever kind of signature
# is wanted: its module for certificates imports OpenSSL, of the package pyOpenSSL, which is not among its dependencies.
# Once that is installed, too, the same import works.
#
# Output seen (model-signing 1.1.1, pyOpenSSL 26.4.0, CPython 3.11.7):
#   ModuleNotFoundError: No module named 'OpenSSL'
#   imported
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
try() {
	"$folder/venv/bin/python" -c 'import model_signing.verifying; print("imported")' 2>&1 | tail -n 1 || true
}
"$folder/venv/bin/pip" --quiet install model-signing==1.1.1
try | tee "$folder/seen"
"$folder/venv/bin/pip" --quiet install pyOpenSSL==26.4.0
try | tee -a "$folder/seen"
diff - "$folder/seen" <<'END'
ModuleNotFoundError: No module named 'OpenSSL'
imported
END
