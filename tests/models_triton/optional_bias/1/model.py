import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0, and BIAS where there is one, times the request's parameter `scale`."""

    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            bias = pb_utils.get_input_tensor_by_name(request, "BIAS")
            if bias is not None:
                values = values + bias.as_numpy()
            parameters = json.loads(request.parameters() or "{}")
            if "scale" in parameters:
                values = values * values.dtype.type(parameters["scale"])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        return responses
