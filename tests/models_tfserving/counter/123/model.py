"""A number that counts; its signatures have no input, or one, and there is no default one."""

import numpy as np

from triglot import Model, Signature, TensorSpec

OUTPUT = [TensorSpec("output", "FP32", [])]


class Counter(Model):
    signatures = {
        "get_counter": Signature([], OUTPUT),
        "incr_counter": Signature([], OUTPUT),
        "incr_counter_by": Signature([TensorSpec("delta", "FP32", None)], OUTPUT),
        "reset_counter": Signature([], OUTPUT),
    }

    def load(self, folder):
        self.count = np.float32(0)

    def infer(self, inputs, call):
        if call.signature_name == "reset_counter":
            self.count = np.float32(0)
        elif call.signature_name != "get_counter":
            self.count += np.float32(inputs.get("delta", 1))
        return {"output": self.count}
