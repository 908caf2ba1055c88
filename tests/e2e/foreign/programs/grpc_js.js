// Makes calls with @grpc/grpc-js.
"use strict";
const {readFileSync} = require("node:fs");
const grpc = require("@grpc/grpc-js");
const {pairs, request, response, result, run} = require("./calls.js");

const CODES = Object.fromEntries(Object.entries(grpc.status).map(([name, number]) => [number, name]));
const RETRIES = {methodConfig: [{name: [{}], retryPolicy: {
    maxAttempts: 4, initialBackoff: "0.1s", maxBackoff: "1s", backoffMultiplier: 2, retryableStatusCodes: ["UNAVAILABLE"],
}}]};
const same = bytes => bytes;

function open(connection) {
    const file = name => connection[name] ? readFileSync(connection[name]) : null;
    const options = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1};
    if (connection.keepalive_ms) options["grpc.keepalive_time_ms"] = connection.keepalive_ms;
    if (connection.retries) options["grpc.service_config"] = JSON.stringify(RETRIES);
    const credentials = connection.ca
        ? grpc.credentials.createSsl(file("ca"), file("key"), file("certificate"))
        : grpc.credentials.createInsecure();
    return [connection.address, credentials, options];
}

async function make(connection, call) {
    const requests = call.requests.map(request);
    const metadata = new grpc.Metadata();
    for (const [name, value] of pairs(call)) metadata.add(name, value);
    const options = {};
    if (call.timeout_ms !== undefined) options.deadline = Date.now() + call.timeout_ms;
    const client = clientFor(connection, call.compression);
    const unary = call.kind === "unary";
    const responses = [];
    if (unary)
        return await new Promise(resolve => {
            const rpc = client.makeUnaryRequest(call.method, same, same, requests[0], metadata, options, (error, message) => {
                if (!error) responses.push(response(message, call.tail));
            });
            rpc.on("status", status => resolve(
                result(CODES[status.code], status.details, responses, status.metadata.getMap())));
        });
    const rpc = call.kind === "server_stream"
        ? client.makeServerStreamRequest(call.method, same, same, requests[0], metadata, options)
        : client.makeBidiStreamRequest(call.method, same, same, metadata, options);
    const status = new Promise(resolve => rpc.on("status", resolve));
    const left = [...requests];
    const send = () => left.length ? rpc.write(left.shift()) : rpc.end();
    if (call.turns) send();
    else if (call.kind === "bidi") {
        while (left.length) send();
        send();
    }
    try {
        for await (const message of rpc) {
            responses.push(response(message, call.tail));
            if (call.turns) send();
            if (responses.length === call.leave_after) break;
            if (responses.length === call.cancel_after) rpc.cancel();
        }
        if (call.leave_after) return result("LEFT", "", responses);
    } catch (error) {
        if (error.code === undefined) throw error;
    }
    const {code, details, metadata: trailers} = await status;
    return result(CODES[code], details, responses, trailers.getMap());
}

const clients = new Map();
function clientFor(connection, compression = "") {
    if (!clients.has(compression)) {
        const [address, credentials, options] = open(connection);
        if (compression) options["grpc.default_compression_algorithm"] = grpc.compressionAlgorithms[compression];
        clients.set(compression, new grpc.Client(address, credentials, options));
    }
    return clients.get(compression);
}

exports.CODES = CODES;
exports.open = open;
if (require.main === module) run(make);
