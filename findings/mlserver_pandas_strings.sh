#!/usr/bin/env bash
# mlserver 1.7.1 cannot encode a DataFrame's column of texts with pandas 3, which it admits: pandas 3 gives such columns
# the dtype `str`, whose kind is "O", and MLServer's table knows neither. Its PandasCodec raises KeyError: 'O', for
# requests and for responses; a column of dtype `object` works. pip chooses pandas 3 for a new environment.
#
# Output seen (mlserver 1.7.1, pandas 3.1.1, CPython 3.11.7):
#   object: BYTES
#   str: KeyError 'O'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mlserver==1.7.1 pandas==3.1.1
"$folder/venv/bin/python" - <<'END' 2>/dev/null | tee "$folder/seen"
import pandas as pd
from mlserver.codecs import PandasCodec

for dtype in ("object", "str"):
    frame = pd.DataFrame({"text": pd.Series(["a", "b"], dtype=dtype)})
    try:
        print(f"{dtype}: {PandasCodec.encode_request(frame).inputs[0].datatype}")
    except KeyError as error:
        print(f"{dtype}: KeyError {error}")
END
diff - "$folder/seen" <<'END'
object: BYTES
str: KeyError 'O'
END
