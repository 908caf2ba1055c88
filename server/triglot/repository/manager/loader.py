"""Loads the files of a model version into a servable that is ready for calls."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from triglot.core.errors import Code, ModelLoadError, NeedsProcess, ServingError
from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.executors.hosted import HostedModel, ModelFailure
from triglot.executors.loading import ANY_CLUSTER, Loading
from triglot.model.config import REMOTE_EXECUTIONS, ModelConfig
from triglot.model.configure import configure
from triglot.model.model import Model, signatures_of
from triglot.model.scheduling import DynamicBatching
from triglot.platform.memory import resident_bytes
from triglot.repository.config.server_parameters import ENVIRONMENT
from triglot.repository.manager.autoscaler import autoscale
from triglot.repository.manager.thread import in_thread
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

OWN_ENVIRONMENTS = ("mlflow", "mlserver", "python")
"""The backends whose models may have a Python environment of their own."""
DESCRIBED, PACKAGES = "mlflow", ("requirements.txt", "conda.yaml")
"""The backend whose models describe one, and the files with its packages, the first of which counts."""
Load = Callable[[str, Path, ModelConfig], Model]
"""Return the loaded model for (backend, file, configuration); blocks."""
Adapt = Callable[[Model, ModelFiles], object]
"""Completes a loaded model before `configure`; blocks. Raise `ModelLoadError`."""
Verify = Callable[[ModelFiles], object]
"""Checks a version before anything of it is loaded; blocks. Raise `ModelLoadError`."""
Builds = Callable[[], bool | None]
"""Whether Python environments that models describe are built now; None: such models run in the server's Python."""
Complete = Callable[[Servable], Awaitable[None]]
"""Waits for the dependencies of a version; raises `ModelLoadError`."""
Warm = Callable[[Servable, ModelFiles], Awaitable[None]]
"""Warms a version up before it takes calls; an exception makes it fail to load."""


LoadEnded = Callable[[ModelFiles, float, bool], object]
"""Called after each load with its duration in seconds, and whether it failed."""


MAX_LABEL_BYTES = 16 * 1024 * 1024
"""Limit on the size of a file of labels."""


def read_labels(config: ModelConfig) -> dict[str, Sequence[bytes]]:
    """Return the labels of each output with a label file, one per line; blocks. Raise `ModelLoadError`."""
    return {tensor.name: _lines(tensor.label_file) for tensor in config.outputs if tensor.label_file is not None}


def _lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_LABEL_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{file}: label_filename: {error.strerror}", Code.INVALID_ARGUMENT) from None
    if len(content) > MAX_LABEL_BYTES:
        text = f"{file}: label_filename: expected at most {MAX_LABEL_BYTES} bytes"
        raise ModelLoadError(text, Code.INVALID_ARGUMENT)
    # Not splitlines(): a label may contain other line separators.
    return [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")]


def _nothing() -> None:
    pass


def never() -> None:
    """Return that no environment is built: the default of `Builds`."""


class Loader:
    """Loads, checks and warms versions; closes partly loaded models after a failure.

    `changed` is called on the loop when a version becomes alive or stops being alive.
    """

    def __init__(
        self,
        load: Load,
        warm: Warm | None,
        max_queue_size: int,
        changed: Callable[[], object] = _nothing,
        adapt: Adapt | None = None,
        ray_address: str = ANY_CLUSTER,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        op_libraries: Sequence[Path] = (),
        *,
        debug: bool = False,
        verify: Verify | None = None,
        builds: Builds = never,
    ) -> None:
        self._debug = debug
        self._verify = verify
        self._builds = builds
        self._max_unread_bytes = max_unread_bytes
        self._ray_address = ray_address
        self._op_libraries = op_libraries
        self._load = load
        self._adapt = adapt
        self._changed = changed
        self._warm = warm
        self._max_queue_size = max_queue_size

    async def open(self, files: ModelFiles, complete: Complete) -> Servable:
        """Return the ready servable. If cancelled, close what is loaded later.

        Raise `ModelLoadError` for any exception of the model's code.
        """
        loading, began = Loading(self._load, ray_address=self._ray_address), time.monotonic()
        build = partial(self._build, files, loading, asyncio.get_running_loop())
        try:
            servable = await in_thread(build, late=_close_unopened, name=f"the load of {files}")
        except asyncio.CancelledError:
            loading.cancel_load()
            raise
        model = servable.model
        try:
            servable.open()
            if any(tensor.label_file for tensor in files.config.outputs):
                servable.labels = {**servable.labels, **await in_thread(partial(read_labels, files.config))}
            await complete(servable)
            if self._warm is not None:
                await self._warm(servable, files)
        except BaseException as error:
            await servable.close()
            if isinstance(error, ModelLoadError) or not isinstance(error, Exception | SystemExit):
                raise
            if isinstance(error, ServingError):
                raise ModelLoadError(error.message, error.code) from error
            raise ModelLoadError(f"{type(error).__name__}: {error}") from error
        servable.load_seconds = time.monotonic() - began
        if model.execution == "ray" and model.ray.max_instances:
            servable.companion = asyncio.create_task(autoscale(servable))
        return servable

    def _build(self, files: ModelFiles, loading: Loading, loop: asyncio.AbstractEventLoop) -> Servable:
        """Return the loaded model as a servable that is to be opened. Blocks. Raise `ModelLoadError`."""
        before = resident_bytes()
        model = self._load_model(files, loading)
        grown = resident_bytes() - before
        if isinstance(model, HostedModel):
            model.loop = loop
            model.on_change = partial(_on_loop, loop, self._changed)
        try:
            servable = Servable(
                files.name,
                files.version,
                model,
                max_queue_size=self._max_queue_size,
                max_unread_bytes=self._max_unread_bytes,
                debug=self._debug,
                loop=loop,
            )
        except BaseException as error:  # A user's class may declare anything.
            _close(model)
            raise ModelLoadError(f"{files.file}: {type(error).__name__}: {error}") from error
        servable.load_bytes = grown
        return servable

    def _load_model(self, files: ModelFiles, loading: Loading) -> Model:
        try:
            if self._verify is not None:
                self._verify(files)
            if files.make is not None:
                return _make(files, files.make)
            model = self._load_backend(files, loading)
        except ModelLoadError as error:
            if _has_text(error):
                raise
            raise ModelLoadError(f"{files.file}: {type(error).__name__}: {error}") from error
        except BaseException as error:  # Includes SystemExit, which would end the server.
            raise ModelLoadError(f"{files.file}: {type(error).__name__}: {error}") from error
        try:
            if self._adapt is not None:
                self._adapt(model, files)
            configure(model, files.named_config)
            if isinstance(model, HostedModel):
                model.start()
        except ModelLoadError:
            _close(model)
            raise
        except ValueError as error:
            _close(model)
            raise ModelLoadError(f"{files.config.source}: {error}", Code.INVALID_ARGUMENT) from error
        except BaseException as error:  # A user's class may declare anything.
            _close(model)
            raise ModelLoadError(f"{files.file}: {type(error).__name__}: {error}") from error
        return model

    def _load_backend(self, files: ModelFiles, loading: Loading) -> Model:
        config, ray = files.named_config, None
        config = replace(config, max_unread_bytes=self._max_unread_bytes, op_libraries=self._op_libraries)
        builds = self._builds()
        if builds is not None and files.backend == DESCRIBED and not (config.environment or config.execution):
            lists = [files.file.with_name(name) for name in PACKAGES]
            config = replace(config, environment=next(filter(Path.is_file, lists), None))
        config = replace(config, builds_environment=bool(builds))
        if config.environment is not None and files.backend not in OWN_ENVIRONMENTS:
            log.warning(
                "%s: parameters[%s]: not supported by the %s backend, ignored", files, ENVIRONMENT, files.backend
            )
            config = replace(config, environment=None)
        if config.execution not in REMOTE_EXECUTIONS and config.environment is None:
            try:
                return self._load(files.backend, files.file, config)
            except NeedsProcess as needs:
                config, ray = replace(config, execution=needs.execution), needs.ray
        folder = None if files.single_file else files.folder or files.file.parent
        return loading(str(files), files.backend, files.file, config, folder, ray)


def _make(files: ModelFiles, make: Callable[[], Model]) -> Model:
    """Make a model in this process. Raise `ModelLoadError` if it has to run in a process of its own."""
    execution = files.config.execution
    model = None if execution in REMOTE_EXECUTIONS else make()
    if model is not None and (execution or model.execution) not in REMOTE_EXECUTIONS:
        return model
    if model is not None:
        execution = model.execution
        _close(model)
    raise ModelLoadError(
        f"{files}: execution: expected 'thread' for a model object or a grps project, got {execution!r}",
        Code.INVALID_ARGUMENT,
    )


def _on_loop(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # The loop is closed: the server has stopped.
        loop.call_soon_threadsafe(what)


def _close_unopened(servable: Servable) -> None:
    _close(servable.model)


def _close(model: Model) -> None:
    with suppress(Exception, SystemExit):
        model.close()


def _has_text(error: ModelLoadError) -> bool:
    """Whether the error has a text and a code; a subclass of the model's own may lack them."""
    code = getattr(error, "code", None)
    return isinstance(code, Code) and code is not Code.OK and bool(str(error))


def model_exception(error: ModelLoadError, files: ModelFiles) -> BaseException | None:
    """Return the exception that the version's own code raised, with its traceback starting there.

    None if there is none, or the code raised a `ServingError` itself.
    """
    own_types = (ModelLoadError, ServingError)
    cause = next(
        (
            exception
            for exception in _chain(error, lambda exception: exception.__cause__)
            if not isinstance(exception, own_types)
        ),
        None,
    )
    if cause is None or isinstance(cause, ModelFailure):
        return cause
    folder, trace = (files.folder or files.file.parent).absolute(), cause.__traceback__
    own = [
        frame
        for frame in _frames(trace)
        if Path(frame.tb_frame.f_code.co_filename).absolute().is_relative_to(folder)
    ]
    if not own:
        return None
    after = own[-1].tb_next
    if after is not None and after.tb_frame.f_globals.get("__name__", "").startswith("triglot."):
        own[-1].tb_next = None  # Omits the frames of the server's own checks.
    return cause.with_traceback(own[0])


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def clear_frames(error: BaseException) -> None:
    """Clear the frames of failed code: they may hold a large, partly loaded model, and errors live in cycles."""
    for exception in _chain(error, lambda exception: exception.__cause__ or exception.__context__):
        traceback.clear_frames(exception.__traceback__)


def _chain(
    error: BaseException, cause: Callable[[BaseException], BaseException | None]
) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on; end if these form a cycle."""
    exception: BaseException | None = error
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = cause(exception)


BACKEND = "onnx"
"""The only backend whose files declare which dims are variable."""


class DefaultBatching:
    """Sets `max_batch_size`, and dynamic batching unless a scheduling is configured. An `Adapt` of the loader.

    Applies to models whose tensors are not configured and all begin with a variable dim.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def __call__(self, model: Model, files: ModelFiles) -> None:
        """Completes a model before it serves."""
        config = files.config
        if not self._max_batch_size or model.max_batch_size or files.backend != BACKEND:
            return
        if config.max_batch_size or config.inputs or config.outputs:
            return
        signatures = signatures_of(model).values()
        specs = [spec for signature in signatures for spec in (*signature.inputs, *signature.outputs)]
        if any(spec.shape is None or spec.shape[:1] != (-1,) for spec in specs):
            return
        model.max_batch_size = self._max_batch_size
        if self._max_batch_size > 1 and not (config.dynamic_batching or config.sequence_batching):
            model.dynamic_batching = DynamicBatching()
