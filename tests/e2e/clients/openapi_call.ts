// Calls half_plus_two with the clients that openapi-typescript and hey-api generated: node openapi_call.js URL

import createClient from "openapi-fetch";
import type { paths } from "./types.js";
import { client } from "./hey/client.gen.js";
import { postV2ModelsHalfPlusTwoInfer } from "./hey/sdk.gen.js";
import type { InferRequest } from "./hey/types.gen.js";

declare const process: { argv: string[] };

const baseUrl = process.argv[2]!;
const body: InferRequest = { inputs: [{ name: "x", datatype: "FP32", shape: [2], data: [1.0, 5.0] }] };

const typed = (await createClient<paths>({ baseUrl }).POST("/v2/models/half_plus_two/infer", { body })).data;
if (!typed || typeof typed === "string") throw new Error("no outputs");
console.log(JSON.stringify(typed.outputs.map((output) => output.data)));

client.setConfig({ baseUrl });
const generated = (await postV2ModelsHalfPlusTwoInfer({ body })).data;
if (!generated || !("outputs" in generated)) throw new Error("no outputs");
console.log(JSON.stringify(generated.outputs.map((output) => output.data)));
