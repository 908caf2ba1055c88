// ---- tensors: typed, chosen as files, or received

// An error in the form, shown to the reader.
class Unfit extends Error { }

const MOST_VALUES = 200, MOST_TEXT = 2000;

// Binary form of elements: DataView's type name, size in bytes, numpy's dtype.
const ELEMENTS = {
  BOOL: ["Uint8", 1, "np.bool_"], INT8: ["Int8", 1, "np.int8"], INT16: ["Int16", 2, "np.int16"],
  INT32: ["Int32", 4, "np.int32"], INT64: ["BigInt64", 8, "np.int64"], UINT8: ["Uint8", 1, "np.uint8"],
  UINT16: ["Uint16", 2, "np.uint16"], UINT32: ["Uint32", 4, "np.uint32"], UINT64: ["BigUint64", 8, "np.uint64"],
  FP16: ["Float16", 2, "np.float16"], BF16: ["", 2, "ml_dtypes.bfloat16"], FP32: ["Float32", 4, "np.float32"],
  FP64: ["Float64", 8, "np.float64"], BYTES: ["", 0, "object"],
};
// Datatypes without a JSON form in KServe V2.
const BINARY_ONLY = ["FP16", "BF16", "COMPLEX64", "COMPLEX128"];

const product = dims => dims.reduce((all, dim) => all * dim, 1);
const itemSize = datatype => ELEMENTS[datatype]?.[1] ?? 0;
const scratch = new DataView(new ArrayBuffer(4));

function elementAt(view, datatype, index) {
  const [word, size] = ELEMENTS[datatype];
  if (datatype === "BF16") {
    scratch.setUint32(0, view.getUint16(index * 2, true) * 65536);
    return scratch.getFloat32(0);
  }
  const value = view[`get${word}`](index * size, true);
  if (datatype === "BOOL") return value !== 0;
  return typeof value === "bigint" && Number.isSafeInteger(Number(value)) ? Number(value) : value;
}

// Returns the number with the fewest digits that gives the same element.
function shortest(value, datatype) {
  if (!["FP16", "BF16", "FP32"].includes(datatype) || !Number.isFinite(value)) return value;
  for (let digits = 1; digits < 10; digits++) {
    const short = Number(value.toPrecision(digits));
    if (elementAt(new DataView(bytesOf([short], datatype).buffer), datatype, 0) === value) return short;
  }
  return value;
}

function bytesOf(values, datatype) {
  const [word, size] = ELEMENTS[datatype], view = new DataView(new ArrayBuffer(values.length * size));
  values.forEach((value, index) => {
    if (datatype === "BF16") {
      scratch.setFloat32(0, value);
      const bits = scratch.getUint32(0);
      // Rounds to nearest, ties to even.
      view.setUint16(index * 2, (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16, true);
      return;
    }
    try {
      view[`set${word}`](index * size, word.startsWith("Big") ? BigInt(value) : Number(value), true);
    } catch {
      throw new Unfit(`${jsonText(value)} is not a valid ${datatype}`);
    }
  });
  return new Uint8Array(view.buffer);
}

// ---- JSON with exact integers beyond 2^53

const exactly = (_, value, context) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
const readJson = text => JSON.parse(text, exactly);

function jsonText(value) {
  return jsonPieces(value).map(piece => (typeof piece === "string" ? piece : "…")).join("");
}

// ---- bodies: lists of strings, bytes, files, and these two; a request can send them, and a shell can make them

class Zeros {
  constructor(size) { this.size = size }
}

class Base64 {
  constructor(pieces) { this.pieces = pieces }
}

// JSON as typed: some models distinguish 3 from 3.0.
class Verbatim {
  constructor(text) { this.text = text }
}

function jsonPieces(value) {
  const pieces = [];
  const add = piece => {
    if (typeof piece === "string" && typeof pieces.at(-1) === "string") pieces.push(pieces.pop() + piece);
    else pieces.push(piece);
  };
  const each = (items, open, close, one) => {
    const texts = [];
    for (const item of items) texts.push(...(texts.length ? [", "] : []), ...one(item));
    return [open, ...texts, close];
  };
  const walk = value => {
    if (value instanceof Base64) return ['"', value, '"'];
    if (value instanceof Verbatim) return [value.text];
    if (Array.isArray(value)) {
      // Long lists of numbers are the usual case.
      if (value.every(item => typeof item !== "object")) return [`[${value.map(scalarText).join(", ")}]`];
      return each(value, "[", "]", walk);
    }
    if (value !== null && typeof value === "object") {
      return each(Object.entries(value), "{", "}", ([key, one]) => [`${JSON.stringify(key)}: `, ...walk(one)]);
    }
    return [scalarText(value)];
  };
  walk(value).forEach(add);
  return pieces;
}

function scalarText(value) {
  if (typeof value === "bigint") return String(value);
  return Object.is(value, -0) ? "-0.0" : JSON.stringify(value);
}

function base64(buffer) {
  const bytes = new Uint8Array(buffer);
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}
const utf8 = text => new TextEncoder().encode(text);

async function blobOf(pieces) {
  return new Blob(await Promise.all(pieces.map(async piece => {
    if (piece instanceof Zeros) return new Uint8Array(piece.size);
    if (piece instanceof Base64) return base64(await (await blobOf(piece.pieces)).arrayBuffer());
    return piece;
  })));
}

const sizeOf = pieces => pieces.reduce((size, piece) => size + (
  piece instanceof Base64 ? 4 * Math.ceil(sizeOf(piece.pieces) / 3) : piece.size ?? (typeof piece === "string" ? utf8(piece) : piece).length), 0);

// ---- one input of a call

function shapeOf(value, rank) {
  const shape = [];
  for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
  const fits = (value, depth) => depth === shape.length
    ? !Array.isArray(value)
    : Array.isArray(value) && value.length === shape[depth] && value.every(one => fits(one, depth + 1));
  if (!fits(value, 0)) throw new Unfit("ragged: the inner arrays differ in length");
  // An empty list has no information on the dims within it.
  while (shape.at(-1) === 0 && shape.length < rank) shape.push(0);
  return shape;
}

function nest(flat, shape) {
  if (!shape.length) return flat[0];
  const [count, ...inner] = shape, size = product(inner);
  return Array.from({ length: count }, (_, at) => nest(flat.slice(at * size, (at + 1) * size), inner));
}

// A tensor of the form: `shape`, and one of `value` (nested), `text`, `zeros`, `files`; files of numbers with their `bytes`.
class Tensor {
  constructor(spec, given) {
    Object.assign(this, { name: spec.name, datatype: spec.datatype, fields: spec.fields, ...given });
  }

  get binary() {
    return Boolean(this.zeros || this.files);
  }

  get raw() {
    return this.binary || BINARY_ONLY.includes(this.datatype);
  }

  // Returns the elements as a list; `ofBytes` makes an element from a file, or from a string's bytes.
  flat(ofBytes) {
    if (this.text !== undefined) return [ofBytes ? ofBytes([utf8(this.text)]) : this.text];
    if (this.zeros) return Array(product(this.shape)).fill(this.datatype === "BOOL" ? false : 0);
    if (this.files && this.datatype === "BYTES") return this.files.map(file => ofBytes([file]));
    if (this.files) {
      const view = new DataView(this.bytes);
      return Array.from({ length: view.byteLength / itemSize(this.datatype) }, (_, at) => elementAt(view, this.datatype, at));
    }
    const values = [this.value].flat(Infinity);
    return ofBytes && this.datatype === "BYTES" ? values.map(value => ofBytes([utf8(String(value))])) : values;
  }

  nested(ofFile) {
    if (this.value !== undefined) return this.value;
    return nest(this.flat(this.files ? ofFile : undefined), this.shape);
  }

  // Returns the binary form: strings and files have a length prefix.
  pieces() {
    if (this.zeros) return [new Zeros(product(this.shape) * itemSize(this.datatype))];
    if (this.datatype === "BYTES") {
      return this.flat(pieces => [bytesOf([sizeOf(pieces)], "UINT32"), ...pieces]).flat();
    }
    return this.files ? this.files : [bytesOf(this.flat(), this.datatype)];
  }
}

// ---- images as numbers

// Returns which dims of an input are an image's rows, columns and colours; undefined if there are none.
function imageLayout({ datatype, shape }) {
  if (!itemSize(datatype) || ["BOOL", "INT8"].includes(datatype) || !shape || shape.length < 3) return undefined;
  const [first, middle, last] = shape.slice(-3), isColours = dim => dim === 1 || dim === 3;
  if (shape.slice(0, -3).some(dim => dim !== -1 && dim !== 1)) return undefined;
  if (isColours(first)) return { colours: first, height: middle, width: last, planes: true };
  return isColours(last) ? { colours: last, height: first, width: middle, planes: false } : undefined;
}

// Returns `bytes` and `shape` of an image scaled to the input's size, from 0 to 255, or as floats from 0 to 1.
async function imageTensor(file, { datatype, shape }) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new Unfit(`${file.name} is not an image that the browser can decode`) });
  const layout = imageLayout({ datatype, shape }), { colours, planes } = layout;
  const height = layout.height < 0 ? bitmap.height : layout.height, width = layout.width < 0 ? bitmap.width : layout.width;
  const context = new OffscreenCanvas(width, height).getContext("2d", { alpha: false });
  context.drawImage(bitmap, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height), pixels = width * height;
  const most = datatype.includes("INT") ? 1 : 255;
  const grey = at => Math.round(0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2]);
  const values = Array(pixels * colours);
  for (let pixel = 0; pixel < pixels; pixel++) {
    for (let colour = 0; colour < colours; colour++) {
      const value = colours === 1 ? grey(pixel * 4) : data[pixel * 4 + colour];
      values[planes ? colour * pixels + pixel : pixel * colours + colour] = value / most;
    }
  }
  const inner = planes ? [colours, height, width] : [height, width, colours];
  return { bytes: bytesOf(values, datatype).buffer, shape: [...shape.slice(0, -3).fill(1), ...inner] };
}

// ---- one output of a response

class Output {
  // `at(index)` returns an element.
  constructor(name, datatype, shape, at) {
    Object.assign(this, { name, datatype, shape, at, count: product(shape) });
  }

  static ofValue(name, datatype, value) {
    const shape = shapeOf(value, 0), flat = [value].flat(Infinity);
    return new Output(name, datatype, shape, index => flat[index]);
  }

  static ofBytes(name, datatype, shape, view) {
    if (datatype !== "BYTES") {
      if (!itemSize(datatype)) throw new Error(`${datatype} is not shown`);
      return new Output(name, datatype, shape, index => shortest(elementAt(view, datatype, index), datatype));
    }
    const elements = [];
    for (let at = 0; at < view.byteLength && elements.length < MOST_VALUES;) {
      const size = view.getUint32(at, true);
      elements.push(new Uint8Array(view.buffer, view.byteOffset + at + 4, size));
      at += 4 + size;
    }
    return new Output(name, datatype, shape, index => elements[index]);
  }

  // The first values, nested as the shape says.
  get text() {
    let left = MOST_VALUES;
    const walk = (depth, offset) => {
      if (depth === this.shape.length) return left-- > 0 ? shownValue(this.at(offset)) : "…";
      const size = product(this.shape.slice(depth + 1)), texts = [];
      for (let at = 0; at < this.shape[depth] && left > 0; at++) texts.push(walk(depth + 1, offset + at * size));
      return `[${texts.concat(texts.length < this.shape[depth] ? "…" : []).join(", ")}]`;
    };
    return walk(0, 0);
  }

  get note() {
    return this.count > MOST_VALUES ? `the first ${MOST_VALUES} of ${exact(this.count)} values` : "";
  }
}

function shownValue(value) {
  if (value instanceof Uint8Array) {
    try {
      return shownValue(new TextDecoder("utf-8", { fatal: true }).decode(value));
    } catch {
      const hex = [...value.subarray(0, 32)].map(byte => byte.toString(16).padStart(2, "0")).join(" ");
      return `${exact(value.length)} bytes: ${hex}${value.length > 32 ? " …" : ""}`;
    }
  }
  if (typeof value === "string" && value.length > MOST_TEXT) {
    return `${JSON.stringify(value.slice(0, MOST_TEXT))} … (${exact(value.length)} characters)`;
  }
  if (value !== null && typeof value === "object") return jsonText(value);
  return typeof value === "number" ? String(value) : scalarText(value);
}
