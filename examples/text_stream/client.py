"""Prints a text as it comes, with the standard library alone."""

import json
import urllib.request

request = urllib.request.Request(
    "http://127.0.0.1:8000/v2/models/teller/predict",
    json.dumps({"start": "the", "words": 6}).encode(),
    {"Accept": "application/x-ndjson"},
)
print("the", end="")
with urllib.request.urlopen(request) as answers:
    for answer in answers:
        print("", json.loads(answer)["word"][0], end="", flush=True)
print()
