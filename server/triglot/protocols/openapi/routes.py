"""Routes of the OpenAPI document, and of the page that shows it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triglot.core.call import Call
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation, Permission
from triglot.model.signature import ModelMetadata
from triglot.protocols.api_operation import NO_CONTENT, OBJECT, STRING, ApiOperation, Schema, json_body
from triglot.protocols.openapi.document import document
from triglot.protocols.pages import PROTOCOL, TOKEN_SCRIPT, page_headers, page_text, readable
from triglot.protocols.rows import Route
from triglot.version import __version__

DOCUMENT, PAGE = "/openapi.json", "/docs"
MLSERVER_PAGES = tuple(f"/v2{of}/docs" for of in ("", "/models/{model}", "/models/{model}/versions/{version}"))
MLSERVER_DOCUMENT = "/v2/docs/dataplane.json"
"""Their paths in MLServer, for clients of KServe V2."""
PAGE_FILE = Path(__file__).with_name("page.html")
MODEL_BYTES = 4096
"""Estimates of a model's text in the document, in bytes."""
COMPRESS_FROM_BYTES = 1024
Models = Sequence[ModelMetadata]


def openapi_routes(
    routes: Sequence[Route],
    models: Callable[[Permission], Models],
    schemas: Mapping[str, Schema],
    server_name: str,
    address: str,
) -> list[Route]:
    """Return `/openapi.json`, which covers these routes and its own, and `/docs`.

    `models` returns the ready models that a client may use. `address` is the server's address in sample code.
    """
    text = page_text(PAGE_FILE, scripts=(TOKEN_SCRIPT,))
    page, headers = text.encode(), page_headers(text)

    async def read(_: HttpRequest, call: Call) -> Models:
        # Workers may have loaded them in different orders, but must return the same document.
        return sorted(models(call.permission), key=lambda model: model.name)

    async def nothing(*_: object) -> None:
        pass

    document_printer = _Document(schemas, {"title": server_name, "version": __version__}, address)
    rows = [
        Route(
            "GET",
            DOCUMENT,
            Operation.METADATA,
            lambda http: http,
            read,
            document_printer.encode,
            answer_size=document_printer.text_size,
            compress_from=COMPRESS_FROM_BYTES,
            protocol=PROTOCOL,
            documented=(ApiOperation("This document", json_body(OBJECT), others={304: NO_CONTENT}),),
        ),
        Route(
            "GET",
            PAGE,
            Operation.PUBLIC,
            lambda http: http,
            nothing,
            lambda *_: HttpResponse(page, content_type="text/html; charset=utf-8", headers=headers),
            compress_from=COMPRESS_FROM_BYTES,
            protocol=PROTOCOL,
            documented=(ApiOperation("This document as a page", {"text/html": STRING}),),
        ),
    ]
    if any(route.protocol == "kserve" for route in routes):
        rows.append(_redirect(MLSERVER_DOCUMENT, DOCUMENT, Operation.METADATA))
        rows += [_redirect(path, PAGE, Operation.PUBLIC) for path in MLSERVER_PAGES]
    own = [row for route in rows for row in readable(route)]
    document_printer.routes = [*routes, *own]
    return own


def _redirect(path: str, to: str, operation: Operation) -> Route:
    """Return a row that leads to another path, relatively: a proxy may have put a prefix before both."""

    async def nothing(*_: object) -> None:
        pass

    headers = {"Location": "../" * (path.count("/") - 1) + to.lstrip("/")}
    response = HttpResponse(b"", 307, content_type="", headers=headers)
    documented = ApiOperation(f"Leads to {to}: MLServer's path", others={307: NO_CONTENT})
    return Route(
        "GET",
        path,
        operation,
        lambda _: None,
        nothing,
        lambda *_: response,
        protocol=PROTOCOL,
        documented=(documented,),
    )


class _Document:
    """Prints the document, and caches it while the same models are ready."""

    def __init__(self, schemas: Mapping[str, Schema], info: Schema, address: str) -> None:
        self.routes: Sequence[Route] = ()
        self._schemas, self._info, self._address = schemas, info, address
        self._cached: tuple[Models, bytes, str] | None = None

    def text_size(self, models: Models) -> int:
        """Estimates how many bytes of text are printed."""
        return 0 if self._cached_for(models) else (len(self.routes) + len(models)) * MODEL_BYTES

    def encode(self, models: Models, http: HttpRequest) -> HttpResponse:
        """Return the document, or 304 if the client has it. May run off the event loop."""
        cached = self._cached_for(models)
        if cached is None:
            content = document(self.routes, models, self._schemas, self._info, self._address)
            text = dumps(content)
            # Weak, since the response may be compressed.
            cached = self._cached = models, text, f'W/"{hashlib.sha256(text).hexdigest()[:32]}"'
        _, text, tag = cached
        headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if _matches(http.headers.get("if-none-match", ""), tag):
            return HttpResponse(b"", 304, content_type="", headers=headers)
        return HttpResponse(text, headers=headers)

    def _cached_for(self, models: Models) -> tuple[Models, bytes, str] | None:
        cached = self._cached
        return cached if cached is not None and _are_same(cached[0], models) else None


def _matches(tags: str, tag: str) -> bool:
    """Whether If-None-Match lists the tag, or any; its comparison is weak."""
    return any(
        candidate.strip().removeprefix("W/") in (tag.removeprefix("W/"), "*") for candidate in tags.split(",")
    )


def _are_same(some: Models, others: Models) -> bool:
    """Whether both are the same objects in the same versions: comparing signatures by value would take long."""
    return len(some) == len(others) and all(
        first.signature is other.signature and _key_of(first) == _key_of(other)
        for first, other in zip(some, others, strict=True)
    )


def _key_of(model: ModelMetadata) -> tuple[Any, ...]:
    return model.name, model.versions, model.platform, model.decoupled, model.signature_name
