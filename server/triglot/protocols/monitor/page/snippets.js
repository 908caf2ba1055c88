// ---- the same call for a terminal: curl, Python, grpcurl

// A shell's argument is limited to 128 KiB; longer data is piped. Snippets too long to paste are omitted.
const LONGEST_ARGUMENT = 100_000, LONGEST_SNIPPET = 300_000;

const shellWord = text => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
// A bare name could be parsed as an option.
const fileWord = file => shellWord(file.name.startsWith("-") ? `./${file.name}` : file.name);

// Returns a command that prints the pieces.
function printing(pieces) {
  const commands = pieces.map(piece => {
    if (piece instanceof Zeros) return `head -c ${piece.size} /dev/zero`;
    if (piece instanceof Base64) return `${printing(piece.pieces)} | base64 | tr -d '\\n'`;
    if (piece instanceof File) return `cat ${fileWord(piece)}`;
    if (typeof piece === "string") return `printf %s ${shellWord(piece)}`;
    return `printf '${[...piece].map(byte => `\\${byte.toString(8).padStart(3, "0")}`).join("")}'`;
  });
  return commands.length === 1 ? commands[0] : `{ ${commands.join("; ")}; }`;
}

// `words(data, piped)` returns the words of a command that gets the pieces as an argument, or reads them.
function command(pieces, words) {
  const [text, ...more] = pieces;
  if (!more.length && typeof text === "string" && text.length < LONGEST_ARGUMENT) return words(shellWord(text), false).join(" ");
  return `${printing(pieces)} | ${words("@-", true).join(" ")}`;
}

function curl(request, url, tls, token) {
  const headers = Object.entries(request.headers).flatMap(([name, value]) => ["-H", shellWord(`${name}: ${value}`)]);
  const flags = [request.streams ? "-sN" : "-s", ...(tls ? ["-k"] : []), ...(request.binary ? ["-o", "answer.bin"] : [])];
  return command(request.pieces, (data, piped) =>
    ["curl", ...flags, shellWord(url), ...headers, ...(token ? [TOKEN_FIELD] : []), piped ? "--data-binary" : "-d", data]);
}

function grpcurl(message, method, address, tls, token) {
  return command(jsonPieces(message), (data, piped) =>
    ["grpcurl", tls ? "-insecure" : "-plaintext", ...(token ? [TOKEN_FIELD] : []), "-d", piped ? "@" : data, address, method]);
}

// ---- Python literals: JSON's strings and numbers are valid in Python

const python = value => {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value === null) return "None";
  if (typeof value !== "object") return scalarText(value);
  return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one)}`).join(", ")}}`;
};

function pythonArray(tensor) {
  const shape = python(tensor.shape), dtype = ELEMENTS[tensor.datatype]?.[2];
  if (!dtype) throw new Unfit(`numpy has no ${tensor.datatype}`);
  if (tensor.zeros || tensor.shape.includes(0)) return `np.zeros(${shape}, ${dtype})`;
  const reshaped = tensor.shape.length === 1 ? "" : `.reshape(${shape})`;
  const path = file => python(file.name);
  if (tensor.files && tensor.datatype === "BYTES") {
    return `np.array([${tensor.files.map(file => `pathlib.Path(${path(file)}).read_bytes()`).join(", ")}], object)${reshaped}`;
  }
  if (tensor.files) {
    const [file] = tensor.files;
    // numpy can read its own dtypes only.
    return tensor.datatype === "BF16" ? `np.fromfile(${path(file)}, np.uint16).view(${dtype})${reshaped}` : `np.fromfile(${path(file)}, ${dtype})${reshaped}`;
  }
  return `np.array(${python(tensor.nested())}, ${dtype})`;
}

// `standard` are further modules of Python's standard library.
function imports(call, standard, ...others) {
  const own = [...(call.tensors.some(one => one.files && one.datatype === "BYTES") ? ["import pathlib"] : []), ...standard];
  const numbers = [...(call.tensors.some(one => one.datatype === "BF16") ? ["import ml_dtypes"] : []), "import numpy as np"];
  return [...own, ...(own.length ? [""] : []), ...numbers, ...others, ""].join("\n");
}

const PYTHON_TOKEN = `f"Bearer {os.environ['${TOKEN_VARIABLE}']}"`;
const RESERVED = ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"];

Object.assign(kserve, {
  python(call, where) {
    const streams = call.serves.decoupled, given = Object.entries(this.parameters(call));
    const kind = streams ? "grpc" : "http";
    if (streams && !where.grpc) throw new Unfit("streaming needs gRPC, and its port is disabled");
    const names = call.tensors.map(tensor => `    triton.InferInput(${python(tensor.name)}, ${python(tensor.shape)}, ${python(tensor.datatype)}),`);
    const more = given.filter(([name]) => !RESERVED.includes(name));
    const options = [
      ...(call.version ? [`model_version=${python(call.version)}`] : []),
      ...given.filter(([name]) => RESERVED.includes(name)).map(([name, value]) => `${name}=${python(value)}`),
      ...(more.length ? [`parameters=${python(Object.fromEntries(more))}`] : []),
    ];
    const asked = [python(call.name), "inputs", ...options].join(", ");
    const outputs = call.signature.outputs.map(one => `as_numpy(${python(one.name)})`);
    const print = indent => (outputs.length ? outputs : ["get_response()"]).map(one => `${indent}print(result.${one})`).join("\n");
    const token = where.token ? `, headers={"authorization": ${PYTHON_TOKEN}}` : "";
    const address = streams ? where.grpc : where.rest;
    const secure = (streams ? where.grpcTls : where.tls) ? ", ssl=True" : "";
    return [
      imports(call, [...(token ? ["import os"] : []), ...(streams ? ["import queue"] : [])], `import tritonclient.${kind} as triton`),
      `client = triton.InferenceServerClient(${python(address)}${secure})`,
      names.length ? ["inputs = [", ...names, "]"].join("\n") : "inputs = []",
      ...call.tensors.map((tensor, at) => `inputs[${at}].set_data_from_numpy(${pythonArray(tensor)})`),
      ...(streams ? [
        "answers = queue.Queue()",
        "client.start_stream(lambda result, error: answers.put((result, error))" + token + ")",
        `client.async_stream_infer(${asked}, enable_empty_final_response=True)`,
        "while True:",
        "    result, error = answers.get()",
        "    if error is not None:",
        "        raise error",
        "    if result.get_response().outputs:",
        print("        "),
        '    if result.get_response().parameters["triton_final_response"].bool_param:',
        "        break",
        "client.stop_stream()",
      ] : [`result = client.infer(${asked}${token})`, print("")]),
    ].join("\n");
  },

  grpcurl(call) {
    // Either all inputs are raw tensors, or none.
    const raw = call.tensors.some(tensor => tensor.raw && !(tensor.datatype === "BYTES"));
    const inputs = call.tensors.map(tensor => ({
      name: tensor.name,
      datatype: tensor.datatype,
      shape: tensor.shape,
      ...(!raw && { contents: { [tensor.fields.kserve]: messageElements(tensor) } }),
    }));
    const kinds = { boolean: "bool_param", string: "string_param", bigint: "int64_param", object: "string_param" };
    const parameters = Object.entries(this.parameters(call)).map(([name, value]) =>
      [name, { [typeof value === "number" ? (Number.isInteger(value) ? "int64_param" : "double_param") : kinds[typeof value]]: value }]);
    const message = {
      model_name: call.name,
      ...(call.version && { model_version: call.version }),
      ...(parameters.length && { parameters: Object.fromEntries(parameters) }),
      inputs,
      ...(raw && { raw_input_contents: call.tensors.map(tensor => new Base64(tensor.pieces())) }),
    };
    return [message, `inference.GRPCInferenceService/${call.serves.decoupled ? "ModelStreamInfer" : "ModelInfer"}`];
  },
});

// Elements in protobuf's JSON mapping: bytes as base64.
function messageElements(tensor) {
  const values = tensor.flat(pieces => new Base64(pieces));
  return values.map(value => (value instanceof Base64 && value.pieces[0] instanceof Uint8Array ? base64(value.pieces[0]) : value));
}

Object.assign(tfserving, {
  check(call) {
    if (call.body) throw new Unfit("only REST takes this JSON");
    if (call.signature.method !== "predict") throw new Unfit(`a ${call.signature.method} call takes examples, over REST`);
  },

  python(call, where) {
    this.check(call);
    if (!where.grpc) throw new Unfit("the client needs gRPC, and its port is disabled");
    const channel = where.grpcTls ? `secure_channel(${python(where.grpc)}, grpc.ssl_channel_credentials())` : `insecure_channel(${python(where.grpc)})`;
    const token = where.token ? `, metadata=[("authorization", ${PYTHON_TOKEN})]` : "";
    return [
      imports(call, where.token ? ["import os"] : [], "import grpc", "import tensorflow as tf", "from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc"),
      `channel = grpc.${channel}`,
      "request = predict_pb2.PredictRequest()",
      `request.model_spec.name = ${python(call.name)}`,
      ...(call.version ? [`request.model_spec.version.value = ${call.version}`] : []),
      ...(call.signatureName === "serving_default" ? [] : [`request.model_spec.signature_name = ${python(call.signatureName)}`]),
      ...call.tensors.map(tensor =>
        `request.inputs[${python(tensor.name)}].CopyFrom(tf.make_tensor_proto(${pythonArray(tensor)}))`),
      "answer = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=10" + token + ")",
      "for name, tensor in answer.outputs.items():",
      "    print(name, tf.make_ndarray(tensor))",
    ].join("\n");
  },

  grpcurl(call) {
    this.check(call);
    const inputs = call.tensors.map(tensor => {
      const { dtype, tfserving: field } = tensor.fields;
      if (!field) throw new Unfit(`${tensor.datatype} is not written here`);
      const raw = tensor.raw && tensor.datatype !== "BYTES";
      const elements = raw ? { tensor_content: new Base64(tensor.pieces()) } : { [field]: messageElements(tensor) };
      return [tensor.name, { dtype, tensor_shape: { dim: tensor.shape.map(size => ({ size })) }, ...elements }];
    });
    const model_spec = {
      name: call.name,
      ...(call.version && { version: call.version }),
      ...(call.signatureName !== "serving_default" && { signature_name: call.signatureName }),
    };
    return [{ model_spec, inputs: Object.fromEntries(inputs) }, "tensorflow.serving.PredictionService/Predict"];
  },
});

Object.assign(grps, {
  grpcurl(call) {
    this.request(call);
    return [this.message(call), `grps.protos.v1.GrpsService/${call.serves.decoupled ? "PredictStreaming" : "Predict"}`];
  },
});

// `root` is the server's address; `token`: the reader has one. Each snippet has a `text`, or a `note` with the reason why not.
function snippetsOf(dialect, call, root, token) {
  const tls = root.protocol === "https:", { grpc_port: port, tls: grpcTls } = call.server;
  const where = { rest: `${root.host}${root.pathname.replace(/\/$/, "")}`, grpc: port ? `${root.hostname}:${port}` : "", tls, grpcTls, token };
  const ways = {
    curl: () => {
      const request = dialect.request(call);
      return curl(request, new URL(request.path, root).href, tls, token);
    },
    Python: dialect.python && (() => dialect.python(call, where)),
    grpcurl: () => {
      if (!where.grpc) throw new Unfit("the gRPC port is disabled");
      return grpcurl(...dialect.grpcurl(call), where.grpc, grpcTls, token);
    },
  };
  return Object.entries(ways).filter(([, way]) => way).map(([name, way]) => {
    try {
      const text = way();
      return text.length > LONGEST_SNIPPET ? { name, note: `too long to paste: ${exact(text.length)} characters` } : { name, text };
    } catch (error) {
      if (!(error instanceof Unfit)) throw error;
      return { name, note: error.message };
    }
  });
}
