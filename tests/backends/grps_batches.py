"""What tests of a project's batches share: odd models, and a window that is never over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.backends.grps_folders import entry, write_project
from triglot.backends.grps.settings import ProjectSettings

NEVER = 10_000_000
"""Microseconds of a window that no test waits for: the batch fills up before."""
ODD = """
class Odd(Base):
    def infer(self, inp, context):
        raise AssertionError

    def batch_infer(self, inps, contexts):
        texts = [inp.str_data for inp in inps]
        for text, context in zip(texts, contexts):
            if text.startswith("err"):
                context.set_err_msg(text)
            if text == "raise":
                raise ValueError("boom")
            if text == "exit":
                raise SystemExit("gone")
        outs = [GrpsMessage(str_data=f"{text}@{len(texts)}") for text in texts]
        if "more" in texts:
            outs.append(GrpsMessage())
        if "none" in texts:
            return None
        if "fewer" in texts:
            return outs[: len(outs) // 2]
        return tuple(outs)


inferer_register.register("inferer", Odd())
"""
SIZES = """
class Sizes(Base):
    def infer(self, inp, context):
        raise AssertionError("batched models are called in batches")

    def batch_infer(self, inps, contexts):
        assert all(context.inferer is self for context in contexts)
        return [GrpsMessage(str_data=f"{inp.str_data}@{len(inps)}") for inp in inps]


inferer_register.register("inferer", Sizes())
"""
"""Tells how many were in the batch."""
DOUBLES = """
ran = []


class Doubles(Base):
    def infer(self, inp, context):
        raise AssertionError("batched models are called in batches")

    def batch_infer(self, inps, contexts):
        ran.append(inps)
        return [2 * inp for inp in inps]


inferer_register.register("inferer", Doubles())
"""
SINGLE = """
class Single(Base):
    def infer(self, inp, context):
        return inp


inferer_register.register("inferer", Single())
"""
STREAMS = """
gate, sent = threading.Event(), threading.Semaphore(0)


class Streams(Base):
    def infer(self, inp, context):
        raise AssertionError

    def batch_infer(self, inps, contexts):
        for inp, context in zip(inps, contexts):
            context.stream_respond(GrpsMessage(str_data=f"{inp.str_data}1"))
            context.stream_respond(GrpsMessage(str_data=f"{inp.str_data}2"), final=inp.str_data == "f")
        sent.release()
        assert gate.wait(30)
        for context in contexts:
            context.stream_respond(GrpsMessage(str_data="end"))
        if any(inp.str_data == "r" for inp in inps):
            raise ValueError("boom")
        return inps


inferer_register.register("inferer", Streams())
"""
"""Answers each request twice, and once more when the test lets it; what is final then gets no more."""
NEXT = """
class Next(Base):
    def infer(self, inp, context):
        return inp


inferer_register.register("next", Next())
"""


def in_dag(folder: Path, code: str, model: dict[str, Any], **keys: Any) -> ProjectSettings:
    """A project whose DAG has the batched model, and one that hands on what it gets."""
    models = [model, entry("next", inferer_name="next")]
    return write_project(folder, code + NEXT, models=models, nodes=["m-1.0.0", "next-1.0.0"], **keys)
