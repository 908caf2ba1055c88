import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Says everything that there is to know of itself and of a request."""

    def initialize(self, args):
        self.args = args
        self.logger = pb_utils.Logger
        self.logger.log_info(f"initializing {args['model_instance_name']}")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        request_seen = {
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "priority": request.priority(),
            "parameters": request.parameters(),
            "outputs": sorted(request.requested_output_names()),
            "model": [request.model_name(), request.model_version()],
            "inputs": [
                [tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()]
                for tensor in request.inputs()
            ],
            "bias": pb_utils.get_input_tensor_by_name(request, "BIAS") is not None,
            "cancelled": request.is_cancelled(),
            "trace": request.trace().get_context(),
            "args": self.args,
            "model_dir": pb_utils.get_model_dir(),
            "ready": [pb_utils.is_model_ready(name) for name in ("add_sub", "nope")],
            "version_ready": [pb_utils.is_model_ready("add_sub", version) for version in ("1", "7")],
        }
        tensors = [
            pb_utils.Tensor("SAID", np.array([[json.dumps(request_seen)]], dtype=object)),
            pb_utils.Tensor("OTHER", np.array([["é".encode()]], dtype=np.bytes_)),
        ]
        return pb_utils.InferenceResponse(
            [tensor for tensor in tensors if tensor.name() in request.requested_output_names()],
            parameters={"words": 2, "short": True, "of": "it"},
        )
