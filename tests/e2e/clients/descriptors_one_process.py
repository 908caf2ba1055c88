"""Import the server and a client's protobuf module in one process, and let each read what the other wrote.

    python descriptors_one_process.py first|last MODULE…      # the server before or after the modules

The last module is the one with the client's messages.
"""

import importlib
import pkgutil
import sys


def load_pb():
    """The whole server, and every module of triglot.pb."""
    importlib.import_module("triglot.server")
    package = importlib.import_module("triglot.pb")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, "triglot.pb.")]
    return {name: importlib.import_module(name) for name in names}


def fill_infer(request):
    request.model_name = "m"
    request.parameters["sequence_end"].bool_param = False
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(b"12345678")
    return request


def fill_predict(request):
    request.model_spec.name = "m"
    request.model_spec.version.value = 0
    tensor = request.inputs["x"]
    tensor.dtype = 1
    tensor.tensor_shape.dim.add(size=2)
    tensor.float_val.extend([1.0, 2.0])
    request.output_filter.append("y")
    return request


# The message that both write: its name, our module that has it, and what puts something into it.
REQUESTS = [
    ("ModelInferRequest", "triglot.pb.kserve.inference_pb2", fill_infer),
    ("PredictRequest", "triglot.pb.tfserving.predict_pb2", fill_predict),
]


def main(order, *names):
    if order == "first":
        ours = load_pb()
    theirs = [importlib.import_module(name) for name in names][-1]
    if order == "last":
        ours = load_pb()
    [(name, module, fill)] = [request for request in REQUESTS if hasattr(theirs, request[0])]
    mine = getattr(ours[module], name)
    yours = getattr(theirs, name)
    assert mine is not yours
    sent, received = fill(mine()).SerializeToString(), fill(yours()).SerializeToString()
    assert sent == received
    assert fill(mine()) == mine.FromString(received)
    assert fill(yours()) == yours.FromString(sent)
    print(len(ours))


if __name__ == "__main__":
    main(*sys.argv[1:])
