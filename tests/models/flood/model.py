"""As many answers as the request asks for, and notes in files of how far it is and when it stopped.

The request is JSON: `count` and `size` of the answers, the seconds of `pause` after each, and whether it then
`waits` for a file `read-NUMBER`. In `folder` it notes, in `progress`, the number of answers so far
(8 bytes), and, in `stopped`, a time of the monotonic clock.
"""

import json
import os
import time
from pathlib import Path

import numpy as np

import triglot


class Flood(triglot.Model):
    inputs = [triglot.TensorSpec("request", "BYTES", [1])]
    outputs = [triglot.TensorSpec("item", "BYTES", [1])]
    instances = 4

    def infer(self, inputs):
        order = json.loads(inputs["request"][0])
        folder = Path(order["folder"])
        filler = bytes(order["size"] - 8)
        progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
        try:
            for number in range(order["count"]):
                os.pwrite(progress, (number + 1).to_bytes(8, "little"), 0)
                yield {"item": np.array([number.to_bytes(8, "little") + filler], dtype=object)}
                time.sleep(order["pause"])
                while order["waits"] and not (folder / f"read-{number}").exists():
                    time.sleep(0.002)
        finally:
            stopped = time.monotonic()
            os.close(progress)
            (folder / "stopping").write_text(str(stopped))
            (folder / "stopping").rename(folder / "stopped")
