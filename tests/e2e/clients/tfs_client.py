"""Checks with TensorFlow Serving's client, `tensorflow-serving-api`: its stubs and messages, TensorFlow's tensors.

    python tfs_client.py GRPC_ADDRESS REST_ADDRESS grpc|grpc.aio OTHER_GRPC_ADDRESS FOLDER

The server at the first addresses has the models of FOLDER, except for those that cannot be loaded, and `versions`;
the other server is for the checks to choose its models.
"""

import sys

import checks
import requests
import tfs_examples
import tfs_manage
import tfs_predict
from tfs_subject import SECONDS, aio_stubs, blocking_stubs


async def check_rest_with_requests(subject):
    """As TensorFlow's tutorials do it."""
    headers = {"content-type": "application/json"}
    body = '{"signature_name": "serving_default", "instances": [[1.0], [5.0]]}'
    answer = post(f"{subject.rest}/half_plus_two/versions/123:predict", data=body, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [[2.5], [4.5]]})
    answer = post(f"{subject.rest}/half_plus_two:predict", json={"inputs": {"x": [1]}})
    assert (answer.status_code, answer.json()) == (200, {"outputs": [2.5]})
    assert answer.headers["content-type"] == "application/json"
    definitions = get(f"{subject.rest}/half_plus_two/metadata")["metadata"]["signature_def"]["signature_def"]
    assert definitions["serving_default"]["inputs"]["x"]["dtype"] == "DT_FLOAT"
    versions = get(f"{subject.rest}/versions")["model_version_status"]
    assert [version["version"] for version in versions] == ["2", "1"]


def post(url, **body):
    return requests.post(url, timeout=SECONDS, **body)


def get(url):
    answer = requests.get(url, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def main(grpc_address, rest_address, kind, *others):
    stubs = {"grpc": blocking_stubs, "grpc.aio": aio_stubs}[kind]
    modules = [tfs_predict, tfs_examples, tfs_manage, sys.modules[__name__]]
    checks.run(modules, lambda: stubs(grpc_address, rest_address, *others))


if __name__ == "__main__":
    main(*sys.argv[1:])
