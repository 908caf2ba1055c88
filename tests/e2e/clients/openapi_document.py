"""Checks of the OpenAPI document, against the standard, the Open Inference Protocol and the server's answers.

python openapi_document.py GRPC_ADDRESS REST_ADDRESS
"""

import json
import re
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import checks
import openapi_spec_validator
import yaml
from jsonschema import Draft202012Validator

OIP = yaml.safe_load(Path(__file__).with_name("open_inference_rest.yaml").read_text())
PROTOCOL = {"${MODEL_NAME}": "{model}", "${MODEL_VERSION}": "{version}"}
"""What our document calls the protocol's variables."""
OTHER_NAMES = {
    "metadata_server_response": "ServerMetadata",
    "metadata_model_response": "ModelMetadata",
    "inference_response": "InferResponse",
    "metadata_server_error_response": "Error",
    "inference_error_response": "Error",
}
MODELS = {"MODEL_NAME": "half_plus_two", "MODEL_VERSION": "1"}
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


class Server:
    def __init__(self, address):
        self.url = f"http://{address}"
        self.document = self.get("/openapi.json")[1]

    def get(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.url + path, data) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def validate(document, schema, value):
    """Raise where the value is not what the schema of a document says."""
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def oip_operations():
    for path, methods in OIP["paths"].items():
        for verb, answers in methods.items():
            yield path, verb, answers


async def check_the_document_is_valid(server):
    openapi_spec_validator.validate(server.document)
    assert server.document["openapi"] == "3.1.0"


async def check_schemas_are_valid(server):
    for name, schema in server.document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema, name


async def check_the_open_inference_protocol_is_a_part_of_it(server):
    for path, verb, answers in oip_operations():
        ours = path
        for theirs, name in PROTOCOL.items():
            ours = ours.replace(theirs, name)
        operation = server.document["paths"][ours][verb]
        for status, schema in answers.items():
            response = operation["responses"].get(status, operation["responses"]["default"])
            reference = {"$ref": f"#/components/schemas/{OTHER_NAMES[schema]}"}
            assert response["content"]["application/json"]["schema"] == reference, (path, status)


async def check_what_the_protocol_requires_we_require(server):
    for theirs, ours in OTHER_NAMES.items():
        schema = server.document["components"]["schemas"][ours]
        their = OIP["components"]["schemas"][theirs]
        assert set(their.get("required", ())) <= set(schema["required"]), ours
        assert their["properties"].keys() <= schema["properties"].keys(), ours


async def check_answers_are_what_the_protocol_says(server):
    for path, verb, answers in oip_operations():
        at = re.sub(r"\$\{(\w+)\}", lambda name: MODELS[name[1]], path)
        status, answer = server.get(at, REQUEST if verb == "post" else None)
        assert status == 200, (path, answer)
        if schema := answers.get("200"):
            validate(OIP, {"$ref": f"#/components/schemas/{schema}"}, answer)
        if verb == "post":
            status, answer = server.get(at, {"inputs": []})
            assert status == 400
            validate(OIP, {"$ref": f"#/components/schemas/{answers['400']}"}, answer)


async def check_examples_and_their_answers_are_what_the_document_says(server):
    seen = 0
    for path, methods in server.document["paths"].items():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for example in content.get("examples", {}).values():
                    validate(server.document, content["schema"], example["value"])
                    answers = operation["responses"]["200"]["content"]
                    if "application/json" in answers and "grps" not in path:
                        status, answer = server.get(path, example["value"])
                        assert status == 200, (path, answer)
                        validate(server.document, answers["application/json"]["schema"], answer)
                        seen += 1
    assert seen > 20


@asynccontextmanager
async def subject():
    yield Server(sys.argv[2])


checks.run([sys.modules["__main__"]], subject)
