"""`Server`: creates all parts of a server, starts them, and stops them in the right order."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triglot import backends, parts
from triglot.config.options import NO_PORT, Config, ConfigError
from triglot.config.trace_config import TraceConfig
from triglot.core.errors import Code, ModelLoadError
from triglot.core.operation import EVERYTHING, Authorizer
from triglot.core.statistics import DEFAULT_BUCKETS, Latencies
from triglot.dataplane.control import Bound, Control
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.model_calls import ModelCalls
from triglot.dataplane.request_path import RequestRecorder
from triglot.model.config import Recording
from triglot.model.samples import SAMPLE_VALUES
from triglot.model.signature import ModelMetadata, shape_text
from triglot.platform.cgroups import memory_bound
from triglot.platform.cpus import cpu_count
from triglot.platform.memory import trim_when_idle
from triglot.platform.tallies import LocalTally, SharedTallies, Tallies
from triglot.protocols.kserve.regions import Regions
from triglot.protocols.protocol import Context
from triglot.protocols.registry import protocol_parts, rows
from triglot.protocols.rows import Service
from triglot.protocols.sample_calls import LARGEST_BINARY, made_samples
from triglot.repository.config.bounds import Bounds
from triglot.repository.config.settings import ModelSettings, folders_of, record_folders_of
from triglot.repository.manager.instances import start_instances
from triglot.repository.manager.loader import Adapt, DefaultBatching, Load, Verify
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.on_demand import Limits as OnDemandLimits
from triglot.repository.manager.summary import VersionSummary, table
from triglot.repository.manager.warm_up import WARM_UP_FILE, warm_up
from triglot.repository.scan.source import ModelFiles, Root
from triglot.repository.signatures import OFF, WARN, Signatures, Signers
from triglot.repository.storage.storage import Storage
from triglot.scheduling.loaded_version import Admission, Limits
from triglot.scheduling.response_cache import ResponseCache
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Observer
from triglot.telemetry.log_settings import LogSettings
from triglot.telemetry.store import Telemetry
from triglot.telemetry.trace_settings import TraceOptions, read_level
from triglot.telemetry.tracing import Tracer
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.server import HttpServer
from triglot.transports.tls import check_certificate
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.transports.aio.server import GrpcServer
    from triglot.transports.http2.server import H2Server

log = logging.getLogger(__name__)

METRICS = "/metrics"
PAGES = {"monitor": "/", "API": "/docs"}
"""Paths of the pages for people."""
NAMED = 3
"""Models that the error of a start names."""
MIN_REQUESTED_INSTANCES = 8
"""Instances that the configuration in a request may ask for on any machine, unless an option sets the limit."""


class Server:
    """A server of the models at `paths`, or of `models`; `async with` starts and stops it.

    `load` makes models, and `adapt` completes each of them before it is served. `telemetry`: one that is shared
    with other code. `about`: text about the server for grps clients. `log_handler` writes the log, if the
    server manages it. `control`: for one of several workers. `started_with`: the operator's own
    list of models, whose folders clients of TensorFlow Serving may name; by default, `models`.

    Starting raises `ModelLoadError` when the paths hold no model, or when a model cannot be loaded and the
    configuration makes this an error, `ConfigError` when a library is missing that the configuration requires,
    and `OSError` when a port is in use. The ports are bound last, when every model is loaded.
    """

    def __init__(
        self,
        paths: Sequence[str | Root] = (),
        config: Config | None = None,
        *,
        models: Sequence[ModelSettings | ModelFiles] | None = None,
        load: Load = backends.load,
        adapt: Adapt | None = None,
        skip_missing_dependencies: bool = False,
        telemetry: Telemetry | None = None,
        about: str = "",
        log_handler: logging.Handler | None = None,
        control: Control | None = None,
        started_with: Sequence[ModelSettings | ModelFiles] | None = None,
    ) -> None:
        if isinstance(paths, str | Path):
            raise TypeError(f"paths: expected a list of paths, got {paths!r}")
        if paths and models is not None:
            raise TypeError("expected paths or models, got both")
        self.config = config or Config()
        control = control or Control()
        if self.config.workers > 1 and control.single_process:
            raise ConfigError("workers: expected 1; only the command line can start more workers")
        own = (models or ()) if started_with is None else started_with
        prefixes = [self.config.request_log] if self.config.request_log else []
        self._record_folders = [*record_folders_of(own), *(Path(prefix).parent for prefix in prefixes)]
        self.telemetry = telemetry or Telemetry()
        self._storage = Storage(self.config.storage_cache, self.config.storage_cache_bytes)
        self._starts = False
        self.manager = Manager(
            [Path(path) if isinstance(path, str) else path for path in paths] if models is None else models,
            load,
            max_queue_size=self.config.max_queue_size,
            skip_missing_dependencies=skip_missing_dependencies,
            warm=self._prepare,
            poll_interval=self.config.poll_interval if self.config.model_control_mode == "poll" else 0.0,
            explicit=self.config.models_to_load if self.config.model_control_mode == "explicit" else None,
            on_demand=(
                OnDemandLimits(self.config.max_loaded_models, self.config.max_model_memory)
                if self.config.load_on_demand
                else None
            ),
            left_out=control.left_out,
            allow_symlinks=self.config.allow_symlinks,
            bounds=_bounds(self.config),
            folders=[*folders_of(own), *self.config.model_roots],
            record_folders=self._record_folders,
            configured=self._configured,
            load_timeout=self.config.load_timeout,
            load_retries=self.config.load_retries,
            load_retry_interval=self.config.load_retry_interval,
            ray_address=self.config.ray_address,
            max_unread_bytes=self.config.max_unread_bytes,
            op_libraries=self.config.op_libraries,
            debug=self.config.debug,
            verify=_verify(self.config),
            builds=self._builds,
            load_ended=self._load_ended,
            labels_before_load=self.config.labels_before_load,
            wait=self.config.wait_for_models,
            storage=self._storage,
            adapt=adapt or DefaultBatching(self.config.default_max_batch_size),
        )
        self._tracer = Tracer(_trace_options(self.config.traces))
        self.dataplane = DataPlane(
            self.manager,
            default_timeout=self.config.default_timeout,
            tracer=self._tracer,
            control=control,
            strict_readiness=self.config.strict_readiness,
        )
        total_bytes = self.config.total_queue_bytes(memory_bound())
        self._admission = Admission(
            Limits(self.config.max_queue_bytes, self.config.max_total_queue_size, total_bytes)
        )
        self._request_bytes = RequestBytes(total_bytes)
        self._cache = ResponseCache(self.config.response_cache_bytes)
        self.telemetry.queue_depth = self.dataplane.queue_depth
        self.telemetry.loaded = self.dataplane.loaded
        self._latency_metrics = self.config.latency_metrics
        self.telemetry.latency_counters = self._latency_metrics.counters
        self.telemetry.mlserver_names = self.config.mlserver_metrics
        self._recorder: RequestRecorder | None = None
        self._bound = control.bound
        self._log_handler = log_handler
        self._logs: LogSettings | None = None
        self._about = about
        self._regions = Regions(self.config.shared_memory_prefix, self.config.max_message_size)
        self._access: Authorizer | None = None
        self._access_renewed: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._resting: asyncio.Task[None] | None = None
        self.grpc_port = 0
        self.rest_port = 0
        self.pages: dict[str, str] = {}
        """Those of `PAGES` that it serves, while it runs."""
        self.metrics_port = 0
        self._grpc: GrpcServer | H2Server | None = None
        self._http: HttpServer | None = None
        self._metrics_http: HttpServer | None = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load every model, then open the ports; raises as the class says."""
        for port in (self.config.grpc_port, self.config.rest_port, self.config.metrics_port):
            if port != NO_PORT and self._bound is None:
                _check_free(self.config.host, port)
        if self.config.grpc_socket:
            _check_socket(self.config.grpc_socket)
        protocol_parts(self.config)
        self._tracer.check()
        self._start_observers()
        check_certificate(self.config)
        self._access = self._access_control()
        _grpc_server(self.config)
        try:
            errors = await self.load()
            if errors and self.config.exit_on_load_error:
                # Each error has been logged.
                raise ModelLoadError(self._failure_text(len(errors))) from errors[0]
            # Other workers serve the same models.
            for line in table(self.summaries()) if self.dataplane.control.number == 1 else ():
                log.info("%s", line)
            await self._open()
        except BaseException:
            await self.stop()
            raise

    def _failure_text(self, count: int) -> str:
        failed = list(dict.fromkeys(summary.model for summary in self.summaries() if summary.error))
        more = f" and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        named = f" ({', '.join(failed[:NAMED])}{more})" if failed else ""
        return f"{count} of the models could not be loaded{named}"

    def _configured(self, models: Sequence[ModelSettings]) -> None:
        """Apply the settings for request records in a new list of models."""
        own = {model.name: model.recording for model in models}
        recordings = {name: recording for name, recording in own.items() if recording is not None}
        if recordings:
            try:
                self._start_recorder()
            except ConfigError as error:
                log.error("%s", error)
        if self._recorder is not None:
            self._recorder.configure(recordings)

    def _start_recorder(self) -> None:
        """Have requests recorded. Raise `ConfigError` without the part that does."""
        if self._recorder is not None:
            return
        control = self.dataplane.control
        make: Callable[..., RequestRecorder] = _part("request_log", "observer", "request records")
        self._recorder = make(
            _recording(self.config),
            suffix="" if control.single_process else f"-w{control.number}",
            max_bytes=self.config.request_log_file_size,
            max_files=self.config.request_log_files,
        )
        self._record_by(self._recorder)

    def _record_by(self, recorder: RequestRecorder) -> None:
        self.dataplane.recorders.append(recorder)
        self.telemetry.observers.append(recorder)

    def _start_payload_log(self) -> None:
        """Have payloads of requests and responses sent on. Raise `ConfigError`."""
        config = self.config
        make: Callable[..., RequestRecorder] = _part("payload_log", "observer", "payload log")
        try:
            recorder = make(
                config.payload_log,
                config.payload_log_rate,
                config.payload_log_batch,
                config.payload_attributes,
                config.payload_metadata,
            )
        except OSError as error:
            raise ConfigError(f"payload_log: cannot write {config.payload_log}: {error.strerror}") from None
        self._record_by(recorder)

    def _access_control(self) -> Authorizer | None:
        """Return what decides about calls, None if access is unrestricted. Raise `ConfigError`."""
        options = ("access", "grpc_restricted_protocol", "http_restricted_api")
        option = next((option for option in options if getattr(self.config, option)), "")
        if not option:
            return None
        make: Callable[..., Authorizer] = _part(option, "part", "access control")
        return make(self.config, self._tallies(), self.dataplane.control.access_file)

    def _tallies(self) -> Tallies:
        """Return what counts clients' calls: per process, or shared by all workers."""
        if (shared := self.dataplane.control.tally_file) is None:
            return LocalTally
        file, run = shared
        return SharedTallies(file, self.config.workers, run)

    def _start_observers(self) -> None:
        """Load what the configuration wants to observe calls. Raise `ConfigError` for what is not there."""
        config, traces, observers = self.config, self.config.traces, self.telemetry.observers
        if traces.wants_spans(os.environ):
            scheme = "https" if config.tls_certificate else "http"
            start: Callable[..., Observer | None] = _part("spans", "observer", "spans")
            spans = start(traces, os.environ, self._tracer.sample_span, scheme=scheme, version=__version__)
            if spans is not None:
                self._tracer.spans = spans
                observers.append(spans)
        if self._record_folders:
            self._start_recorder()
        samples = [Path(config.shadow_samples).parent] if config.shadow_samples else []
        for folder in (*self._record_folders, *samples):
            if not folder.is_dir():
                raise OSError(f"request records: expected a prefix in an existing folder, got {folder}")
        if config.payload_log:
            self._start_payload_log()
        if config.access_log or config.log_verbose_level:
            _part("access_log" if config.access_log else "log_verbose_level", "observer", "access log")
        if config.audit_required and not config.audit_log:
            raise ConfigError("audit_required: needs audit_log, the file to write")
        if config.audit_log:
            make: Callable[[Path], Observer] = _part("audit_log", "observer", "audit log")
            try:
                observers.append(make(Path(config.audit_log)))
            except OSError as error:
                raise ConfigError(f"audit_log: cannot write {config.audit_log}: {error.strerror}") from None

    def _builds(self) -> bool | None:
        """Return whether Python environments are built now; None if none are used."""
        when = self.config.build_environments
        return None if when == "never" else when == "always" or self._starts

    async def load(self) -> list[ModelLoadError]:
        """Load and warm up every model, without opening a port; returns the errors. `stop` unloads the models.

        Raise `ModelLoadError` as `start`.
        """
        started = time.monotonic()
        self.dataplane.reach = ModelCalls(self.dataplane, self.telemetry, self.config.max_inner_calls).reach
        self._starts = True
        try:
            errors = await self.manager.load_all(all_or_nothing=self.config.exit_on_load_error)
        finally:
            self._starts = False
        if errors and self.config.exit_on_load_error:
            return errors
        loaded = _plural(sum(version.ready for version in self.manager.registry.versions()), "version")
        failed = f", with {_plural(len(errors), 'error')}" if errors else ""
        log.info("%s loaded in %.2f s%s", loaded, time.monotonic() - started, failed)
        return errors

    async def try_calls(self) -> list[ModelLoadError]:
        """Call each loaded model that has no example of its own with made inputs; return what fails.

        What a model's own code refuses as invalid is no failure: nothing is known of the values that it takes.
        """
        reach, errors = ModelCalls(self.dataplane, None).reach, []
        for version in self.manager.registry.versions():
            files, servable = version.files, version.servable
            if servable is None or servable.model.example or files.config.warm_up:
                continue
            metadata = self.dataplane.metadata(EVERYTHING, files.name, str(files.version))
            samples = None if servable.model.takes_messages else made_samples(metadata, LARGEST_BINARY)
            if samples is None:
                continue
            servable.model.example = {sample.name: sample.nested() for sample in samples}
            try:
                await warm_up(servable, (), reach)
            except ModelLoadError as error:
                if error.code is Code.INVALID_ARGUMENT:
                    log.info("%s", error)
                    continue
                made = ", ".join(
                    f"{s.name}: {s.datatype} {shape_text(s.shape)} of {SAMPLE_VALUES[s.datatype]!r}"
                    for s in samples
                )
                text = f"{error} (the example was made: {made}; give it one of its own, or use --no-calls)"
                errors.append(ModelLoadError(text, error.code))
        return errors

    def _load_ended(self, files: ModelFiles, seconds: float, failed: bool) -> None:
        place = self._storage.named(str(files.folder or files.file.parent))
        self.telemetry.loaded_from(place, seconds, failed=failed)

    async def _prepare(self, servable: Servable, files: ModelFiles) -> None:
        """Prepare a version before it takes calls; warm-up requests are not counted."""
        await start_instances(servable, self.dataplane.reach)
        if self.config.warm_up:
            await self._warm_up(servable, files)
        servable.guard.watch(self.config.loop_lag_warning)
        servable.bound(self._admission)
        if servable.sequences is not None and self.config.workers > 1 and self.dataplane.control.number == 1:
            log.warning(
                "%s: with %d workers, send all requests of a sequence over one connection: each worker has its "
                "own sequences",
                files,
                self.config.workers,
            )
        if self._cache.max_bytes and servable.model.response_cache:
            servable.enable_response_cache(self._cache)
        elif servable.model.response_cache:
            log.warning("%s: response_cache: ignored, as response_cache_bytes is 0", files)
        self._measure_latencies(servable)

    def _measure_latencies(self, servable: Servable) -> None:
        wanted = self._latency_metrics
        if wanted.histograms or wanted.summaries:
            buckets = servable.model.model_config.first_response_buckets or DEFAULT_BUCKETS
            servable.statistics.latencies = Latencies(
                buckets if wanted.histograms else None,
                wanted.quantiles if wanted.summaries else (),
                decoupled=servable.decoupled,
                cached=servable.response_cache is not None,
            )

    async def _warm_up(self, servable: Servable, files: ModelFiles) -> None:
        # Calls of the model during its warm-up are not counted either.
        reach = ModelCalls(self.dataplane, None).reach
        await warm_up(servable, files.config.warm_up, reach)
        recorded = files.file.parent / WARM_UP_FILE
        if await asyncio.to_thread(recorded.is_file):
            try:
                replay = parts.load("observer", "warm-up records")
            except parts.MissingPart as error:
                raise ModelLoadError(f"{recorded}: {error}") from error
            await replay(self.dataplane, servable, recorded)

    async def _open(self) -> None:
        started = time.monotonic()
        control = self.dataplane.control
        self._logs = LogSettings(
            self.telemetry.observers,
            self._log_handler,
            file=self.config.log_file,
            worker=0 if control.single_process else control.number,
            log_format=self.config.log_format,
            verbose_level=self.config.log_verbose_level,
            access_lines=self.config.access_log,
        )
        services, routes = rows(
            Context(
                self.dataplane,
                self.telemetry,
                self.config,
                self._about,
                self._logs,
                self._regions,
                lambda: self.grpc_port,
                self._admission.limits,
            )
        )
        await self.dataplane.control.loaded()
        self._ticking = asyncio.create_task(self.telemetry.run())
        if self._access is not None:
            self._access_renewed = asyncio.create_task(self._access.run())
        if self.config.malloc == "keep":
            self._resting = asyncio.create_task(trim_when_idle())
        listeners = []
        # gRPC's port may serve REST too.
        methods = {f"/{service.name}/{method.name}" for service in services for method in service.methods}
        calls = HttpCalls(routes, self.config, self.telemetry, self._request_bytes, self._access, methods)
        http = self._http = _http_server(self.config)(
            calls, self.config, bound=[] if self._bound is None else self._bound.rest
        )
        await http.set_up()
        if self.config.grpc_port != NO_PORT or self.config.grpc_socket:
            self._grpc = _grpc_server(self.config, self._bound)(
                services, self.telemetry, self._request_bytes, http, self._access
            )
            self.grpc_port = await self._grpc.start()
            listeners += [f"gRPC on {name}" for name in self._grpc_names()]
        if self.config.rest_with_grpc:
            self.rest_port = self.grpc_port
            listeners.append("REST on the same port")
        elif self.config.rest_port != NO_PORT:
            self.rest_port = await http.start(tuple if self._grpc is None else self._grpc.idle_connections)
            listeners.append(f"REST on {self.config.address(self.rest_port)}")
        if self.config.metrics_port != NO_PORT and control.number == 1:  # Its metrics are those of all workers.
            config = replace(self.config, rest_port=self.config.metrics_port, metrics_port=NO_PORT)
            own = [route for route in routes if route.path == METRICS]
            calls = HttpCalls(own, config, self.telemetry, self._request_bytes, self._access)
            self._metrics_http = _http_server(config)(calls, config)
            self.metrics_port = await self._metrics_http.start()
            log.info("metrics on %s", config.address(self.metrics_port))
        log.info("%s in %.2f s", " and ".join(listeners), time.monotonic() - started)
        if self.rest_port:
            paths = {route.path for route in routes}
            self.pages = {name: path for name, path in PAGES.items() if path in paths}
        if self.config.first_protocol == "grps" and not self.config.grps_online:
            log.info("grps health: not ready until Online is called; start with --online to be ready at once")
        if self._grpc_names() and self.config.grpc_transport == "aio" and not self.config.only_known_connect:
            log.warning(
                "grpc_transport aio is not for untrusted clients: gRPC's library does not bound the calls that a "
                "connection begins and resets; h2 does"
            )
        if not (self.config.only_known_connect or self.config.access):
            log.warning("listening on %s without authentication", self.config.host)

    def _grpc_names(self) -> list[str]:
        port = [self.config.address(self.grpc_port)] if self.config.grpc_port != NO_PORT else []
        return [*port, *([self.config.grpc_socket] if self.config.grpc_socket else [])]

    async def drain(self, delay: float) -> None:
        """Turn readiness off and continue serving for `delay` seconds, in which load balancers take the server
        out.
        """
        ends = ", and new sequences are rejected" if any(model.sequences for model in self.metadata()) else ""
        self.dataplane.stop()
        if self._http is not None:
            self._http.drain()
        if delay:
            log.info("draining: readiness is off, requests are accepted for another %.0f s%s", delay, ends)
            await asyncio.sleep(delay)
            await self.dataplane.sequences_ended(self.config.grace)

    async def retire(self) -> None:
        """Accept no more connections, because another process does; open ones end with their calls."""
        listeners = [] if self._grpc is None else [self._grpc.retire()]
        if self._http is not None:
            listeners.append(self._http.retire(self.config.drain_delay))
        await asyncio.gather(*listeners)

    async def stop(self) -> None:
        """Close the ports, let running calls finish within the grace period, then unload the models."""
        self.dataplane.stop()
        servers = (self._grpc, self._http, self._metrics_http)
        stops = [server.stop() for server in servers if server is not None]
        self._grpc = self._http = self._metrics_http = None
        await asyncio.gather(*stops)
        await self.dataplane.control.closing()
        self._regions.unregister()
        await self.manager.close()
        await self._tracer.close()
        for observer in self.telemetry.observers:
            await asyncio.to_thread(observer.close)
        self.telemetry.observers.clear()
        if self._logs is not None:
            self._logs.close()
        for task in (self._ticking, self._resting, self._access_renewed):
            if task is not None:
                task.cancel()

    def summaries(self) -> list[VersionSummary]:
        """Return each version that is to be served: what it is, and whether it was loaded."""
        return self.manager.summaries()

    def metadata(self) -> list[ModelMetadata]:
        """Return the metadata of all ready models."""
        return self.dataplane.serving(EVERYTHING)


def _trace_options(traces: TraceConfig) -> TraceOptions:
    level = read_level(traces.level)
    return TraceOptions(traces.file, level, traces.rate, traces.count, traces.frequency, traces.mode)


def _bounds(config: Config) -> Bounds:
    """Return what the options allow the configuration in a client's request."""
    instances = config.max_requested_instances or max(MIN_REQUESTED_INSTANCES, 2 * cpu_count())
    others = {field.name: getattr(config, f"max_requested_{field.name}") for field in fields(Bounds)}
    return Bounds(**others | {"instances": instances})


def _verify(config: Config) -> Verify | None:
    """Return what checks the models' signatures, if the options ask for it."""
    if config.model_signatures == OFF:
        return None
    identity, _, issuer = config.model_signing_identity.partition(",")
    signers = Signers(config.signing_keys, config.signing_authorities, identity.strip(), issuer.strip())
    return Signatures(signers, warn=config.model_signatures == WARN).verify


def _recording(config: Config) -> Recording | None:
    return Recording(config.request_log, config.request_log_rate) if config.request_log else None


def _grpc_server(
    config: Config, bound: Bound | None = None
) -> Callable[[list[Service], Telemetry, RequestBytes, HttpServer, Authorizer | None], GrpcServer | H2Server]:
    """Return what makes the configured gRPC transport; the other one, and its library, are not imported."""
    if config.grpc_transport == "h2":
        from triglot.transports.http2.server import H2Server  # noqa: PLC0415

        return lambda services, telemetry, request_bytes, http, access: H2Server(
            services,
            config,
            telemetry,
            request_bytes=request_bytes,
            access=access,
            rest=None if config.rest_port == NO_PORT else http,
            bound=[] if bound is None else bound.grpc,
        )
    from triglot.transports.aio.server import GrpcServer  # noqa: PLC0415

    return lambda services, telemetry, request_bytes, _, access: GrpcServer(
        services, config, telemetry, request_bytes=request_bytes, access=access, shared=bound is not None
    )


def _http_server(config: Config) -> type[HttpServer]:
    """Return the configured transport of REST over HTTP/1.1; the other one, and its library, are not imported."""
    if config.http_transport == "h1":
        from triglot.transports.http1.server import Http1Server  # noqa: PLC0415

        return Http1Server
    from triglot.transports.aiohttp.server import AiohttpServer  # noqa: PLC0415

    return AiohttpServer


def _part(option: str, kind: str, name: str) -> Any:
    """Return what stands for a part that an option asks for. Raise `ConfigError` if it is not there."""
    try:
        return parts.load(kind, name)
    except parts.MissingPart as error:
        raise ConfigError(f"{option}: {error}") from error


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _check_free(host: str, port: int) -> None:
    """Raise `OSError` if the port is in use: now, and not after minutes of loading."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another host or other ports "
            "(0: any free one)"
        ) from None


def _check_socket(path: str) -> None:
    """Raise `OSError` when another server listens there: grpc would silently replace its socket file."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # No server listens; the file left behind by a killed server may be replaced.
    raise OSError(f"cannot listen on {path}: another server uses it")
