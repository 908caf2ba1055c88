import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is add_sub's sum, OUTPUT1 its difference, each of a call of its own at the same time."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            inference_response_awaits = []
            for output in ("OUTPUT0", "OUTPUT1"):
                infer_request = pb_utils.InferenceRequest(
                    model_name="add_sub", requested_output_names=[output], inputs=[in_0, in_1]
                )
                inference_response_awaits.append(infer_request.async_exec())
            inference_responses = await asyncio.gather(*inference_response_awaits)
            for infer_response in inference_responses:
                if infer_response.has_error():
                    raise pb_utils.TritonModelException(infer_response.error().message())
            outputs = [
                pb_utils.get_output_tensor_by_name(infer_response, name)
                for infer_response, name in zip(inference_responses, ("OUTPUT0", "OUTPUT1"), strict=True)
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
