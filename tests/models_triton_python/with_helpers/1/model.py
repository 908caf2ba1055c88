import threading

import helper
import shared.common
import triton_python_backend_utils as pb_utils
from package import twice
from plain.module import THREE

from . import helper as same_helper


class TritonPythonModel:
    """Uses modules that lie beside it, by all the ways in which these can be imported."""

    def execute(self, requests):
        assert helper is same_helper
        answers = []
        thread = threading.Thread(target=self.run, args=(requests, answers))
        thread.start()
        thread.join()
        return answers

    def run(self, requests, answers):
        import late  # noqa: PLC0415 - while it serves
        import triton_python_backend_utils as utils_of_a_thread  # noqa: PLC0415

        assert utils_of_a_thread is pb_utils
        for request in requests:
            values = helper.input_of(request, "IN") * THREE + shared.common.ONE
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", late.same(twice(values)))]))
