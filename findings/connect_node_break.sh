#!/bin/bash
# @connectrpc/connect-node 2.1.2: leaving a `for await` over a stream of responses does not end the call.
#
# In JavaScript, `break` in a `for await` calls the iterator's `return`, which ends fetch bodies, Node's streams and
# generators, and grpc-js has `call.cancel()`. Here no RST_STREAM is sent: the server goes on to stream to nobody, and
# the client receives all of it. Only an AbortSignal ends the call.
#
# A server of plain node:http2 sends up to 20 messages, one each 50 ms, and notes how its stream ends.
# Output seen, on Node 20.20:
#   break:            the server sent 20 of 20 messages, its stream ended with code 0
#   abort and break:  the server sent 2 of 20 messages, its stream ended with code 8
# Exits 0 while that is so, and 1 when `break` alone ends the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init -y >/dev/null
npm install --silent --no-audit --no-fund @connectrpc/connect@2.1.2 @connectrpc/connect-node@2.1.2 @bufbuild/protobuf@2.17.0
cat > run.mjs <<'JS'
import http2 from "node:http2";
import { create, createFileRegistry } from "@bufbuild/protobuf";
import { FileDescriptorProtoSchema } from "@bufbuild/protobuf/wkt";
import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

const MESSAGES = 20;
const method = { name: "Count", inputType: ".ticks.Tick", outputType: ".ticks.Tick", serverStreaming: true };
const file = create(FileDescriptorProtoSchema, {
  name: "ticks.proto",
  package: "ticks",
  syntax: "proto3",
  messageType: [{ name: "Tick" }],
  service: [{ name: "Ticks", method: [method] }],
});
const service = createFileRegistry(file, () => undefined).getService("ticks.Ticks");

let sent = 0;
let ended;
const server = http2.createServer();
server.on("stream", (stream) => {
  sent = 0;
  stream.respond({ ":status": 200, "content-type": "application/grpc+proto" }, { waitForTrailers: true });
  stream.on("wantTrailers", () => stream.sendTrailers({ "grpc-status": "0" }));
  stream.on("error", () => {});
  const timer = setInterval(() => {
    if (sent === MESSAGES) return stream.end();
    sent += 1;
    stream.write(Buffer.alloc(5)); // An empty message.
  }, 50);
  stream.on("close", () => { clearInterval(timer); ended(stream.rstCode); });
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));

const transport = createGrpcTransport({ baseUrl: `http://127.0.0.1:${server.address().port}` });
const client = createClient(service, transport);
const results = [];
for (const aborts of [false, true]) {
  const code = new Promise((resolve) => { ended = resolve; });
  const controller = new AbortController();
  let received = 0;
  for await (const _ of client.count({}, { signal: controller.signal })) {
    received += 1;
    if (received === 2) {
      if (aborts) controller.abort();
      break;
    }
  }
  const what = aborts ? "abort and break: " : "break:           ";
  console.log(`${what} the server sent ${await code.then((rst) => { results.push(rst); return sent; })} of ${MESSAGES} messages, its stream ended with code ${results.at(-1)}`);
}
process.exit(results[0] === 0 && results[1] === 8 ? 0 : 1);
JS
node run.mjs
