"""As many messages as the request asks for, and notes in files of how far it is and when it stopped.

The request is JSON: `count` and `size` of the messages, the seconds of `pause` after each, and whether it then
`waits` for a file `read-NUMBER`. In `folder` it notes, in `progress`, the number of messages so far
(8 bytes), and, in `stopped`, a time of the monotonic clock.
"""

import json
import os
import time
from pathlib import Path

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class FloodInferer(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        return True

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        order = json.loads(inp.bin_data)
        folder = Path(order["folder"])
        filler = bytes(order["size"] - 8)
        progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
        for number in range(order["count"]):
            if context.if_disconnected():
                break
            os.pwrite(progress, (number + 1).to_bytes(8, "little"), 0)
            context.stream_respond(GrpsMessage(bin_data=number.to_bytes(8, "little") + filler))
            time.sleep(order["pause"])
            while order["waits"] and not (folder / f"read-{number}").exists():
                time.sleep(0.002)
        stopped = time.monotonic()
        os.close(progress)
        (folder / "stopping").write_text(str(stopped))
        (folder / "stopping").rename(folder / "stopped")
        return GrpsMessage()


inferer_register.register("flood", FloodInferer())
