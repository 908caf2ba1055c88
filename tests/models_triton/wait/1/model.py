import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Waits so long, or until the request is cancelled."""

    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()[0]
            started = time.monotonic()
            while time.monotonic() - started < seconds and not request.is_cancelled():
                time.sleep(0.005)
            if request.is_cancelled():
                cancelled = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                responses.append(pb_utils.InferenceResponse(error=cancelled))
                continue
            waited = np.array([time.monotonic() - started], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("WAITED", waited)]))
        return responses
