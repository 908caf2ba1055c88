import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """As bls_square, with two calls at the same time."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            infer_request = pb_utils.InferenceRequest(
                model_name="square",
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                requested_output_names=["OUT"],
            )
            async_responses = [infer_request.async_exec(decoupled=True) for _ in range(2)]
            total = 0
            for infer_responses in await asyncio.gather(*async_responses):
                for infer_response in infer_responses:
                    if len(infer_response.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(infer_response, "OUT").as_numpy()[0]
            tensor = pb_utils.Tensor("SUM", np.array([total], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
