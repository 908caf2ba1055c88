"""Sends 32 requests at once, and prints in how many runs the model answered them."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

URL = "http://127.0.0.1:8000/v2/models/slow"


def square(number):
    body = json.dumps({"x": [[number]]}).encode()
    with urllib.request.urlopen(f"{URL}/predict", body) as answer:
        return json.load(answer)["y"][0][0]


with ThreadPoolExecutor(32) as threads:
    squares = list(threads.map(square, range(32)))
assert squares == [number**2 for number in range(32)]

with urllib.request.urlopen(f"{URL}/stats") as answer:
    stats = json.load(answer)["model_stats"][0]
print(stats["inference_count"], "requests,", stats["execution_count"], "runs of the model")
assert stats["execution_count"] < 32
