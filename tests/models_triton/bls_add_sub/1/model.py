import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Lets another model work, the one that MODEL_NAME says."""

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            model_name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode()
            infer_request = pb_utils.InferenceRequest(
                model_name=model_name,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=[
                    pb_utils.Tensor("INPUT0", in_0.as_numpy().reshape(1, 16)),
                    pb_utils.Tensor("INPUT1", in_1.as_numpy().reshape(1, 16)),
                ],
            )
            infer_response = infer_request.exec()
            if infer_response.has_error():
                responses.append(pb_utils.InferenceResponse(error=infer_response.error()))
                continue
            outputs = [
                pb_utils.Tensor(
                    name, pb_utils.get_output_tensor_by_name(infer_response, name).as_numpy().reshape(16)
                )
                for name in ("OUTPUT0", "OUTPUT1")
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
