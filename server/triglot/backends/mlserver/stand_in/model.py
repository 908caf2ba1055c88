"""MLServer's `MLModel`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from triglot.backends.mlserver.stand_in import codecs
from triglot.backends.mlserver.stand_in.errors import CodecNotFound
from triglot.backends.mlserver.stand_in.types import (
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataTensor,
    RequestInput,
    RequestOutput,
    ResponseOutput,
)


class MLModel:
    """The base of models. Write `load`, `predict` or `predict_stream`, and `unload`."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self.ready = False

    async def load(self) -> bool:
        """Load the model; return whether it is ready."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Return the response to a request."""
        raise NotImplementedError("expected a predict of the model's own class")

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        """Yield the responses to requests."""
        yield await self.predict(await anext(payloads))

    async def unload(self) -> bool:
        """Release what the model holds."""
        return True

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self._settings.name)

    @property
    def version(self) -> str | None:
        """The version that its settings name."""
        version: str | None = self._settings.version
        return version

    @property
    def settings(self) -> Any:
        """Its `ModelSettings`."""
        return self._settings

    @property
    def inputs(self) -> Sequence[MetadataTensor]:
        """What its settings, or its `load`, say of inputs."""
        inputs: Sequence[MetadataTensor] = self._settings.inputs
        return inputs

    @inputs.setter
    def inputs(self, value: Sequence[MetadataTensor]) -> None:
        self._settings.inputs = list(value)

    @property
    def outputs(self) -> Sequence[MetadataTensor]:
        """What its settings, or its `load`, say of outputs."""
        outputs: Sequence[MetadataTensor] = self._settings.outputs
        return outputs

    @outputs.setter
    def outputs(self, value: Sequence[MetadataTensor]) -> None:
        self._settings.outputs = list(value)

    def decode(self, request_input: RequestInput, default_codec: Any = None) -> Any:
        """Return an input's value, by its content type, or that of the settings, or else by the default."""
        codecs.decode_request_input(request_input, {spec.name: spec for spec in self.inputs})
        if codecs.has_decoded(request_input):
            return codecs.get_decoded(request_input)
        return request_input.data if default_codec is None else default_codec.decode_input(request_input)

    def decode_request(self, inference_request: InferenceRequest, default_codec: Any = None) -> Any:
        """Return a request's value, by its content type, or that of the settings, or else by the default."""
        specs = {spec.name: spec for spec in self.inputs}
        codecs.decode_inference_request(inference_request, self._settings, specs)
        if codecs.has_decoded(inference_request):
            return codecs.get_decoded(inference_request)
        return inference_request if default_codec is None else default_codec.decode_request(inference_request)

    def encode_response(self, payload: Any, default_codec: Any = None) -> InferenceResponse:
        """Return the response with a value, by its type or else by the default. Raise `CodecNotFound`."""
        codec = codecs.find_request_codec_by_payload(payload) or default_codec
        if codec is None:
            raise CodecNotFound(f"no codec for a response of type {type(payload).__name__}")
        response: InferenceResponse = codec.encode_response(self.name, payload, self.version)
        return response

    def encode(self, payload: Any, request_output: RequestOutput, default_codec: Any = None) -> ResponseOutput:
        """Return the output with a value, by the content type or else by the default. Raise `CodecNotFound`."""
        specs = {spec.name: spec for spec in self.outputs}
        encoded = codecs.encode_response_output(payload, request_output, specs)
        if encoded is None:
            if default_codec is None:
                raise CodecNotFound(f"no codec for the output {request_output.name}")
            encoded = default_codec.encode_output(request_output.name, payload)
        return encoded

    async def metadata(self) -> MetadataModelResponse:
        """Return what the settings say of the model."""
        settings = self._settings
        return MetadataModelResponse(
            name=self.name,
            platform=settings.platform,
            versions=settings.versions,
            inputs=settings.inputs,
            outputs=settings.outputs,
        )


MLModel.__module__ = "mlserver.model"
