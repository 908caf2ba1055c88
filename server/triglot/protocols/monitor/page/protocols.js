// ---- the protocols: the form's call as a REST request, and the response

// A request: `path` below the server's root, `headers`, `pieces` of the body, `streams`, and `binary` for a response that is not text.
// A call: `name`, `version` ("" for the default one), `serves` and `signature` as the server describes them, `signatureName`,
// `tensors`, `parameters`, and `body` for the protocol's own JSON in place of tensors.

const JSON_TYPE = { "Content-Type": "application/json" };
const pathOf = (name, version) => encodeURIComponent(name) + (version ? `/versions/${version}` : "");

// KServe V2. Responses are binary tensors, which are exact; a stream's events are JSON.
const kserve = {
  title: "KServe V2",
  fields: signature => signature.inputs,

  request(call, forPage = false) {
    const streams = call.serves.decoupled, tail = [];
    const inputs = call.tensors.map(tensor => {
      const head = { name: tensor.name, datatype: tensor.datatype, shape: tensor.shape };
      if (!tensor.raw) return { ...head, data: tensor.flat() };
      const pieces = tensor.pieces();
      tail.push(...pieces);
      return { ...head, parameters: { binary_data_size: sizeOf(pieces) } };
    });
    const binary = !streams && (forPage || call.signature.outputs.some(one => BINARY_ONLY.includes(one.datatype)));
    const parameters = { ...this.parameters(call), ...(binary && { binary_data_output: true }) };
    const head = jsonPieces({ ...(Object.keys(parameters).length && { parameters }), inputs });
    return {
      path: `v2/models/${pathOf(call.name, call.version)}/${streams ? "infer_stream" : "infer"}`,
      headers: tail.length ? { "Inference-Header-Content-Length": String(sizeOf(head)), "Content-Type": "application/octet-stream" } : {},
      pieces: [...head, ...tail],
      streams,
      binary,
    };
  },

  parameters: call => ({
    ...call.parameters,
    ...(call.signatureName !== call.serves.default_signature && { signature_name: call.signatureName }),
  }),

  async answer(response) {
    const buffer = await response.arrayBuffer();
    const length = Number(response.headers.get("Inference-Header-Content-Length") ?? buffer.byteLength);
    let at = length;
    return this.outputs(new TextDecoder().decode(buffer.slice(0, length)), size => {
      at += size;
      return new DataView(buffer, at - size, size);
    });
  },

  outputs(text, next) {
    const body = readJson(text);
    const outputs = (body.outputs ?? []).map(({ name, datatype, shape, data, parameters }) => {
      const size = parameters?.binary_data_size;
      if (size !== undefined) return Output.ofBytes(name, datatype, shape, next(size));
      return new Output(name, datatype, shape, index => data[index]);
    });
    return { outputs, more: body.parameters ? { parameters: body.parameters } : {}, error: body.error };
  },

  // Splits a text into complete events, and the rest.
  split(text) {
    const events = text.split("\n\n"), rest = events.pop();
    return [events.map(event => event.replace(/^data: /, "")), rest];
  },
};

// TensorFlow Serving. Its responses have no datatypes: the signature's are used.
const tfserving = {
  title: "TF Serving",

  fields(signature, serves) {
    if (serves.speaks_json) return [{ name: "instances", sample: { shape: [1], data: [1.5] } }];
    return signature.method === "predict" ? signature.inputs : [{ name: "examples", sample: { shape: [1], data: [{}] } }];
  },

  request(call) {
    // Without a name the default signature is called.
    const named = call.signatureName === "serving_default" ? {} : { signature_name: call.signatureName };
    const inputs = call.tensors.map(tensor => [tensor.name, tensor.nested(pieces => ({ b64: new Base64(pieces) }))]);
    const method = call.serves.speaks_json ? "predict" : call.signature.method;
    return {
      path: `v1/models/${pathOf(call.name, call.version)}:${method}`,
      headers: {},
      pieces: jsonPieces({ ...named, ...(call.body ?? { inputs: Object.fromEntries(inputs) }) }),
    };
  },

  async answer(response, call) {
    const { outputs: given, ...more } = readJson(await response.text());
    if (given === undefined) return { outputs: [], more };
    const specs = call.signature.outputs;
    // A single output is sent bare.
    const tensors = specs.length === 1 ? { [specs[0].name]: given } : given;
    const bytes = value => Array.isArray(value) ? value.map(bytes)
      : typeof value?.b64 === "string" ? Uint8Array.from(atob(value.b64), char => char.charCodeAt(0)) : value;
    const outputs = Object.entries(tensors).map(([name, value]) =>
      Output.ofValue(name, specs.find(one => one.name === name)?.datatype ?? "", bytes(value)));
    return { outputs, more };
  },
};

// grps. Its JSON has strings; bytes need a message of their own.
const grps = {
  title: "grps",
  fields: signature => signature.inputs,

  request(call) {
    if (call.signatureName !== call.serves.default_signature) throw new Unfit("grps calls only the default signature");
    const streams = call.serves.decoupled && Boolean(call.server.grps_streaming), model = this.model(call);
    const query = { ...(streams && { [call.server.grps_streaming]: "true" }), ...(this.file(call) && { model }) };
    return {
      path: `grps/v1/infer/predict${Object.keys(query).length ? `?${new URLSearchParams(query)}` : ""}`,
      ...(this.file(call)
        ? { headers: { "Content-Type": "application/octet-stream" }, pieces: [this.file(call)] }
        : { headers: JSON_TYPE, pieces: jsonPieces(this.message(call)) }),
      streams,
    };
  },

  model: call => `${call.name}-${call.version || call.serves.version}`,

  file(call) {
    const files = call.tensors.flatMap(tensor => (tensor.datatype === "BYTES" && tensor.files) || []);
    if (!files.length) return undefined;
    if (files.length > 1 || call.tensors.length > 1) throw new Unfit("a grps request carries one file and no other input");
    return files[0];
  },

  message(call) {
    const file = this.file(call);
    if (file) return { model: this.model(call), bin_data: new Base64([file]) };
    const tensors = call.tensors.map(tensor => {
      const field = tensor.fields.grps;
      if (!field) throw new Unfit(`grps has no ${tensor.datatype}`);
      return { name: tensor.name, dtype: field.toUpperCase().replace("FLAT", "DT"), shape: tensor.shape, [field]: tensor.flat() };
    });
    return { model: this.model(call), gtensors: { tensors } };
  },

  async answer(response) {
    if (response.headers.get("Content-Type")?.startsWith("application/octet-stream")) {
      const bytes = new Uint8Array(await response.arrayBuffer());
      return { outputs: [new Output("bin_data", "bytes", [], () => bytes)], more: {} };
    }
    return this.outputs(await response.text());
  },

  outputs(text) {
    const { gtensors, status, ...more } = readJson(text);
    const outputs = (gtensors?.tensors ?? []).map(({ name = "", dtype, shape = [], ...lists }) => {
      const data = Object.values(lists)[0] ?? [];
      // 64-bit integers, NaN and infinities are strings.
      const number = value => (/^-?\d+$/.test(value) ? BigInt(value) : Number(value));
      const at = index => (typeof data[index] === "string" && dtype !== "DT_STRING" ? number(data[index]) : data[index]);
      return new Output(name, String(dtype).replace("DT_", ""), shape, at);
    });
    return { outputs, more, error: status?.status === "FAILURE" ? text : undefined };
  },

  // Splits a text into documents of several lines, each of which ends with a brace at the beginning of a line.
  split(text) {
    const ends = [...text.matchAll(/^\}\n/gm)].map(match => match.index + 2);
    return [ends.map((end, at) => text.slice(ends[at - 1] ?? 0, end)), text.slice(ends.at(-1) ?? 0)];
  },
};

const DIALECTS = { kserve, tfserving, grps };

// Reads a response; returns JSON of an unknown form as it is.
async function readAnswer(dialect, response, call) {
  const copy = response.clone();
  try {
    return await dialect.answer(response, call);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { outputs: [], more: {}, text: await copy.text() };
  }
}

// Yields the responses of a stream as they arrive.
async function* readStream(dialect, response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    const [texts, left] = dialect.split(rest + (value ?? ""));
    for (const text of done && left.trim() ? [...texts, left] : texts) {
      try {
        yield dialect.outputs(text);
      } catch {
        yield { outputs: [], more: {}, text };
      }
    }
    if (done) return;
    rest = left;
  }
}
