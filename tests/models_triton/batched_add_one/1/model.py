import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds one, and says how many requests came along."""

    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            count = np.full((len(values), 1), len(requests), np.int32)
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("OUTPUT0", values + 1),
                        pb_utils.Tensor("REQUESTS", count),
                    ]
                )
            )
        return responses
