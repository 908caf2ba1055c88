import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
            try:
                numbers = np.array([int(word.decode()) for word in words.ravel()], np.int32)
            except ValueError as error:
                refused = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=refused))
                continue
            tensor = pb_utils.Tensor("NUMBERS", numbers.reshape(words.shape))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
