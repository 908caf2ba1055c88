"""Print what generated protobuf modules declare, as one JSON object of short texts.

    python descriptors_dump.py MODULE…

Runs in any environment that has protobuf and the modules, so that environments can be compared.
"""

import importlib
import json
import sys

from google.protobuf import descriptor_pb2


def field_text(field, proto):
    """A field in one line; `proto` is the same as a message, whose label every protobuf release has."""
    words = []
    if proto.label == proto.LABEL_REPEATED:
        words.append("repeated")
    words.append(proto.Type.Name(proto.type).removeprefix("TYPE_").lower())
    if field.message_type or field.enum_type:
        words.append((field.message_type or field.enum_type).full_name)
    words += [field.name, f"json={field.json_name}"]
    if field.containing_oneof:
        words.append(f"oneof={field.containing_oneof.name}")
    if field.has_presence:
        words.append("presence")
    return " ".join(words)


def enum_texts(enum):
    yield enum.full_name, "enum"
    for value in enum.values:
        yield f"{enum.full_name}:{value.name}", str(value.number)


def message_texts(message):
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    yield message.full_name, "map entry" if proto.options.map_entry else "message"
    for field in proto.field:
        yield f"{message.full_name}:{field.number}", field_text(message.fields_by_number[field.number], field)
    for enum in message.enum_types:
        yield from enum_texts(enum)
    for nested in message.nested_types:
        yield from message_texts(nested)


def service_texts(service):
    proto = descriptor_pb2.ServiceDescriptorProto()
    service.CopyToProto(proto)
    yield service.full_name, "service"
    for rpc in proto.method:
        request = ("stream " if rpc.client_streaming else "") + rpc.input_type.removeprefix(".")
        response = ("stream " if rpc.server_streaming else "") + rpc.output_type.removeprefix(".")
        yield f"{service.full_name}/{rpc.name}", f"{request} -> {response}"


def file_texts(file):
    for enum in file.enum_types_by_name.values():
        yield from enum_texts(enum)
    for message in file.message_types_by_name.values():
        yield from message_texts(message)
    for service in file.services_by_name.values():
        yield from service_texts(service)


if __name__ == "__main__":
    texts = {}
    for name in sys.argv[1:]:
        texts.update(file_texts(importlib.import_module(name).DESCRIPTOR))
    print(json.dumps(texts))
