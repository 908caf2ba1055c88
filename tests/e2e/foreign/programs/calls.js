// What the programs of Node share: calls in, results out.
"use strict";
const {createInterface} = require("node:readline");
const {crc32} = require("node:zlib");

const BLOCK = 65521;

function pattern(size) {
    const block = Buffer.alloc(BLOCK);
    let x = 1;
    for (let at = 0; at < BLOCK; at++) {
        x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
        block[at] = x >>> 24;
    }
    return Buffer.alloc(size, block);
}

exports.request = ({head, fill = 0}) => Buffer.concat([Buffer.from(head, "base64"), pattern(fill)]);

exports.response = (message, tail = 0) => {
    const bytes = Buffer.from(message.buffer, message.byteOffset, message.byteLength);
    const cut = bytes.length - tail;
    return {head: bytes.toString("base64", 0, cut), crc32: crc32(bytes.subarray(cut))};
};

exports.pairs = call => (call.metadata ?? []).map(
    ([name, value]) => [name, name.endsWith("-bin") ? Buffer.from(value, "base64") : value]);

exports.result = (code, message, responses, trailers = {}) => ({
    code, message, responses,
    trailers: Object.fromEntries(Object.entries(trailers).map(
        ([name, value]) => [name, typeof value === "string" ? value : Buffer.from(value).toString("base64")])),
});

// Yields the requests: all at once, or in turns, each but the first after `next` was called; then the half-close.
exports.sending = (requests, turns) => {
    let next = () => {};
    async function* messages() {
        for (const request of requests) {
            const turn = new Promise(resolve => { next = resolve; });
            yield request;
            if (turns) await turn;
        }
    }
    return [messages(), () => next()];
};

async function repeat(make, connection, call) {
    const end = performance.now() + call.repeat_seconds * 1000;
    const codes = {};
    let shown;
    while (performance.now() < end) {
        const last = await make(connection, call);
        codes[last.code] = (codes[last.code] ?? 0) + 1;
        if (shown === undefined || shown.code === "OK") shown = last;
    }
    return {...shown, codes};
}

// Make each call that stdin has with `make(connection, call)`, one after the other.
exports.run = async make => {
    const connection = JSON.parse(process.argv[2]);
    for await (const line of createInterface({input: process.stdin})) {
        const call = JSON.parse(line);
        const result = await (call.repeat_seconds ? repeat(make, connection, call) : make(connection, call));
        process.stdout.write(JSON.stringify(result) + "\n");
    }
    process.exit(0);
};
