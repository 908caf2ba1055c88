"""Requests to models of one number, and what their answers say."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from tests.transports.live import Live, request
from triglot.pb.kserve import inference_pb2 as pb

VALUE = struct.Struct("<f")
FINAL, EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
WANTED: dict[str, Any] = {EMPTY_FINAL: True}
Inputs = Mapping[str, Any]


def asking(model: str, value: float = 0, request_id: str = "", **parameters: Any) -> bytes:
    message = pb.ModelInferRequest.FromString(request(model, VALUE.pack(value), request_id=request_id))
    for key, given in parameters.items():
        member = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(given)]
        setattr(message.parameters[key], member, given)
    return message.SerializeToString()


async def sending(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def answers(server: Live, *messages: bytes, **options: Any) -> list[pb.ModelStreamInferResponse]:
    return [response async for response in server.stream_infer(sending(*messages), timeout=30, **options)]


def parameters(answer: pb.ModelStreamInferResponse) -> dict[str, Any]:
    return {
        key: getattr(value, str(value.WhichOneof("parameter_choice")))
        for key, value in answer.infer_response.parameters.items()
    }


def value(answer: pb.ModelStreamInferResponse) -> float:
    found: float = VALUE.unpack(answer.infer_response.raw_output_contents[0])[0]
    return found


def y(number: float) -> dict[str, Any]:
    return {"y": np.array([number], np.float32)}
