import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of what the decoupled model square answers."""

    def execute(self, requests):
        responses = []
        for request in requests:
            infer_request = pb_utils.InferenceRequest(
                model_name="square",
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                requested_output_names=["OUT"],
            )
            response_sum = 0
            for infer_response in infer_request.exec(decoupled=True):
                if infer_response.has_error():
                    raise pb_utils.TritonModelException(infer_response.error().message())
                # The last one may be empty.
                if len(infer_response.output_tensors()) > 0:
                    output0 = pb_utils.get_output_tensor_by_name(infer_response, "OUT")
                    if output0.is_cpu():
                        response_sum += output0.as_numpy()[0]
            tensor = pb_utils.Tensor("SUM", np.array([response_sum], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
