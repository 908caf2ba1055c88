// Makes calls with @connectrpc/connect-node, and messages of @bufbuild/protobuf.
"use strict";
const {readFileSync} = require("node:fs");
const {connect} = require("node:net");
const {createFileRegistry, fromBinary, toBinary} = require("@bufbuild/protobuf");
const {FileDescriptorSetSchema} = require("@bufbuild/protobuf/wkt");
const {ConnectError, createClient, encodeBinaryHeader} = require("@connectrpc/connect");
const {compressionGzip, createGrpcTransport} = require("@connectrpc/connect-node");
const {CODES} = require("./grpc_js.js");
const {pairs, request, response, result, run, sending} = require("./calls.js");

const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, readFileSync(process.env.DESCRIPTORS)));
const COMPRESSION = {gzip: compressionGzip};
const transports = new Map();

function transport(connection, compression = "") {
    if (!transports.has(compression)) {
        const {address, ca, certificate, key} = connection;
        const file = path => path ? readFileSync(path) : undefined;
        const nodeOptions = {ca: file(ca), cert: file(certificate), key: file(key)};
        const unix = address.startsWith("unix:");
        if (unix) nodeOptions.createConnection = () => connect(address.slice("unix:".length));
        const options = {
            baseUrl: `${ca ? "https" : "http"}://${unix ? "localhost" : address}`,
            nodeOptions,
            sendCompression: COMPRESSION[compression],
        };
        if (connection.keepalive_ms) Object.assign(options, {pingIntervalMs: connection.keepalive_ms, pingIdleConnection: true});
        transports.set(compression, createGrpcTransport(options));
    }
    return transports.get(compression);
}

// The method's descriptor; an unknown one is ModelInfer's by another name.
function method(path) {
    const [, service, name] = path.split("/");
    const {methods} = registry.getService(service);
    return methods.find(known => known.name === name) ?? {...methods.find(known => known.name === "ModelInfer"), name};
}

async function make(connection, call) {
    if (call.compression && !COMPRESSION[call.compression])
        return result("UNSUPPORTED", `the package has no ${call.compression}`, []);
    const called = method(call.method);
    const client = createClient({...called.parent, methods: [called]}, transport(connection, call.compression));
    const cancelling = new AbortController();
    let trailers = new Headers();
    const options = {
        signal: cancelling.signal,
        headers: pairs(call).map(([name, value]) => [name, name.endsWith("-bin") ? encodeBinaryHeader(value) : value]),
        onTrailer: received => { trailers = received; },
        timeoutMs: call.timeout_ms,
    };
    const messages = call.requests.map(described => fromBinary(called.input, request(described)));
    const received = message => response(toBinary(called.output, message), call.tail);
    const responses = [];
    try {
        if (call.kind === "unary") responses.push(received(await client[called.localName](messages[0], options)));
        else {
            const [sent, next] = sending(messages, call.turns);
            for await (const message of client[called.localName](call.kind === "bidi" ? sent : messages[0], options)) {
                responses.push(received(message));
                next();
                if (responses.length === call.leave_after) break;
                if (responses.length === call.cancel_after) cancelling.abort();
            }
            if (call.leave_after) return result("LEFT", "", responses);
        }
        return result("OK", "", responses, Object.fromEntries(trailers));
    } catch (error) {
        if (!(error instanceof ConnectError)) throw error;
        return result(CODES[error.code], error.rawMessage, responses, Object.fromEntries(error.metadata));
    }
}

run(make);
