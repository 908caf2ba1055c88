"""Converters of the toy models."""

import json

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.converter.converter import Converter, converter_register

NO_SUMMANDS = "need key a and b"


class NumberConverter(Converter):
    """A decimal number as a text, in and out."""

    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp: GrpsMessage, context: GrpsContext):
        return int(inp.str_data)

    def postprocess(self, inp, context: GrpsContext) -> GrpsMessage:
        return GrpsMessage(str_data=str(inp))

    def batch_preprocess(self, inps: list, contexts: list):
        return [self.preprocess(inp, context) for inp, context in zip(inps, contexts, strict=True)]

    def batch_postprocess(self, inp, contexts: list):
        return [self.postprocess(out, context) for out, context in zip(inp, contexts, strict=True)]


class SumConverter(Converter):
    """HTTP of its own: two numbers, `a` and `b`, and their sum, `c`."""

    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp: GrpsMessage, context: GrpsContext):
        body = context.get_http_request().get_json()
        if "a" not in body or "b" not in body:
            context.set_err_msg(NO_SUMMANDS)
            context.set_http_response((NO_SUMMANDS, 500, {"Content-Type": "text/plain"}))
            return None
        return float(body["a"]), float(body["b"])

    def postprocess(self, inp, context: GrpsContext) -> GrpsMessage:
        context.set_http_response((json.dumps({"c": inp}), 200, {"Content-Type": "application/json"}))
        return GrpsMessage()


converter_register.register("number_converter", NumberConverter())
converter_register.register("sum_converter", SumConverter())
