"""The project's own test: the default model, and one with a converter."""

# ruff: noqa: PT009 - asserted as unittest has it

import unittest

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.test import GrpsTest
from src.customized_converter import converter_register
from src.customized_inferer import inferer_register


class MyTestCase(GrpsTest):
    def test_infer(self):
        self.assertGreater(len(converter_register.converter_dict), 0)
        self.assertGreater(len(inferer_register.model_inferer_dict), 0)

        self.test_init()

        context = GrpsContext()
        answer = self.executor.infer(GrpsMessage(str_data="hello grps"), context)
        self.assertFalse(context.has_err(), context.get_err_msg())
        self.assertEqual(answer.str_data, "hello grps")

        context = GrpsContext()
        answer = self.executor.infer(GrpsMessage(str_data="21"), context, "double-1.0.0")
        self.assertFalse(context.has_err(), context.get_err_msg())
        self.assertEqual(answer.str_data, "42")


if __name__ == "__main__":
    suite = unittest.TestSuite()
    suite.addTest(MyTestCase("test_infer"))
    runner = unittest.TextTestRunner()
    runner.run(suite)
