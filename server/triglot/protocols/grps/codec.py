"""GrpsMessage bytes ⇄ `Message` (grps 1). Pure functions.

Strategy: the members of a large message's oneof are cut out and decoded one after the other, and merged as
protobuf would, so that their tensors are not parsed with the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import MessageBytes, byte_length
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.generic_tensor import (
    ELEMENT_WORK,
    FEW_FIELDS,
    read_tensor,
    reading_size,
    tensor_of_message,
    tensor_pieces,
    writing_size,
)
from triglot.protocols.grps.message import (
    FAILURE,
    OK,
    Data,
    GrpsMap,
    GrpsTensor,
    Message,
    NDArray,
    Status,
)
from triglot.protocols.grps.tensors import utf8
from triglot.protocols.wire import (
    LENGTH,
    MAX_FIELDS,
    SHORT,
    Limit,
    MessageRules,
    TooManyFields,
    length_prefix,
    limit_error,
    parse,
    read_varint,
    scan,
    serialize,
)

SCAN_FROM_BYTES: Final = 16 * 1024
"""Below this size protobuf parses the whole message: its speed for floats varies much from release to release."""
COPY_WORK: Final = 16
"""Bytes that are copied in the time in which one is parsed."""
MAX_TENSORS: Final = Limit("tensors", 1024)
MOST_TENSORS: Final = Limit("tensors", MAX_FIELDS)
"""Limit for models that take whole messages, too: a tensor of two bytes becomes an object of a hundred."""
TENSORS_FROM_BYTES: Final = 128 * 1024
"""The content of a smaller message cannot take much memory."""
MAX_ENTRIES: Final = Limit("entries in a map", SCAN_FROM_BYTES)
"""More entries than a message below `SCAN_FROM_BYTES` can hold."""
_STATUS: Final = 1
_MODEL: Final = 2
_BIN: Final = 3
_STR: Final = 4
TENSORS: Final = 5
_NDARRAY: Final = 6
_MAP: Final = 7
TENSOR: Final = 1
_MAPS: Final = ("s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d")

_MEMBERS: Final = MessageRules(cut=frozenset({_BIN, _STR, TENSORS, _NDARRAY, _MAP}))
_ALL_FIELDS: Final = MessageRules(cut=_MEMBERS.cut | {_STATUS, _MODEL})
_TENSOR_DATA: Final = MessageRules(cut=frozenset({TENSOR}), repeats={TENSOR: MAX_TENSORS})
_ANY_TENSOR_DATA: Final = MessageRules(cut=frozenset({TENSOR}), repeats={TENSOR: MOST_TENSORS})
_MAP_DATA: Final = MessageRules(repeats=dict.fromkeys(range(1, len(_MAPS) + 1), MAX_ENTRIES))


def model_of(data: MessageBytes) -> str:
    """Return the model that a serialized GrpsMessage names, "" if none; other fields are skipped.

    Raise `InvalidArgument`.
    """
    models = _payloads(data, _MODEL)
    return _text(models[-1], "model") if models else ""


def is_failure(data: MessageBytes) -> bool:
    """Whether the status of a serialized GrpsMessage is FAILURE. Raise `InvalidArgument`."""
    statuses = _payloads(data, _STATUS)
    return bool(statuses) and parse(pb.Status, b"".join(statuses)).status == FAILURE


def _payloads(data: MessageBytes, number: int) -> list[MessageBytes]:
    """Return the payload of each occurrence of the field `status` or `model`."""
    wanted = number << 3 | LENGTH
    found: list[MessageBytes] = []
    at, end = 0, len(data)
    for _ in range(MAX_FIELDS + 1):
        if at == end:
            return found
        tag = data[at]
        if tag & 0x87 != LENGTH or tag == LENGTH:
            # A field type that GrpsMessage does not have: not sent by ordinary clients.
            return [payload for cut, payload in scan(data, _ALL_FIELDS)[1] if cut == number]
        length, start = read_varint(data, at + 1, end, SHORT)
        at = start + length
        if at > end:
            raise InvalidArgument(
                f"the request is not a valid protobuf message: field {tag >> 3} extends beyond the end"
            )
        if tag == wanted:
            found.append(data[start:at])
    raise TooManyFields(f"the request has more than {MAX_FIELDS} protobuf fields")


def check_tensors(data: MessageBytes) -> None:
    """Raise `InvalidArgument` for a large message that has too many tensors, or is damaged."""
    if len(data) <= TENSORS_FROM_BYTES:
        return
    tensors = 0
    for number, payload in scan(data, _MEMBERS)[1]:
        if number == TENSORS:
            tensors += len(scan(payload, _ANY_TENSOR_DATA, MAX_FIELDS + 1)[1])
            if tensors > MOST_TENSORS.count:
                raise limit_error(MOST_TENSORS)


def _text(payload: bytes | memoryview, what: str) -> str:
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the request is not a valid grps.protos.v1.GrpsMessage: {what} is not UTF-8 text: {error}"
        ) from None


def decode_message(data: bytes | memoryview) -> Message:
    """Return the message of `data`; packed floats of a large one are views of `data`.

    Raise `InvalidArgument`.
    """
    if len(data) < SCAN_FROM_BYTES:
        message = parse(pb.GrpsMessage, bytes(data))
        return Message(message.model, _data_of(message), _status_of(message))
    rest, members = scan(data, _MEMBERS)
    message = parse(pb.GrpsMessage, rest)
    return Message(message.model, _merge(members), _status_of(message))


def decode_answer(data: MessageBytes) -> Message:
    """Decode as `decode_message`, but a model's own message, to which no limits apply."""
    try:
        return decode_message(data)
    except InvalidArgument:
        message = parse(pb.GrpsMessage, data)
        return Message(message.model, _data_of(message, limited=False), _status_of(message))


def _status_of(message: pb.GrpsMessage) -> Status | None:
    if not message.HasField("status"):
        return None
    status = message.status
    return Status(status.code, status.msg, status.status)


def _data_of(message: pb.GrpsMessage, *, limited: bool = True) -> Data:
    member = message.WhichOneof("data_oneof")
    if member == "gtensors":
        tensors = message.gtensors.tensors
        if limited and len(tensors) > MAX_TENSORS.count:
            raise limit_error(MAX_TENSORS)
        return [tensor_of_message(tensor, limited=limited) for tensor in tensors]
    if member == "gmap":
        return _map_of(message.gmap)
    if member == "ndarray":
        return NDArray()
    if member == "str_data":
        return message.str_data
    return message.bin_data if member == "bin_data" else None


def _map_of(message: pb.GenericMapData) -> GrpsMap:
    return GrpsMap(*[dict(getattr(message, name)) for name in _MAPS])


def _merge(members: list[tuple[int, memoryview]]) -> Data:
    """Return the oneof's final value: its last member, merged with the same member directly before it.

    The others are decoded as well, because protobuf would reject a damaged one.
    """
    data: Data = None
    last = tensors = 0
    for number, payload in members:
        if number != last:
            data, last = None, number
        if number == TENSORS:
            read = _read_tensors(payload)
            tensors += len(read)
            if tensors > MAX_TENSORS.count:
                raise limit_error(MAX_TENSORS)
            data = data + read if isinstance(data, list) else read
        elif number == _MAP:
            data = _read_map(payload, data if isinstance(data, GrpsMap) else GrpsMap())
        elif number == _NDARRAY:
            parse(pb.NDArrayData, bytes(payload))
            data = NDArray()
        else:
            # Copied: these are kept as objects of their own.
            data = _text(payload, "str_data") if number == _STR else bytes(payload)
    return data


def _read_tensors(data: memoryview) -> list[GrpsTensor]:
    rest, tensors = scan(data, _TENSOR_DATA)
    if rest:
        parse(pb.GenericTensorData, rest)
    return [read_tensor(tensor) for _, tensor in tensors]


def _read_map(data: memoryview, into: GrpsMap) -> GrpsMap:
    fields, _ = scan(data, _MAP_DATA)
    read = _map_of(parse(pb.GenericMapData, fields))
    for name in _MAPS:
        entries = getattr(into, name)
        entries.update(getattr(read, name))
        if len(entries) > MAX_ENTRIES.count:
            raise limit_error(MAX_ENTRIES)
    return into


def decoding_size(data: MessageBytes) -> int:
    """Estimates what `decode_message` processes besides packed floats, in bytes of text.

    A message of many fields, or a damaged one, counts as text: the estimate must not read each of them.
    """
    try:
        rest, members = scan(data, _MEMBERS, FEW_FIELDS)
        return len(rest) + sum([_member_size(number, payload) for number, payload in members])
    except InvalidArgument:
        return len(data)


def _member_size(number: int, payload: memoryview) -> int:
    if number == TENSORS:
        return sum([reading_size(tensor) for _, tensor in scan(payload, _TENSOR_DATA, FEW_FIELDS)[1]])
    return len(payload) if number == _MAP else len(payload) // COPY_WORK


def encode_message(message: Message) -> bytes:
    """Return a serialized GrpsMessage, copied once from the floats' memory.

    Raise `InvalidArgument` for a string that UTF-8 cannot encode.
    """
    pieces: list[Any] = []
    if message.status is not None:
        pieces.append(SUCCESS_FIELD if message.status == OK else _status_field(message.status))
    if message.model:
        pieces += _field(_MODEL, [utf8(message.model, "model")])
    pieces += _member(message.data)
    return b"".join(pieces)


def _field(number: int, pieces: Sequence[Any]) -> list[Any]:
    return [length_prefix(number, sum(map(byte_length, pieces))), *pieces]


def _member(data: Data) -> list[Any]:
    """Return the oneof's member in pieces to join, even if it is empty."""
    if data is None:
        return []
    if isinstance(data, list):
        return _field_of_tensors(data)
    if isinstance(data, str):
        return _field(_STR, [utf8(data, "str_data")])
    if isinstance(data, GrpsMap):
        return _field(_MAP, [_encode_map(data)])
    return _field(_NDARRAY, []) if isinstance(data, NDArray) else _field(_BIN, [data])


def _field_of_tensors(tensors: list[GrpsTensor]) -> list[Any]:
    size = 0
    pieces: list[Any] = [b""]
    for tensor in tensors:
        head, elements = tensor_pieces(tensor)
        tensor_size = len(head) + byte_length(elements)
        prefix = length_prefix(TENSOR, tensor_size)
        size += len(prefix) + tensor_size
        pieces += prefix, head, elements
    pieces[0] = length_prefix(TENSORS, size)
    return pieces


def _encode_map(data: GrpsMap) -> bytes:
    maps = {name: getattr(data, name) for name in _MAPS}
    try:
        return serialize(pb.GenericMapData(**maps))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"gmap has a string that is not Unicode text: {error}") from None


def encoding_size(message: Message) -> int:
    """Estimates what `encode_message` processes besides floats, in bytes of text."""
    data = message.data
    if isinstance(data, list):
        return writing_size(data[0]) if len(data) == 1 else sum([writing_size(tensor) for tensor in data])
    if isinstance(data, GrpsMap):
        return sum([len(getattr(data, name)) for name in _MAPS]) * ELEMENT_WORK
    return len(data) // COPY_WORK if isinstance(data, str | bytes) else 0


def _status_field(status: Status) -> bytes:
    message = pb.Status(code=status.code, msg=status.msg, status=status.status)  # type: ignore[arg-type]  # Any number.
    return serialize(pb.GrpsMessage(status=message))


SUCCESS_FIELD: Final = _status_field(OK)


def with_success(data: bytes) -> bytes:
    """Return a serialized GrpsMessage with the status 200, "OK" and SUCCESS, whatever its status was.

    Of repeated statuses the last one overrides the fields that it sets, and this one sets all three.
    """
    return data + SUCCESS_FIELD


def failure(code: int, msg: str) -> bytes:
    """Return a serialized GrpsMessage with just a status of FAILURE. Lone surrogates in `msg` are replaced."""
    return _status_field(Status(code, msg.encode(errors="replace").decode(), FAILURE))
