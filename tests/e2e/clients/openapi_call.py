"""Calls half_plus_two with the client that openapi-python-client generated as the package `generated`.

python openapi_call.py URL
"""

import sys

from generated import Client
from generated.api.k_serve_v2 import post_v2_models_half_plus_two_infer as infer
from generated.models import InferRequest, RequestInput
from generated.types import File

BINARY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}'

with Client(base_url=sys.argv[1]) as client:
    request = InferRequest(inputs=[RequestInput(name="x", datatype="FP32", shape=[2], data=[1.0, 5.0])])
    print([output.data for output in infer.sync(client=client, body=request).outputs])
    binary = File(payload=BINARY + bytes(4))
    print(
        [
            output.data
            for output in infer.sync(
                client=client, body=binary, inference_header_content_length=len(BINARY)
            ).outputs
        ]
    )
