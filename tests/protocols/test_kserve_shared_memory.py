"""Which shared memory can be registered, and what the calls for it say (spec 3.10)."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import triglot
from tests.protocols.kserve_served import Served, serve_models
from tests.protocols.tensor_places import PREFIX, SHM, Memory, memory, post, register, unregister
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.regions import MAX_REGIONS, RESERVED

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOTH = pytest.mark.parametrize("interface", ["grpc", "rest"])
FINE = (Code.OK, "")
PAGE = 4096
CLOSED = "system shared memory is disabled; enable it with the server's option shared_memory_prefix"
SYSTEM, CUDA = "System", "Cuda"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> AsyncIterator[Served]:
    async with serve_models([], shared_memory_prefix=PREFIX) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(opened: Served) -> AsyncIterator[Served]:
    """With nothing registered, before and after."""
    assert await status(opened) == (Code.OK, [])
    yield opened
    assert await unregister(opened) == FINE


@pytest.fixture
def made() -> Iterator[Memory]:
    with memory(PAGE) as region:
        yield region


async def status(
    served: Served, name: str = "", *, interface: str = "grpc", kind: str = SYSTEM
) -> tuple[Code, Any]:
    """The regions in the form of REST, or the text of the error."""
    if interface == "rest":
        region = f"/region/{name}" if name else ""
        number, _, reply = await served.rest.call("GET", f"/v2/{kind.lower()}sharedmemory{region}/status")
        answer = json.loads(reply)
        return (Code.OK, answer) if number == 200 else ({404: Code.NOT_FOUND}[number], answer["error"])
    request = pb.SystemSharedMemoryStatusRequest(name=name)
    code, text, reply = await served.grpc.call(f"{kind}SharedMemoryStatus", request.SerializeToString())
    if code is not Code.OK:
        return code, text
    regions = pb.SystemSharedMemoryStatusResponse.FromString(reply).regions
    assert all(key == region.name for key, region in regions.items())
    fields = ("name", "key", "offset", "byte_size")
    return code, [{field: getattr(region, field) for field in fields} for region in regions.values()]


def open_objects(part: str = PREFIX) -> int:
    """How many file descriptors of this process are of shared memory with this in its key."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The one that lists them is gone.
            count += part in str(descriptor.readlink())
    return count


async def names_of(served: Served) -> list[str]:
    _, _, reply = await served.rest.call("GET", "/v2")
    return list(json.loads(reply)["extensions"])


@BOTH
async def test_shared_memory_is_closed_unless_it_is_opened(interface: str, made: Memory) -> None:
    async with serve_models([]) as served:
        unimplemented = (Code.UNIMPLEMENTED, CLOSED)
        assert await register(served, "r", made, PAGE, interface=interface) == unimplemented
        assert await unregister(served, interface=interface) == unimplemented
        assert await unregister(served, "r", interface=interface) == unimplemented
        assert await status(served, interface=interface) == (Code.OK, [])
        assert (await status(served, "r", interface=interface))[0] is Code.NOT_FOUND
        assert not any("shared_memory" in name for name in await names_of(served))


async def test_only_what_works_is_named(served: Served) -> None:
    names = await names_of(served)
    assert "system_shared_memory" in names
    assert "cuda_shared_memory" not in names


@BOTH
async def test_a_region_is_registered_until_it_is_not(interface: str, served: Served, made: Memory) -> None:
    assert await register(served, "a", made, 96, 32, interface=interface) == FINE
    assert await register(served, "b", made, PAGE, interface=interface) == FINE
    a = {"name": "a", "key": made.key, "offset": 32, "byte_size": 96}
    b = {"name": "b", "key": made.key, "offset": 0, "byte_size": PAGE}
    code, regions = await status(served, interface=interface)
    assert (code, sorted(regions, key=lambda region: str(region["name"]))) == (Code.OK, [a, b])
    assert await status(served, "a", interface=interface) == (Code.OK, [a])
    assert await unregister(served, "a", interface=interface) == FINE
    assert await unregister(served, "a", interface=interface) == FINE
    assert await status(served, interface=interface) == (Code.OK, [b])
    unknown = "Unable to find system shared memory region: 'a'"
    assert await status(served, "a", interface=interface) == (Code.NOT_FOUND, unknown)
    for _ in range(2):
        assert await unregister(served, interface=interface) == FINE
        assert await status(served, interface=interface) == (Code.OK, [])


async def test_a_name_that_is_taken(served: Served, made: Memory) -> None:
    text = "shared memory region 'a' already in manager"
    assert await register(served, "a", made, 8) == FINE
    assert await register(served, "a", made, 16) == (Code.ALREADY_EXISTS, text)
    assert await register(served, "a", made, 16, interface="rest") == (Code.INVALID_ARGUMENT, text)
    assert (await status(served, "a"))[1][0]["byte_size"] == 8


async def test_a_key_may_lack_its_slash(served: Served, made: Memory) -> None:
    """Many clients leave it out, as glibc's shm_open lets them."""
    assert await register(served, "a", made.key[1:], PAGE) == FINE
    assert (await status(served, "a"))[1][0]["key"] == made.key[1:]


@BOTH
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("", "key: expected '/NAME', got ''"),
        ("/", "key: expected '/NAME', got '/'"),
        ("/.", "key: expected '/NAME', got '/.'"),
        ("..", "key: expected '/NAME', got '..'"),
        ("/../etc/passwd", "key: expected '/NAME', got "),
        (f"/{PREFIX}x", "key: expected '/NAME', got "),
        (f"{PREFIX}/x", "key: expected '/NAME', got "),
        ("/another", f"key: expected one that begins with '{PREFIX}', the server's shared_memory_prefix, got"),
        (PREFIX[:-1], f"key: expected one that begins with '{PREFIX}', the server's shared_memory_prefix, got"),
        (f"{PREFIX}nothing", f"Unable to open shared memory region: '{PREFIX}nothing'"),
        (f"{PREFIX}\0", "Unable to open shared memory region: "),
        (PREFIX + 300 * "x", "Unable to open shared memory region: "),
    ],
)
async def test_keys_that_are_refused(interface: str, key: str, text: str, served: Served) -> None:
    code, found = await register(served, "a", key, 8, interface=interface)
    assert code is Code.INVALID_ARGUMENT
    assert found.startswith(f"failed to register shared memory region 'a': {text}")
    assert await status(served) == (Code.OK, [])


@BOTH
@pytest.mark.parametrize("prefix", RESERVED)
@pytest.mark.parametrize("slash", ["/", ""])
async def test_keys_of_others_are_refused(interface: str, prefix: str, slash: str, served: Served) -> None:
    """In Triton's words."""
    key = f"{slash}{prefix[1:]}0"
    assert await register(served, "a", key, 8, interface=interface) == (
        Code.INVALID_ARGUMENT,
        f"cannot register shared memory region 'a' with key '{key}' as the key contains the reserved prefix "
        f"'{prefix[1:]}'",
    )


async def test_reserved_keys_are_refused_where_any_key_is_allowed(made: Memory) -> None:
    async with serve_models([], shared_memory_prefix="/") as served:
        for reserved in RESERVED:
            with memory(PAGE, prefix=reserved) as other:
                code, text = await register(served, "a", other, 8)
                assert (code, "reserved prefix" in text) == (Code.INVALID_ARGUMENT, True)
        assert await register(served, "a", made, 8) == FINE


def link(path: Path, made: Memory) -> None:
    path.symlink_to(made.path)


def pipe(path: Path, _: Memory) -> None:
    os.mkfifo(path)


def folder(path: Path, _: Memory) -> None:
    path.mkdir()


def unreadable_socket(path: Path, _: Memory) -> None:
    import socket  # noqa: PLC0415 - for this kind of file only.

    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("make", [link, pipe, folder, unreadable_socket])
async def test_what_is_no_memory(make: Any, served: Served, made: Memory) -> None:
    """One text for all of them: a client need not know which exist."""
    other = Memory(f"{PREFIX}{make.__name__}{os.getpid()}")
    make(other.path, made)
    try:
        text = f"failed to register shared memory region 'a': Unable to open shared memory region: '{other.key}'"
        assert await register(served, "a", other, 8) == (Code.INVALID_ARGUMENT, text)
    finally:
        other.path.rmdir() if other.path.is_dir() else other.path.unlink()
    assert not open_objects(other.key)
    assert not (SHM / other.key[1:]).exists()


HUGE = 2**64 - 1


@BOTH
@pytest.mark.parametrize(
    ("size", "offset"),
    [(PAGE + 1, 0), (PAGE, 1), (1, PAGE), (HUGE, 0), (1, HUGE), (HUGE, HUGE), (2**63, 2**63), (HUGE, 2)],
)
async def test_what_is_beyond_the_end(
    interface: str, size: int, offset: int, served: Served, made: Memory
) -> None:
    code, text = await register(served, "a", made, size, offset, interface=interface)
    assert (code, text) == (
        Code.INVALID_ARGUMENT,
        f"failed to register shared memory region 'a': invalid args: byte_size {size} at offset {offset} exceeds "
        f"the end of '{made.key}', which has {PAGE} bytes",
    )
    assert made.path.stat().st_size == PAGE


@BOTH
async def test_a_region_of_nothing(interface: str, served: Served, made: Memory) -> None:
    text = "failed to register shared memory region 'a': invalid args: byte_size: expected at least 1, got 0"
    assert await register(served, "a", made, 0, interface=interface) == (Code.INVALID_ARGUMENT, text)


async def test_names_that_are_refused(served: Served, made: Memory) -> None:
    for name in ("", "x" * 256):
        code, text = await register(served, name, made, 8)
        assert (code, text.endswith("expected a name of 1 to 255 characters")) == (Code.INVALID_ARGUMENT, True)
    assert await register(served, "ü/ß", made, 8) == FINE
    assert await status(served, "%C3%BC%2F%C3%9F", interface="rest") == await status(served, "ü/ß")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"byte_size": 8}, "'key' must be a string, got nothing"),
        ({"key": 7, "byte_size": 8}, "'key' must be a string, got a number 7"),
        ({"key": PREFIX}, "'byte_size' must be an unsigned integer, got nothing"),
        ({"key": PREFIX, "byte_size": -1}, "'byte_size' must be an unsigned integer, got a number -1"),
        ({"key": PREFIX, "byte_size": True}, "'byte_size' must be an unsigned integer, got "),
        ({"key": PREFIX, "byte_size": 8, "offset": "1"}, "'offset' must be an unsigned integer, got a string '1'"),
        ([], "failed to parse the request JSON: expected an object"),
        (None, "failed to parse the request JSON: "),
    ],
)
async def test_bodies_that_are_refused(body: Any, text: str, served: Served) -> None:
    code, found = await post(served, "/v2/systemsharedmemory/region/a/register", body)
    assert code is Code.INVALID_ARGUMENT
    assert found.startswith(text), found


async def test_errors_name_only_own_regions(served: Served, made: Memory) -> None:
    assert await register(served, "private", made, 8) == FINE
    tries = [
        await register(served, "a", f"{PREFIX}none", 8),
        await register(served, "a", made, PAGE + 1),
        await register(served, "a", "/x", 8),
        await status(served, "a"),
    ]
    assert all(code is not Code.OK and "private" not in text for code, text in tries)


async def test_regions_are_limited(served: Served) -> None:
    """And each of them, and the memory behind it, is let go."""
    with memory(1) as made, ExitStack() as stack:
        others = [stack.enter_context(memory(1)) for _ in range(2)]
        for at in range(MAX_REGIONS):
            assert await register(served, str(at), made, 1) == FINE
        code, text = await register(served, "more", others[0], 1)
        assert code is Code.RESOURCE_EXHAUSTED
        assert text.endswith(f"{MAX_REGIONS} regions are registered, which is the limit")
        assert await unregister(served, "7") == FINE
        assert await register(served, "more", others[1], 1) == FINE
        assert open_objects() == MAX_REGIONS
        assert await unregister(served) == FINE
    assert not open_objects()


async def test_regions_end_with_the_server(made: Memory) -> None:
    async with serve_models([], shared_memory_prefix=PREFIX) as served:
        assert await register(served, "a", made, 8) == FINE
        assert open_objects(made.key) == 1
    assert not open_objects(made.key)


@BOTH
async def test_cuda_shared_memory_of_a_server_without_gpus(interface: str, served: Served) -> None:
    text = "failed to register CUDA shared memory region: 'a', GPUs not supported"
    if interface == "grpc":
        registering = pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=bytes(64), byte_size=8)
        code, found, _ = await served.grpc.call("CudaSharedMemoryRegister", registering.SerializeToString())
        assert (code, found) == (Code.INVALID_ARGUMENT, text)
        for name in ("", "a"):
            ending = pb.CudaSharedMemoryUnregisterRequest(name=name).SerializeToString()
            assert await served.grpc.call("CudaSharedMemoryUnregister", ending) == (Code.OK, "", b"")
    else:
        body = {"raw_handle": {"b64": 88 * "A"}, "device_id": 0, "byte_size": 8}
        path = "/v2/cudasharedmemory"
        assert await post(served, f"{path}/region/a/register", body) == (Code.INVALID_ARGUMENT, text)
        assert await post(served, f"{path}/unregister") == FINE
        assert await post(served, f"{path}/region/a/unregister") == FINE
    assert await status(served, interface=interface, kind=CUDA) == (Code.OK, [])
    unknown = "Unable to find cuda shared memory region: 'a'"
    assert await status(served, "a", interface=interface, kind=CUDA) == (Code.NOT_FOUND, unknown)


async def test_a_prefix_begins_as_keys_do() -> None:
    with pytest.raises(ValueError, match="shared_memory_prefix: expected a text that begins with '/', got 'x'"):
        triglot.Config(shared_memory_prefix="x")
