"""No converters."""

from grps_framework.converter.converter import converter_register

__all__ = ["converter_register"]
