"""The cache of downloaded objects: each is stored once, complete, and kept across restarts.

A file is named after the hash of the object's URL, tag and size, so a changed object is another file; it is
renamed into place once complete. Its modification time is the object's, with nanoseconds derived from the tag:
this detects files that were written to, and a repeated download looks unchanged to anything that compares times.
The last listing of each URL is kept, too, for a start while its store is down.
The snapshots that are served are hard links to the files: there is no second copy, no symbolic link that leads out
of a snapshot, and the link count tells which files are in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from triglot.repository.scan.urls import Url
from triglot.repository.storage.store import Store, StoredObject, StoreError

log = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Size of the parts in which a large object is downloaded, each on its own connection."""
CONNECTIONS = 16
PROGRESS_SECONDS = 10.0
READ_ONLY = 0o444
OBJECTS, SERVERS, LISTINGS = "objects", "servers", "listings"


@dataclass(frozen=True, slots=True)
class Missing:
    """An object to download."""

    url: Url
    store: Store
    stored: StoredObject


class Cache:
    """A folder with objects, and with the snapshots of running servers; several servers may share it.

    `most_bytes`: size of all objects above which unused ones are removed, least recently used first; 0: no limit.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._objects = folder / OBJECTS
        self._warned = False
        self._listings = folder / LISTINGS
        self._objects.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._listings.mkdir(mode=0o700, exist_ok=True)
        servers = folder / SERVERS
        servers.mkdir(mode=0o700, exist_ok=True)
        with _locked(servers):
            for other in servers.iterdir():
                _remove_dead(other)
            self.snapshots = Path(tempfile.mkdtemp(dir=servers))
            self._lock_file = os.open(self.snapshots, os.O_RDONLY)
            fcntl.flock(self._lock_file, fcntl.LOCK_SH)
        self._incoming = self.snapshots / "incoming"
        self._incoming.mkdir()

    def close(self) -> None:
        """Remove this server's snapshots; the objects stay."""
        shutil.rmtree(self.snapshots, ignore_errors=True)
        os.close(self._lock_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Prevents other processes from downloading or removing objects, so that each is downloaded once."""
        with _locked(self._objects, "waiting for another server, which fills the cache %s"):
            yield

    def has(self, url: Url, stored: StoredObject) -> bool:
        """Whether the object is cached, complete and unmodified."""
        file = self._file(url, stored)
        try:
            status = file.stat()
        except OSError:
            return False
        if status.st_size == stored.size and status.st_mtime_ns == _time(file.name, stored):
            return True
        log.warning("%s: something has written to the cached copy %s; it is downloaded again", url, file)
        file.unlink(missing_ok=True)
        return False

    def link(self, url: Url, stored: StoredObject, file: Path) -> None:
        """Links the object to a path."""
        os.link(self._file(url, stored), file)

    def file(self, url: Url, stored: StoredObject) -> Path:
        """Return the path of a cached object, which must only be read."""
        return self._file(url, stored)

    def _file(self, url: Url, stored: StoredObject) -> Path:
        place = f"{url}/{stored.path}" if stored.path else str(url)
        identity = "\0".join((place, url.query, stored.tag, str(stored.size)))
        return self._objects / hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()

    def save_listing(self, name: str, listed: Sequence[StoredObject]) -> None:
        """Keep the objects of a URL for a start while the store is down."""
        incoming = self._incoming / name
        incoming.write_text(json.dumps([astuple(stored_object) for stored_object in listed]))
        incoming.replace(self._listings / name)

    def saved_listing(self, name: str) -> list[StoredObject]:
        """Return the objects that were saved last; none if nothing was."""
        try:
            return [StoredObject(*fields) for fields in json.loads((self._listings / name).read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def download(self, missing: Sequence[Missing]) -> dict[Url, Exception]:
        """Download the objects; return the errors by URL, which do not affect other URLs."""
        progress = _Progress(missing)
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="download") as pool:
            by_url = defaultdict[Url, list[Future[None]]](list)
            for missing_object in missing:
                incoming = _Download(
                    missing_object, self._incoming, self._file(missing_object.url, missing_object.stored), progress
                )
                by_url[missing_object.url] += [pool.submit(incoming.get, *part) for part in incoming.parts]
            errors = {}
            pending = {future for futures in by_url.values() for future in futures}
            while pending:
                done, pending = wait(pending, return_when=FIRST_EXCEPTION)
                for url, futures in by_url.items():
                    failed = [
                        error
                        for future in done.intersection(futures)
                        if not future.cancelled() and (error := future.exception()) is not None
                    ]
                    if failed and url not in errors:
                        errors[url] = _as_exception(failed[0])
                        for future in futures:
                            future.cancel()
        for left in self._incoming.iterdir():
            left.unlink()
        progress.end()
        return errors

    def trim(self) -> None:
        """Remove unused objects above the size limit."""
        if not self._most_bytes:
            return
        files = [(file, file.stat()) for file in self._objects.iterdir()]
        total = sum(status.st_size for _, status in files)
        unused = sorted((status.st_ctime, status.st_size, file) for file, status in files if status.st_nlink == 1)
        for _, size, file in unused:
            if total <= self._most_bytes:
                break
            file.unlink()
            total -= size
            log.info("removed an unused object of %s from the cache", in_units(size))
        if total > self._most_bytes and not self._warned:
            self._warned = True
            log.warning(
                "the models in use take %s of the storage cache, more than storage_cache_bytes, %s",
                in_units(total),
                in_units(self._most_bytes),
            )


class _Download:
    """An object that is being downloaded in parts, by several threads."""

    def __init__(self, missing: Missing, folder: Path, target: Path, progress: _Progress) -> None:
        self._missing = missing
        self._target = target
        self._progress = progress
        self._file = folder / target.name
        size = missing.stored.size
        step = PART_BYTES if missing.stored.in_parts else max(size, 1)
        self.parts = [(begin, min(begin + step, size)) for begin in range(0, size, step)] or [(0, 0)]
        self._left = len(self.parts)
        self._lock = threading.Lock()

    def get(self, begin: int, end: int) -> None:
        """Download a part; the last one moves the file into the cache."""
        stored = self._missing.stored
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            at = begin
            for piece in self._missing.store.read(stored, begin, end) if end > begin else ():
                if at + len(piece) > end:
                    break
                os.pwrite(descriptor, piece, at)
                at += len(piece)
                self._progress.add(len(piece))
            if at != end:
                raise StoreError(f"{stored.path or self._missing.url}: got {at - begin} bytes of {end - begin}")
            with self._lock:
                self._left -= 1
                if self._left:
                    return
            os.fdatasync(descriptor)
            os.fchmod(descriptor, READ_ONLY)
            modified = _time(self._target.name, stored)
            os.utime(descriptor, ns=(modified, modified))
        finally:
            os.close(descriptor)
        self._file.replace(self._target)


def _time(name: str, stored: StoredObject) -> int:
    """Return the time of an object's file in nanoseconds; equal only for equal objects."""
    return stored.modified * 10**9 + int(name[:12], 16) % 10**9


class _Progress:
    """Logs the progress of a download at intervals."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        self._all = sum(missing_object.stored.size for missing_object in missing)
        first, *others = dict.fromkeys(str(missing_object.url) for missing_object in missing)
        self._urls = first + (f" and {len(others)} more" if others else "")
        self._done = 0
        self._began = self._logged = time.monotonic()
        self._lock = threading.Lock()
        self._count = len(missing)
        log.info("%s: downloading %d objects, %s", self._urls, self._count, in_units(self._all))

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if (now := time.monotonic()) - self._logged < PROGRESS_SECONDS:
                return
            self._logged = now
        log.info("%s: downloaded %s of %s", self._urls, in_units(self._done), in_units(self._all))

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        log.info("%s: downloaded %s in %.1f s", self._urls, in_units(self._done), seconds)


def in_units(count: int) -> str:
    """Format a number of bytes for people."""
    size, units = float(count), iter(("bytes", "kB", "MB", "GB"))
    unit = next(units)
    while size >= 1000 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else StoreError(f"{type(error).__name__}: {error}")


@contextmanager
def _locked(folder: Path, message: str = "") -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if message:
                log.info(message, folder.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(folder: Path) -> None:
    """Remove the snapshots of a server that no longer runs."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def cache_folder(option: str) -> Path:
    """Return the folder of the option, or the user's cache folder, or one below /tmp. Raise `OSError`."""
    if option:
        return Path(option).expanduser().absolute()
    for folder in _usual_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
        except OSError:
            continue
    raise OSError("no folder for downloaded models is writable; expected --storage-cache FOLDER")


def _usual_folders() -> Iterable[Path]:
    if home := os.environ.get("XDG_CACHE_HOME"):
        yield Path(home) / "triglot"
    try:
        yield Path.home() / ".cache" / "triglot"
    except RuntimeError:  # The user has no home folder.
        pass
    # With the user's id: others may write to /tmp.
    yield Path(tempfile.gettempdir()) / f"triglot-{os.getuid()}"
