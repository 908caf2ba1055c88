import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of what a sequence has sent; its last answer has the correlation id added."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            start, end, ready, corrid, value = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0].item()
                for name in ("START", "END", "READY", "CORRID", "INPUT")
            )
            assert ready == 1
            assert corrid == request.correlation_id()
            assert bool(start) == bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            self.sums[corrid] = (0 if start else self.sums[corrid]) + value
            total = self.sums[corrid]
            if end:
                total += corrid
                del self.sums[corrid]
            tensor = pb_utils.Tensor("OUTPUT", np.array([[total]]).astype(np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
