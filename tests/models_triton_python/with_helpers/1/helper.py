import triton_python_backend_utils as pb_utils


def input_of(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
