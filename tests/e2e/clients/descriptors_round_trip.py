"""Fill a client's messages, and let our classes read them and write them again; then the other way round.

    python descriptors_round_trip.py OUR_MODULE… -- THEIR_MODULE…

Every message that one of our modules declares and the client has too is tried, with all of its fields set. Prints
the number of fields that were set in each message, by the message's full name, as one JSON object.
"""

import importlib
import itertools
import json
import sys

from google.protobuf import descriptor_pool, message_factory, text_format

DEPTH = 4


def scalars(field):
    """Values for a field of this type, of which the last is for a field that holds one."""
    if field.type == field.TYPE_BYTES:
        return [b"", b"\xff\0%d" % field.number]
    if field.enum_type:
        numbers = [value.number for value in field.enum_type.values]
        return [numbers[0], numbers[-1]]
    return {
        field.CPPTYPE_BOOL: [False, True],
        field.CPPTYPE_STRING: ["", f"é{field.number}"],
        field.CPPTYPE_FLOAT: [0.0, float("-inf"), field.number + 0.5],
        field.CPPTYPE_DOUBLE: [0.0, float("-inf"), field.number + 0.5],
        field.CPPTYPE_INT32: [0, field.number, -(2**31)],
        field.CPPTYPE_INT64: [0, field.number, -(2**63)],
        field.CPPTYPE_UINT32: [0, field.number, 2**32 - 1],
        field.CPPTYPE_UINT64: [0, field.number, 2**64 - 1],
    }[field.cpp_type]


def is_map(field):
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def set_field(message, field, choice, depth):
    """Give a field values, two of them where it can hold many. Return the number of fields set."""
    target = getattr(message, field.name)
    if is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            target.update(zip(scalars(key), scalars(value), strict=False))
            return 1
        return 1 + sum(fill(target[name], value.message_type, choice, depth - 1) for name in scalars(key))
    if field.message_type is None:
        if hasattr(target, "extend"):
            target.extend(scalars(field))
        else:
            setattr(message, field.name, scalars(field)[-1])
        return 1
    if hasattr(target, "add"):
        return 1 + sum(fill(target.add(), field.message_type, choice, depth - 1) for _ in range(2))
    target.SetInParent()
    return 1 + fill(target, field.message_type, choice, depth - 1)


OWN_FIELDS = 1000
"""Number from which on fields are Triglot's own, which no client knows."""


def fill(message, descriptor, choice, depth=DEPTH):
    """Set all fields that `descriptor` has, down to `depth` messages within messages. Return their number.

    Of a oneof, the field number `choice` is set, counted round. Fields of Triglot are omitted.
    """
    if depth < 0:
        return 0
    count = 0
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if field.number < OWN_FIELDS and (oneof is None or oneof.fields[choice % len(oneof.fields)] is field):
            count += set_field(message, field, choice, depth)
    return count


def written(message):
    return message.SerializeToString(deterministic=True)


def choices(descriptor):
    """The numbers that reach every field of every oneof in reach."""
    sizes, waiting, seen = [1], [descriptor], set()
    while waiting:
        found = waiting.pop()
        if found.full_name not in seen:
            seen.add(found.full_name)
            sizes += [len(oneof.fields) for oneof in found.oneofs]
            waiting += [field.message_type for field in found.fields if field.message_type]
    return range(max(sizes))


def compare(ours, theirs):
    """Both classes write the same when the fields that ours declares are set, and read each other's.

    Return the number of fields set.
    """
    count = 0
    for choice in choices(ours.DESCRIPTOR):
        sent = theirs()
        count += fill(sent, ours.DESCRIPTOR, choice)
        received = ours.FromString(written(sent))
        assert written(received) == written(sent), ours.DESCRIPTOR.full_name
        assert theirs.FromString(written(received)) == sent, ours.DESCRIPTOR.full_name
        # The texts have the names, and leave out what is unknown.
        assert text_format.MessageToString(received) == text_format.MessageToString(sent)
        made = ours()
        fill(made, ours.DESCRIPTOR, choice)
        assert made == received, ours.DESCRIPTOR.full_name
    return count


def keep_unknown(ours, theirs):
    """Fields that only the client declares come through our class unharmed."""
    sent = theirs()
    fill(sent, theirs.DESCRIPTOR, 0, depth=2)
    assert theirs.FromString(written(ours.FromString(written(sent)))) == sent, theirs.DESCRIPTOR.full_name


def with_nested(messages):
    for message in messages:
        if not message.GetOptions().map_entry:
            yield message
            yield from with_nested(message.nested_types)


def main(*arguments):
    split = arguments.index("--")
    files = [importlib.import_module(name).DESCRIPTOR for name in arguments[:split]]
    for name in arguments[split + 1 :]:
        importlib.import_module(name)
    counts = {}
    for ours in with_nested(itertools.chain(*(file.message_types_by_name.values() for file in files))):
        try:
            theirs = descriptor_pool.Default().FindMessageTypeByName(ours.full_name)
        except KeyError:
            continue
        classes = [message_factory.GetMessageClass(descriptor) for descriptor in (ours, theirs)]
        counts[ours.full_name] = compare(*classes)
        keep_unknown(*classes)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
