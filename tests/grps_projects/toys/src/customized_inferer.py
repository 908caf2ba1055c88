"""Inferers of the toy models; those without a converter take and give messages."""

import time
from pathlib import Path

from grps_framework.apis.grps_pb2 import (
    DT_FLOAT16,
    DT_FLOAT32,
    DT_FLOAT64,
    DT_INT64,
    DT_STRING,
    DT_UINT8,
    GenericMapData,
    GenericTensor,
    GenericTensorData,
    GrpsMessage,
)
from grps_framework.context.context import GrpsContext
from grps_framework.logger.logger import clogger
from grps_framework.model_infer.inferer import ModelInferer, inferer_register
from grps_framework.monitor.monitor import app_monitor

PAUSE = 0.1  # A client sees two chunks then, not one.
SLOW = 3.0  # Who calls at the same time is there by then.
FIRST_BYTES, MORE_BYTES = b"\x00\xffab", b"cd"


class Toy(ModelInferer):
    """An inferer that needs no model file."""

    def init(self, path, device=None, args=None):
        super().init(path, device, args)
        clogger.info("%s: path %s, device %s, args %s", type(self).__name__, path, device, args)

    def load(self):
        return True


class EchoInferer(Toy):
    """What came, and one more of the metric `my_count`."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        app_monitor.inc("my_count", 1)
        if context.if_streaming():
            context.stream_respond(inp)
        return inp


class DoubleInferer(Toy):
    """Twice the number; of a batch, with the batch's size beside it."""

    def infer(self, inp, context: GrpsContext):
        return inp * 2

    def batch_infer(self, inp, contexts: list):
        return [f"{number * 2}@{len(inp)}" for number in inp]


class TimesInferer(Toy):
    """Streams the number ten times and a hundred times as large, through the converter."""

    def infer(self, inp, context: GrpsContext):
        context.stream_respond_with_postprocess(inp * 10)
        context.stream_respond_with_postprocess(inp * 100)
        return inp


class SamoyedInferer(Toy):
    """One text, whatever comes."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        return GrpsMessage(str_data="Samoyed")


class TwoTextsInferer(Toy):
    """Two texts, one after the other."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        if context.if_streaming():
            context.stream_respond(GrpsMessage(str_data="stream data 1"))
            time.sleep(PAUSE)
            context.stream_respond(GrpsMessage(str_data="stream data 2"))
        return GrpsMessage(str_data="non-stream")


class TwoBytesInferer(Toy):
    """Two pieces of bytes that are not text, one after the other."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        if context.if_streaming():
            context.stream_respond(GrpsMessage(bin_data=FIRST_BYTES))
            time.sleep(PAUSE)
            context.stream_respond(GrpsMessage(bin_data=MORE_BYTES))
        return GrpsMessage(bin_data=FIRST_BYTES)


class BurstInferer(Toy):
    """Fifty messages without a pause."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        for number in range(50):
            context.stream_respond(GrpsMessage(str_data=str(number)))
        return GrpsMessage()


class FailsLaterInferer(Toy):
    """One message, then an exception."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        context.stream_respond(GrpsMessage(str_data="one"))
        raise ValueError("boom")


class RaiseInferer(Toy):
    """An exception."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        raise ValueError("boom")


class SetErrorInferer(Toy):
    """An error with a text, and data that no client may get."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        context.set_err_msg("my error")
        return inp


class SetFlagInferer(Toy):
    """An error without a text, and data that no client may get."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        context.set_has_err(True)
        return inp


class NoMessageInferer(Toy):
    """What is no message."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        return {"str_data": "x"}


class EmptyInferer(Toy):
    """A message without data."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        return GrpsMessage()


class MapInferer(Toy):
    """One entry and one zero in every map."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        return GrpsMessage(
            gmap=GenericMapData(
                s_s={"text": "中", "none": ""},
                s_b={"bytes": b"\x00\xff"},
                s_i32={"low": -(2**31), "zero": 0},
                s_i64={"high": 2**63 - 1, "zero": 0},
                s_f={"tenth": 0.1},
                s_d={"tenth": 0.1, "infinite": float("-inf")},
            )
        )


class TypesInferer(Toy):
    """Tensors of many types; the last one has nothing set."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        return GrpsMessage(
            gtensors=GenericTensorData(
                tensors=[
                    GenericTensor(name="bytes", dtype=DT_UINT8, shape=[1, 2], flat_uint8=[0, 255]),
                    GenericTensor(name="long", dtype=DT_INT64, shape=[1], flat_int64=[2**53 + 1]),
                    GenericTensor(name="half", dtype=DT_FLOAT16, shape=[2], flat_float16=[0.1, float("inf")]),
                    GenericTensor(name="single", dtype=DT_FLOAT32, shape=[2], flat_float32=[0.1, 3]),
                    GenericTensor(name="double", dtype=DT_FLOAT64, shape=[1], flat_float64=[0.1]),
                    GenericTensor(name="text", dtype=DT_STRING, shape=[1], flat_string=["中"]),
                    GenericTensor(),
                ]
            )
        )


class SlowInferer(Toy):
    """What came, seconds later; where it is streamed, at once, too."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        if context.if_streaming():
            context.stream_respond(inp)
        time.sleep(SLOW)
        return inp


class GatedInferer(Toy):
    """What came, once there is the file that it names."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        while not Path(inp.str_data).exists():
            time.sleep(0.005)  # Nothing tells when there is a file.
        return inp


class SuffixInferer(Toy):
    """Appends a suffix, the argument `sfx`: a node of a DAG."""

    def init(self, path, device=None, args=None):
        super().init(path, device, args)
        self._suffix = args["sfx"]

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        if inp.str_data == "ERR" + self._suffix:
            context.set_err_msg("err in " + self._suffix)
            return None
        if context.if_streaming():
            context.stream_respond(GrpsMessage(str_data="s" + self._suffix))
        return GrpsMessage(str_data=f"{inp.str_data}>{self._suffix}")


class SumInferer(Toy):
    """The sum of the numbers."""

    def infer(self, inp, context: GrpsContext):
        return sum(inp)


class HttpInferer(Toy):
    """HTTP of its own: the parameter `m` says what kind of answer; a stream is three events."""

    def infer(self, inp: GrpsMessage, context: GrpsContext):
        request = context.get_http_request()
        if request is None:
            return inp
        if context.if_streaming():
            for number in (1, 2, 3):
                context.customized_http_stream_respond(f"data: {number}\n\n")
            return None
        return self.answer(request, context)

    def answer(self, request, context: GrpsContext):
        mode = request.args.get("m", "noset")
        if mode == "err":
            context.set_err_msg("my error")
        elif mode == "raise":
            raise ValueError("boom")
        elif mode != "noset":
            body = request.get_data(as_text=True)
            answers = {
                "str": "hi",
                "bytes": FIRST_BYTES,
                "tuple": ('{"a": 1}', 201, {"Content-Type": "application/json", "X-A": "b"}),
                "dict": {"a": 1},
                "info": f"{request.method} {request.path} {request.content_type} {body}",
            }
            context.set_http_response(answers[mode])
        return GrpsMessage()


INFERERS = {
    "echo_inferer": EchoInferer,
    "double_inferer": DoubleInferer,
    "times_inferer": TimesInferer,
    "samoyed_inferer": SamoyedInferer,
    "two_texts_inferer": TwoTextsInferer,
    "two_bytes_inferer": TwoBytesInferer,
    "burst_inferer": BurstInferer,
    "fails_later_inferer": FailsLaterInferer,
    "raise_inferer": RaiseInferer,
    "set_error_inferer": SetErrorInferer,
    "set_flag_inferer": SetFlagInferer,
    "no_message_inferer": NoMessageInferer,
    "empty_inferer": EmptyInferer,
    "map_inferer": MapInferer,
    "types_inferer": TypesInferer,
    "slow_inferer": SlowInferer,
    "gated_inferer": GatedInferer,
    "suffix_inferer": SuffixInferer,
    "sum_inferer": SumInferer,
    "http_inferer": HttpInferer,
}
for name, inferer in INFERERS.items():
    inferer_register.register(name, inferer())
