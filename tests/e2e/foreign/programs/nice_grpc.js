// Makes calls with nice-grpc.
"use strict";
const {ClientError, createChannel, createClientFactory, Metadata} = require("nice-grpc");
const {deadlineMiddleware} = require("nice-grpc-client-middleware-deadline");
const {retryMiddleware} = require("nice-grpc-client-middleware-retry");
const grpc = require("@grpc/grpc-js");
const {CODES, open} = require("./grpc_js.js");
const {pairs, request, response, result, run, sending} = require("./calls.js");

const same = bytes => bytes;
const channels = new Map();

function channel(connection, compression = "") {
    if (!channels.has(compression)) {
        const [address, credentials, options] = open({...connection, retries: false});
        if (compression) options["grpc.default_compression_algorithm"] = grpc.compressionAlgorithms[compression];
        channels.set(compression, createChannel(address.replace(/^unix:/, "unix://"), credentials, options));
    }
    return channels.get(compression);
}

async function make(connection, call) {
    const definition = {call: {
        path: call.method, requestStream: call.kind === "bidi", responseStream: call.kind !== "unary",
        requestSerialize: same, requestDeserialize: same, responseSerialize: same, responseDeserialize: same,
        options: connection.retries ? {idempotencyLevel: "IDEMPOTENT"} : {},
    }};
    const client = createClientFactory().use(retryMiddleware).use(deadlineMiddleware)
        .create(definition, channel(connection, call.compression));
    const cancelling = new AbortController();
    let trailers = {};
    const metadata = new Metadata();
    for (const [name, value] of pairs(call)) metadata.append(name, value);
    const options = {metadata, signal: cancelling.signal, onTrailer: received => { trailers = received; }};
    if (call.timeout_ms !== undefined) options.deadline = call.timeout_ms;
    if (connection.retries) options.retry = true;
    const requests = call.requests.map(request);
    const named = () => Object.fromEntries([...trailers].map(([name, values]) => [name, values[0]]));
    const responses = [];
    try {
        if (call.kind === "unary") responses.push(response(await client.call(requests[0], options), call.tail));
        else {
            const [messages, next] = sending(requests, call.turns);
            for await (const message of client.call(call.kind === "bidi" ? messages : requests[0], options)) {
                responses.push(response(message, call.tail));
                next();
                if (responses.length === call.leave_after) return result("LEFT", "", responses);
                if (responses.length === call.cancel_after) cancelling.abort();
            }
        }
        return result("OK", "", responses, named());
    } catch (error) {
        if (error.name === "AbortError") return result("CANCELLED", "", responses);
        if (!(error instanceof ClientError)) throw error;
        return result(CODES[error.code], error.details, responses, named());
    }
}

run(make);
