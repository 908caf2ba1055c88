"""The OpenAPI 3.1 document: rows and ready models → JSON values. Pure functions.

Strategy: each row declares its operations, and may add some for each model. The rest follows from the row: the
path and its variables, the method, the group. A row without operations only rejects unmatched requests, and is not
in the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from triglot.core.fast_json import dumps
from triglot.model.signature import ModelMetadata
from triglot.protocols.api_operation import AI_PLATFORM, JSON, ApiOperation, Content, Schema
from triglot.protocols.rows import Route

OPENAPI = "3.1.0"
ANY_METHOD = "*"
TAGS = {
    "kserve": "KServe V2",
    "tfserving": "TensorFlow Serving",
    "grps": "grps",
    "mlflow": "MLflow",
    "traffic": "Traffic",
    "monitor": "Monitor",
}
"""Names of groups, by a row's protocol, unless the operation has its own."""
ORDER = ("KServe V2", "TensorFlow Serving", AI_PLATFORM, "grps", "MLflow", "Traffic", "Monitor")
"""Order of the groups."""
_VARIABLES: Mapping[str, Schema] = {
    "model": {"schema": {"type": "string"}, "description": "Name of the model"},
    "version": {"schema": {"type": "string"}, "description": "Number of the version; in KServe V2 also its name"},
    "label": {"schema": {"type": "string"}, "description": "Label of a version"},
    "repository": {"schema": {"type": "string"}, "description": "Name of a repository; none is known"},
    "region": {"schema": {"type": "string"}, "description": "Name of the region"},
    "project": {"schema": {"type": "string"}, "description": "Any name"},
}
"""Descriptions of path variables."""
_ANY_VARIABLE: Schema = {"schema": {"type": "string"}}
_VARIABLE = re.compile(r"\{([_a-zA-Z][_a-zA-Z0-9]*)(?::[^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}")
_WITHOUT_BODY = ("get", "head")
_NON_WORD = re.compile(r"[^0-9a-zA-Z]+")
_REFERENCE = re.compile(rb'"#/components/schemas/([^"]+)"')


def document(
    routes: Iterable[Route],
    models: Sequence[ModelMetadata],
    schemas: Mapping[str, Schema],
    info: Schema,
    server: str,
) -> dict[str, Any]:
    """Return the document. `schemas`: those that operations refer to; `server`: the address in sample code."""
    paths: dict[str, dict[str, Any]] = {}
    tags: set[str] = set()
    ids: set[str] = set()
    for route in routes:
        verb = "get" if route.verb == ANY_METHOD else route.verb.lower()
        for operation in _operations(route, models, server):
            path = paths.setdefault(operation.path, {})
            if verb in path:
                continue  # Of several rows for the same requests, the first one is served.
            tag = operation.tag or TAGS.get(route.protocol, route.protocol)
            tags.add(tag)
            path[verb] = {
                "operationId": _unique(f"{verb}_{_NON_WORD.sub('_', operation.path).strip('_')}", ids),
                "tags": [tag],
                **_printed(operation, models, verb),
            }
    return {
        "openapi": OPENAPI,
        "info": info,
        "tags": [{"name": tag} for tag in sorted(tags, key=_order)],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": _referred(paths, schemas)},
    }


def _order(tag: str) -> tuple[int, str]:
    return (ORDER.index(tag) if tag in ORDER else len(ORDER)), tag


def _operations(route: Route, models: Sequence[ModelMetadata], server: str) -> Iterator[ApiOperation]:
    """Yield a route's operations with paths in OpenAPI's form; those of single models have no variables."""
    made = [] if route.of_model is None else [route.of_model(model, server) for model in models]
    of_models = [operation for operation in made if operation is not None]
    examples: dict[str, Any] = {}
    for operation in of_models:
        if not operation.path:
            examples |= operation.examples
    for operation in route.documented:
        path = _VARIABLE.sub(r"{\1}", operation.path or route.path)
        yield replace(operation, path=path, examples={**operation.examples, **examples})
    yield from (operation for operation in of_models if operation.path)


def _unique(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _printed(operation: ApiOperation, models: Sequence[ModelMetadata], verb: str) -> dict[str, Any]:
    is_head = verb == "head"
    answers = {"200": operation.answer, **{str(status): schema for status, schema in operation.others.items()}}
    responses = {
        status: _body(HTTPStatus(int(status)).phrase, {} if is_head else content)
        for status, content in answers.items()
    }
    responses["default"] = _body("Error", {} if is_head else operation.error)
    printed: dict[str, Any] = {"summary": operation.summary}
    if operation.description:
        printed["description"] = operation.description
    others = (parameter for parameter in operation.parameters if parameter["in"] != "path")
    if parameters := [*_path_parameters(operation, models), *others]:
        printed["parameters"] = parameters
    if operation.request and verb not in _WITHOUT_BODY:
        printed["requestBody"] = {
            "required": operation.body_required,
            "content": _content(operation.request, operation.examples),
        }
    printed["responses"] = responses
    if operation.model:
        printed["x-model"] = operation.model
    if operation.code:
        printed["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": operation.code}]
    return printed


def _path_parameters(operation: ApiOperation, models: Sequence[ModelMetadata]) -> Iterator[dict[str, Any]]:
    special = {parameter["name"]: parameter for parameter in operation.parameters if parameter["in"] == "path"}
    for name in _VARIABLE.findall(operation.path):
        parameter = {"name": name, "in": "path", "required": True, **_VARIABLES.get(name, _ANY_VARIABLE)}
        if name == "model" and models:
            parameter["example"] = models[0].name
        yield {**parameter, **special.get(name, {})}


def _body(description: str, content: Content) -> dict[str, Any]:
    return {"description": description, **({"content": _content(content, {})} if content else {})}


def _content(content: Content, examples: Mapping[str, Any]) -> dict[str, Any]:
    printed: dict[str, Any] = {kind: {"schema": schema} for kind, schema in content.items()}
    if examples:
        printed[JSON]["examples"] = {name: {"value": value} for name, value in examples.items()}
    return printed


def _referred(paths: Mapping[str, Any], schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schemas that are used, by name."""
    used: dict[str, Schema] = {}
    new = _names_in(paths)
    while new:
        used |= {name: schemas[name] for name in new}
        new = {name for schema in new for name in _names_in(schemas[schema])} - used.keys()
    return dict(sorted(used.items()))


def _names_in(values: Any) -> set[str]:
    return {name.decode() for name in _REFERENCE.findall(dumps(values))}
