// Sends a number as a Float32Array, and as its bytes, in a message of protobufjs; prints what comes back.
"use strict";
const {readFileSync} = require("node:fs");
const grpc = require("@grpc/grpc-js");
const {loadFileDescriptorSetFromBuffer} = require("@grpc/proto-loader");

const protos = loadFileDescriptorSetFromBuffer(readFileSync(process.env.DESCRIPTORS), {keepCase: true});
const {inference} = grpc.loadPackageDefinition(protos);
const client = new inference.GRPCInferenceService(process.argv[2], grpc.credentials.createInsecure());
const x = new Float32Array([300]);

const infer = contents => new Promise(resolve => client.ModelInfer({
    model_name: "identity_fp32",
    inputs: [{name: "x", datatype: "FP32", shape: [1, 1]}],
    raw_input_contents: [contents],
}, (error, response) => resolve(error ? error.message : response.raw_output_contents[0].readFloatLE())));

(async () => {
    const bytes = new Uint8Array(x.buffer, x.byteOffset, x.byteLength);
    console.log(JSON.stringify([await infer(x), await infer(bytes)]));
    process.exit(0);
})();
