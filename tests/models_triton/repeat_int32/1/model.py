import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with every element of IN, DELAY milliseconds after another, from a thread of its own."""

    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(model_config):
            raise pb_utils.TritonModelException(f"{args['model_name']} needs a decoupled transaction policy")
        output_config = pb_utils.get_output_config_by_name(model_config, "OUT")
        self.out_dtype = pb_utils.triton_string_to_numpy(output_config["data_type"])
        self.idx_dtype = pb_utils.triton_string_to_numpy(
            pb_utils.get_output_config_by_name(model_config, "IDX")["data_type"]
        )
        self.inflight_thread_count = 0
        self.inflight_thread_count_lck = threading.Lock()

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(
                target=self.response_thread,
                args=(
                    request.get_response_sender(),
                    pb_utils.get_input_tensor_by_name(request, "IN").as_numpy(),
                    pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy(),
                ),
                daemon=True,
            )
            with self.inflight_thread_count_lck:
                self.inflight_thread_count += 1
            thread.start()
            time.sleep(pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0] / 1000)

    def response_thread(self, response_sender, in_input, delay_input):
        for idx in range(in_input.size):
            if response_sender.is_cancelled():
                break
            time.sleep(delay_input[idx] / 1000)
            out_output = pb_utils.Tensor("OUT", np.array([in_input[idx]], self.out_dtype))
            idx_output = pb_utils.Tensor("IDX", np.array([idx], self.idx_dtype))
            response_sender.send(pb_utils.InferenceResponse(output_tensors=[idx_output, out_output]))
        response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.inflight_thread_count_lck:
            self.inflight_thread_count -= 1

    def finalize(self):
        while self.inflight_thread_count:
            time.sleep(0.01)
