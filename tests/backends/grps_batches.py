"""What tests of a project's batches share: odd models, and a window that is never over."""

from __future__ import annotations

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
SINGLE = """
class Single(Base):
    def infer(self, inp, context):
        return inp


inferer_register.register("inferer", Single())
"""
