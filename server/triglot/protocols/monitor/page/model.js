// ---- one model: its details, and a form that calls it

// Strategy: the form is rebuilt only for other inputs, and keeps what was typed for a model; everything else is text that is
// updated with each refresh. Nothing here moves the focus unless the reader does.

// Pages may stand behind a proxy's prefix; the server's root is three levels above the monitor's paths.
const serverRoot = new URL("../../../", monitor);
// What inputs are called that take the bytes of a file, and how many inputs are many.
const FILE_NAMES = /(^|[^a-z])(image|img|picture|photo|audio|video|file|document|pdf)s?([^a-z]?(bytes|data))?$/i, MANY = 4;
const MOST_CLASSES = 5, MOST_CLASSIFIED = 10;
const MOST_ANSWERS = 200, CLIPBOARD_SECONDS = 2, IMAGE_NUMBERS = "image.bin";

function replaceOptions(select, options) {
  const key = JSON.stringify(options);
  if (select.dataset.options === key) return;
  const chosen = select.value;
  select.dataset.options = key;
  select.replaceChildren(...options.map(([value, text]) => html("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

const shapeText = shape => (shape === null || shape === undefined ? "any shape" : `[${shape.join(", ")}]`);

// ---- one input of the form

class Field {
  // `draft` keeps what was typed while the field is not shown; `isOfMany`: a scalar is one line.
  constructor(spec, draft, isOfMany, changed) {
    Object.assign(this, { spec, draft, changed, isLine: isOfMany && Boolean(spec.datatype) && product(spec.sample.shape) === 1 });
    const isText = spec.datatype === "BYTES", isJson = !spec.datatype;
    const kinds = [
      ["json", "JSON"],
      ...(isJson ? [] : isText ? [["text", "text"]] : [["zeros", "zeros"]]),
      ...(isJson ? [] : [["files", isText ? "file" : "file of raw bytes"]]),
      ...(isJson || !imageLayout(spec) ? [] : [["image", "image"]]),
      ...(spec.optional ? [["none", "omitted"]] : []),
    ];
    const { shape, data } = spec.sample, only = product(shape) === 1 ? [data].flat(Infinity)[0] : undefined;
    const plain = isText && typeof only === "string" && !/^[[{]/.test(only);
    draft.kind ??= spec.optional ? "none" : isText && (spec.sample.binary || FILE_NAMES.test(spec.name)) ? "files" : plain ? "text" : data === null && !isText ? "zeros" : "json";
    draft.json ??= data === null ? (isText ? '["text"]' : "[]") : jsonText(this.isLine ? only : data);
    draft.text ??= typeof only === "string" ? only : "text";
    draft.zeros ??= jsonText(shape);
    draft.files ??= [];
    this.kind = html("select", { "aria-label": `Form of ${spec.name}` }, ...kinds.map(([value, text]) => html("option", { value }, text)));
    this.kind.value = draft.kind;
    this.note = html("small", { class: "shape" });
    this.problem = html("p", { class: "problem" });
    this.place = html("div", { class: "place" });
    this.saved = html("a", { download: IMAGE_NUMBERS }, `Save ${IMAGE_NUMBERS}, which the calls below read`);
    const about = isJson ? "JSON" : `${spec.datatype} ${shapeText(spec.shape)}${spec.optional ? ", optional" : ""}`;
    this.node = html("div", { class: this.isLine ? "input line" : "input", role: "group", "aria-label": spec.name },
      html("div", { class: "about" }, html("b", {}, spec.name), " ", html("small", {}, about)),
      ...(kinds.length > 1 ? [this.kind] : []), this.note, this.place, this.problem);
    this.node.dataset.input = spec.name;
    this.kind.addEventListener("change", async () => {
      draft.kind = this.kind.value;
      if (draft.chosen && ["image", "files"].includes(draft.kind)) await this.take(draft.chosen);
      this.draw();
      changed();
    });
    this.node.addEventListener("dragover", event => event.dataTransfer.types.includes("Files") && event.preventDefault());
    this.node.addEventListener("drop", event => this.receive(event, event.dataTransfer.files));
    this.draw();
  }

  // Takes files that were dropped or pasted; returns whether it has a form for them.
  receive(event, files) {
    const forms = [...this.kind.options].map(option => option.value), isImage = files[0]?.type.startsWith("image/");
    const kind = ["image", "files"].find(kind => forms.includes(kind) && (kind === "files" || isImage));
    if (!files.length || !kind) return false;
    event.preventDefault();
    this.draft.kind = this.kind.value = kind;
    this.take(files).then(() => {
      this.draw();
      this.place.querySelector("input").focus();
      this.changed();
    });
    return true;
  }

  // Takes chosen files. An image is decoded here, and of a file of numbers the shape is found.
  async take(files) {
    const { draft, spec } = this, [file] = files;
    draft.chosen = files;
    if (draft.kind === "image") {
      const made = file && await imageTensor(file, spec).catch(error => error);
      draft.image = made instanceof Unfit ? undefined : made;
      draft.wrong = made instanceof Unfit ? made.message : "";
    } else {
      draft.bytes = spec.datatype === "BYTES" || !file ? undefined : await file.arrayBuffer();
      draft.files = [...files];
    }
  }

  // Takes a value from elsewhere.
  set(value) {
    const isText = this.spec.datatype === "BYTES" && typeof value === "string";
    this.draft.kind = this.kind.value = isText ? "text" : "json";
    this.draft[this.draft.kind] = isText ? value : jsonText(value);
    this.draw();
  }

  draw() {
    const { kind } = this.draft, { name } = this.spec;
    const edit = (control, event, read) => {
      control.addEventListener(event, async () => {
        await read();
        this.changed();
      });
      return control;
    };
    const typed = (tag, label, attributes) => {
      const control = html(tag, { "aria-label": `${name}: ${label}`, spellcheck: "false", autocomplete: "off", ...attributes });
      control.value = this.draft[kind];
      return edit(control, "input", () => { this.draft[kind] = control.value });
    };
    const chooser = (label, attributes) => {
      const control = html("input", { type: "file", "aria-label": `${name}: ${label}`, title: "Choose, drop or paste", ...attributes });
      if (this.draft.chosen) control.files = this.draft.chosen;
      return edit(control, "change", () => this.take(control.files).then(() => this.offer()));
    };
    const makers = {
      json: () => this.isLine ? typed("input", "JSON", { type: "text" }) : typed("textarea", "JSON", { rows: String(Math.min(12, Math.ceil(this.draft.json.length / 60))) }),
      text: () => (this.isLine ? typed("input", "text", { type: "text" }) : typed("textarea", "text", { rows: "2" })),
      zeros: () => typed("input", "shape of the zeros", { type: "text" }),
      files: () => chooser("file", this.spec.datatype === "BYTES" ? { multiple: "" } : {}),
      image: () => chooser("image", { accept: "image/*" }),
      none: () => "",
    };
    this.place.replaceChildren(makers[kind](), this.saved);
    this.offer();
  }

  // Offers an image's numbers as a file, which the commands for a terminal read.
  offer() {
    URL.revokeObjectURL(this.saved.href);
    const image = this.draft.kind === "image" && this.draft.image;
    this.saved.hidden = !image;
    if (image) this.saved.href = URL.createObjectURL(new Blob([image.bytes]));
  }

  // Returns the tensor, undefined if it is omitted. Throws `Unfit`, and shows the error at the field.
  read() {
    try {
      const tensor = this.tensor();
      show(this.note, tensor && this.spec.datatype ? `shape ${shapeText(tensor.shape)}` : "");
      show(this.problem, "");
      return tensor;
    } catch (error) {
      if (!(error instanceof Unfit)) throw error;
      show(this.note, "");
      show(this.problem, error.message);
      throw error;
    }
  }

  tensor() {
    const { spec, draft } = this, { kind } = draft;
    if (kind === "none") return undefined;
    if (spec.datatype && !ELEMENTS[spec.datatype]) throw new Unfit(`${spec.datatype} cannot be entered here`);
    if (kind === "json") {
      const value = this.json(draft.json);
      if (spec.parameters && (typeof value !== "object" || value === null || Array.isArray(value))) throw new Unfit("expected a JSON object");
      if (!spec.datatype) return { value: spec.parameters ? value : new Verbatim(draft.json.trim()) };
      // One element stands for the whole of a tensor that has one.
      const isScalar = typeof value !== "object" && product(spec.sample.shape) === 1;
      const nested = isScalar ? nest([value], spec.sample.shape) : value;
      return new Tensor(spec, { value: nested, shape: shapeOf(nested, spec.shape?.length ?? 0) });
    }
    if (kind === "text") return new Tensor(spec, { text: draft.text, shape: spec.sample.shape });
    if (kind === "zeros") {
      const shape = this.json(draft.zeros);
      if (!Array.isArray(shape) || !shape.every(dim => Number.isSafeInteger(dim) && dim >= 0)) throw new Unfit("expected a shape like [1, 3]");
      return new Tensor(spec, { zeros: true, shape });
    }
    if (kind === "image") {
      if (!draft.image) throw new Unfit(draft.wrong || "choose an image");
      return new Tensor(spec, { ...draft.image, files: [new File([draft.image.bytes], IMAGE_NUMBERS)] });
    }
    if (!draft.files.length) throw new Unfit("choose a file");
    return new Tensor(spec, { files: draft.files, bytes: draft.bytes, shape: this.fileShape() });
  }

  json(text) {
    try {
      return readJson(text);
    } catch (error) {
      throw new Unfit(`invalid JSON: ${error.message}`);
    }
  }

  // Derives the dim of any size from the files: the first one for files of bytes, the last one for numbers.
  fileShape() {
    const { spec, draft } = this, dims = spec.shape ?? [-1], shape = [...spec.sample.shape];
    if (spec.datatype === "BYTES") {
      const free = dims.indexOf(-1);
      if (free >= 0) shape[free] = draft.files.length;
      if (product(shape) !== draft.files.length) throw new Unfit(`expected ${product(shape)} files`);
      return shape;
    }
    const size = itemSize(spec.datatype), free = dims.lastIndexOf(-1);
    const count = draft.bytes.byteLength / size, others = product(shape);
    if (free >= 0) shape[free] = count / others;
    if (product(shape) !== count || !shape.every(Number.isInteger)) {
      throw new Unfit(`${exact(draft.bytes.byteLength)} bytes do not fit ${spec.datatype} ${shapeText(spec.shape)}`);
    }
    return shape;
  }
}

// ---- responses

// The likeliest classes of each row, of an output that has labels.
function classNodes(output, labels) {
  const rows = output.count / labels.length;
  if (!output.count || !Number.isInteger(rows)) return [];
  return Array.from({ length: Math.min(rows, MOST_CLASSIFIED) }, (_, row) => {
    const classes = labels.map((label, index) => ({ label, value: output.at(row * labels.length + index) }));
    // NaN comes last.
    classes.sort((one, other) => (Number.isNaN(one.value) ? 1 : Number.isNaN(other.value) ? -1 : Number(other.value) - Number(one.value)));
    const title = rows > 1 ? `Top classes of row ${row}` : "Top classes";
    return html("table", { class: "classes", "aria-label": `${title} of ${output.name}` },
      html("thead", {}, html("tr", {}, html("th", { scope: "col" }, title), html("th", { scope: "col" }, output.name))),
      html("tbody", {}, ...classes.slice(0, MOST_CLASSES).map(({ label, value }) =>
        html("tr", {}, html("th", { scope: "row" }, label), html("td", {}, shownValue(value))))));
  });
}

// `specs`: the outputs of the signature, with their labels.
function answerNodes({ outputs, more, text, error }, specs) {
  if (text !== undefined) return [html("pre", { tabindex: "0", "aria-label": "Answer" }, text.slice(0, MOST_TEXT * 10))];
  const nodes = outputs.map(output => {
    const title = html("div", {}, html("b", {}, output.name), ` ${output.datatype} ${shapeText(output.shape)}`);
    const values = html("pre", { tabindex: "0", "aria-label": `Values of ${output.name}` }, output.text);
    const { labels = [] } = specs.find(spec => spec.name === output.name) ?? {};
    const node = html("div", { class: "output" }, title, ...classNodes(output, labels), values, ...(output.note ? [html("small", {}, output.note)] : []));
    node.dataset.output = output.name;
    return node;
  });
  if (error !== undefined) nodes.push(html("pre", { class: "bad", tabindex: "0", "aria-label": "Error" }, error));
  if (Object.keys(more).length) nodes.push(html("pre", { tabindex: "0", "aria-label": "More of the answer" }, jsonText(more)));
  return nodes;
}

// ---- the snippets: created once, and updated in place

class Snippet {
  constructor(name) {
    this.code = html("pre", { tabindex: "0", "aria-label": `The call for ${name}` });
    this.note = html("small");
    this.button = html("button", { type: "button", "aria-label": `Copy the call for ${name}` }, "Copy");
    this.said = html("span", { role: "status" });
    this.node = html("div", { class: "snippet" }, html("header", {}, html("h4", {}, name), this.said, this.button), this.code, this.note);
    this.node.dataset.snippet = name;
    this.button.addEventListener("click", () => this.copy());
  }

  update({ text, note }) {
    show(this.code, text ?? "");
    show(this.note, note ?? "");
    this.code.hidden = this.button.hidden = text === undefined;
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
    } catch {
      // The clipboard API exists only on HTTPS and localhost pages.
      getSelection().selectAllChildren(this.code);
      document.execCommand("copy");
    }
    show(this.said, "copied");
    setTimeout(() => show(this.said, ""), CLIPBOARD_SECONDS * 1000);
  }
}

// ---- the section

class ModelView {
  constructor() {
    this.details = null;
    this.shownKey = "";
    this.server = null;
    this.listed = [];
    // The address's part after #: `models`, `try`, or `model=NAME` with `version=`.
    this.linked = location.hash.slice(1);
    this.drafts = new Map();
    this.fields = [];
    this.dialect = "";
    this.running = null;
    this.tabs = new Map();
    this.snippets = new Map();
    this.name = byId("model-name");
    this.version = byId("model-version");
    this.signature = byId("model-signature");
    addEventListener("hashchange", () => {
      this.linked = location.hash.slice(1);
      this.follow();
    });
    this.name.addEventListener("change", () => {
      this.version.value = "";
      this.chosen();
    });
    this.version.addEventListener("change", () => this.chosen());
    this.signature.addEventListener("change", () => this.show());
    this.name.addEventListener("focus", () => this.list().catch(lost));
    byId("call").addEventListener("submit", event => {
      event.preventDefault();
      this.run();
    });
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("whole").addEventListener("toggle", () => byId("whole").open && this.showObject());
    byId("object").addEventListener("input", () => this.setObject());
    // Files that are pasted go to the input with the focus, or to the first one that takes them.
    document.addEventListener("paste", event => {
      const here = this.fields.filter(field => field.node.contains(document.activeElement));
      [...here, ...this.fields].some(field => field.receive(event, event.clipboardData.files));
    });
    byId("model-details").addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !byId("try").hidden) {
        event.preventDefault();
        this.run();
      }
      if (event.key === "Escape" && this.running) {
        event.preventDefault();
        this.cancel();
      }
    });
    roving(byId("dialects"), "button", "ArrowLeft", "ArrowRight");
    for (const id of ["statistics", "traffic"]) byId(id).addEventListener("toggle", () => this.look().catch(lost));
    for (const change of ["load", "unload"]) byId(change).addEventListener("click", () => this.change(change));
  }

  // Opens a version of a model, the default one for "".
  open(name, version) {
    this.name.value = name;
    this.version.dataset.options = "";
    this.version.replaceChildren(...[...new Set(["", version])].map(value => html("option", { value })));
    this.version.value = version;
    this.chosen();
    visit(byId("model-details"));
    this.name.focus({ preventScroll: true });
  }

  // Goes once to what the address names: a section, or a model, which may come later.
  follow() {
    const { linked } = this, chosen = new URLSearchParams(linked), name = chosen.get("model");
    if (["models", "try"].includes(linked)) visit(byId(linked).closest("section"));
    else if ([...this.name.options].some(option => option.value === name)) this.open(name, chosen.get("version") ?? "");
    else return;
    this.linked = "";
  }

  // What the address has of the selected version.
  get fragment() {
    return `#${new URLSearchParams({ model: this.name.value, ...(this.version.value && { version: this.version.value }) })}`;
  }

  chosen() {
    this.linked = "";
    history.replaceState(null, "", this.fragment);
    this.cancel();
    byId("answer").replaceChildren();
    for (const id of ["call-status", "control-status"]) show(byId(id), "");
    byId("control-error").hidden = true;
    this.signature.replaceChildren();
    this.signature.dataset.options = "";
    // Prevents typing into a form that is about to be replaced.
    byId("try").inert = true;
    this.look().then(() => this.show()).catch(lost);
  }

  // Identifies the selected version.
  get key() {
    return JSON.stringify([this.name.value, this.version.value]);
  }

  // Lists loadable models, for readers who may load them; readers without the overview need it for the names.
  async list() {
    if (latest && !latest.server.loads) return;
    const text = await reader.text(new URL("v2/repository/index", serverRoot), { method: "POST", body: "{}" })
      .catch(error => { show(byId("control-status"), error.message) });
    this.listed = text ? JSON.parse(text).map(model => model.name) : [];
    this.showNames();
  }

  async refresh(models) {
    this.models = models;
    const isLimited = !latest;
    if (this.isLimited !== isLimited) await this.list();
    this.isLimited = isLimited;
    this.showNames();
    await this.look();
  }

  // Fetches the model's details; of overlapping requests only the latest one counts.
  async look() {
    const name = this.name.value, version = this.version.value, { key } = this;
    if (!name) return;
    const query = new URLSearchParams({ name, ...(version && { version }) });
    const details = JSON.parse(await fetched(`model?${query}`));
    const wants = byId("statistics").open && details.serves && details.server.protocols.includes("kserve");
    const path = wants && `v2/models/${pathOf(name, String(details.serves.version))}/stats`;
    const statistics = path && await reader.text(new URL(path, serverRoot)).then(text => statisticRows(JSON.parse(text).model_stats[0]))
      .catch(error => [["tr", {}, ["td", { class: "left" }, error.message]]]);
    const traffic = byId("traffic").open && details.serves &&
      await reader.text(new URL(`v2/models/${encodeURIComponent(name)}/traffic`, serverRoot)).then(text => trafficRows(JSON.parse(text)))
        .catch(error => [["tr", {}, ["td", { class: "left" }, error.message]]]);
    if (key === this.key) Object.assign(this, { details, statistics, traffic, server: details.server, shownKey: key });
  }

  update() {
    this.show();
  }

  showNames() {
    const names = [...new Set([...this.models.map(model => model.name), ...this.listed])].sort();
    const isNew = !this.name.value, ready = this.models.find(model => model.ready);
    replaceOptions(this.name, names.map(name => [name, name]));
    if (isNew && ready) this.name.value = ready.name;
    byId("model-details").hidden = !names.length;
  }

  show() {
    const { details, server } = this, name = this.name.value;
    if (this.shownKey !== this.key) return;
    byId("try").inert = false;
    const versions = this.models.filter(model => model.name === name), serves = details.serves;
    replaceOptions(this.version, [["", "default"], ...versions.map(({ version }) => [String(version), String(version)])]);
    this.showDetails(versions);
    byId("model-control").hidden = !server.loads;
    byId("unload").disabled = !versions.some(model => model.state === "READY");
    show(byId("model-error"), details.error);
    byId("model-error").hidden = !details.error;
    byId("try").hidden = !serves || !server.protocols.length;
    this.signature.parentElement.hidden = !serves || Object.keys(serves.signatures).length < 2;
    if (byId("try").hidden) return;
    const isNew = !this.signature.value;
    replaceOptions(this.signature, Object.keys(serves.signatures).map(name => [name, name]));
    if (isNew) this.signature.value = serves.default_signature;
    this.showTabs();
    this.showFields();
    this.showSnippets();
  }

  // --- details ---

  showDetails(versions) {
    const { serves, labels } = this.details;
    const facts = serves ? [
      ["Answers", `version ${serves.version}`],
      ["Platform", serves.platform],
      ...Object.keys(serves.nodes).length ? [["Runs on", Object.entries(serves.nodes).map(([node, count]) => `${node} (${count})`).join(", ")]] : [],
      ["Inputs", this.tensorText(serves, "inputs")],
      ["Outputs", this.tensorText(serves, "outputs")],
      ["Kind", [serves.decoupled && "decoupled: a stream of answers", serves.sequences && "sequences", serves.speaks_json && "JSON"].filter(Boolean).join(", ") || "one answer to a request"],
    ] : [];
    this.fill(byId("facts"), facts.flatMap(([term, text]) => [["dt", {}, term], ["dd", {}, text]]));
    const labelled = number => Object.entries(labels).filter(([, version]) => version === number).map(([label]) => label).join(", ");
    this.fill(byId("versions").tBodies[0], versions.map(one => ["tr", {},
      ["th", { scope: "row" }, String(one.version)], ["td", { class: `state left ${stateOf(one)}` }, stateOf(one)],
      ["td", { class: "left" }, labelled(one.version)], ["td", { class: "left" }, one.reason]]));
    byId("versions").parentElement.hidden = !versions.length;
    byId("statistics").hidden = !serves || !this.server.protocols.includes("kserve");
    byId("config").hidden = !serves;
    show(byId("config").querySelector("pre"), serves ? JSON.stringify(serves.config, null, 1) : "");
    byId("traffic").hidden = !serves;
    if (this.traffic) this.fill(byId("traffic").querySelector("tbody"), this.traffic);
    if (this.statistics) this.fill(byId("statistics").querySelector("tbody"), this.statistics);
  }

  tensorText(serves, kind) {
    const signature = serves.signatures[this.signature.value] ?? serves.signatures[serves.default_signature];
    return signature[kind].map(one => `${one.name} ${one.datatype} ${shapeText(one.shape)}`).join(", ") || "none declared";
  }

  // Rows as [tag, attributes, ...children]; redrawn only if they changed.
  fill(node, rows) {
    const key = JSON.stringify(rows);
    if (this.drawn?.get(node) === key) return;
    this.drawn ??= new Map();
    this.drawn.set(node, key);
    const made = row => (Array.isArray(row) ? html(row[0], row[1], ...row.slice(2).map(made)) : row);
    node.replaceChildren(...rows.map(made));
  }

  async change(verb) {
    const name = this.name.value, error = byId("control-error");
    error.hidden = true;
    show(byId("control-status"), verb === "load" ? `loading ${name} …` : `unloading ${name} …`);
    const began = performance.now();
    const response = await reader.fetch(new URL(`v2/repository/models/${encodeURIComponent(name)}/${verb}`, serverRoot), { method: "POST", body: "{}" })
      .catch(error => ({ status: "", text: () => String(error) }));
    const text = await response.text();
    show(byId("control-status"), `${verb} ${name}: ${response.ok ? "done" : `failed ${response.status}`} in ${milliseconds(performance.now() - began)}`);
    show(error, response.ok ? "" : text);
    error.hidden = Boolean(response.ok);
    await this.list().catch(lost);
    await refresh();
  }

  // --- the form ---

  get chosenDialect() {
    return DIALECTS[this.dialect];
  }

  get chosenSignature() {
    return this.details.serves.signatures[this.signature.value];
  }

  showTabs() {
    const names = this.server.protocols;
    if (!names.includes(this.dialect)) this.dialect = names[0];
    if (byId("dialects").dataset.names !== names.join()) {
      byId("dialects").dataset.names = names.join();
      this.tabs = new Map(names.map(name => {
        const tab = html("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel" }, DIALECTS[name].title);
        for (const event of ["click", "focus"]) tab.addEventListener(event, () => this.choose(name));
        return [name, tab];
      }));
      byId("dialects").replaceChildren(...this.tabs.values());
    }
    for (const [name, tab] of this.tabs) {
      tab.setAttribute("aria-selected", String(name === this.dialect));
      tab.tabIndex = name === this.dialect ? 0 : -1;
    }
    byId("panel").setAttribute("aria-labelledby", `tab-${this.dialect}`);
  }

  choose(dialect) {
    if (this.dialect === dialect) return;
    this.dialect = dialect;
    this.show();
  }

  showFields() {
    const { serves } = this.details, name = this.name.value;
    const specs = this.chosenDialect.fields(this.chosenSignature, serves);
    const wants = this.dialect === "kserve"
      ? [{ name: "request parameters", parameters: true, sample: { shape: [], data: serves.sequences ? { sequence_id: 1, sequence_start: true, sequence_end: true } : {} } }] : [];
    const key = JSON.stringify([name, specs, wants]);
    const note = this.dialect === "tfserving" && serves.decoupled ? "TensorFlow Serving's protocol has no streaming call: the server rejects this call." : "";
    show(byId("protocol-note"), note || (specs.length ? "" : "The model declares no inputs, and the call has none."));
    byId("protocol-note").hidden = !byId("protocol-note").textContent;
    if (this.shownFields === key) return;
    this.shownFields = key;
    this.fields = [...specs, ...wants].map(spec => {
      const at = JSON.stringify([name, spec]);
      if (!this.drafts.has(at)) this.drafts.set(at, {});
      return new Field(spec, this.drafts.get(at), specs.length >= MANY, () => this.showSnippets());
    });
    byId("inputs").replaceChildren(...this.fields.map(field => field.node));
    byId("whole").hidden = specs.length < MANY;
    byId("whole").open = false;
  }

  // The inputs as one JSON object, which sets those that it names.
  showObject() {
    const named = this.fields.filter(field => field.spec.datatype && ["json", "text"].includes(field.draft.kind));
    const value = ({ draft }) => (draft.kind === "text" ? draft.text : new Verbatim(draft.json));
    byId("object").value = jsonText(Object.fromEntries(named.map(field => [field.spec.name, value(field)])));
    show(byId("object-problem"), "");
  }

  setObject() {
    try {
      const object = readJson(byId("object").value), fields = new Map(this.fields.map(field => [field.spec.name, field]));
      const unknown = Object.keys(object).find(name => !fields.get(name)?.spec.datatype);
      if (unknown !== undefined) throw new Unfit(`the model has no input ${JSON.stringify(unknown)}`);
      for (const [name, value] of Object.entries(object)) fields.get(name).set(value);
      show(byId("object-problem"), "");
    } catch (error) {
      show(byId("object-problem"), error instanceof Unfit ? error.message : `invalid JSON: ${error.message}`);
    }
    this.showSnippets();
  }

  // Returns the call. Throws `Unfit`.
  read() {
    const { serves } = this.details;
    const call = {
      name: this.name.value, version: this.version.value, serves, server: this.server, signature: this.chosenSignature,
      signatureName: this.signature.value, tensors: [], parameters: {}, body: undefined,
    };
    let wrong = null;
    for (const field of this.fields) {
      try {
        const tensor = field.read();
        if (field.spec.parameters) call.parameters = tensor.value;
        else if (!field.spec.datatype) call.body = { ...call.body, [field.spec.name]: tensor.value };
        else if (tensor) call.tensors.push(tensor);
      } catch (error) {
        if (!(error instanceof Unfit)) throw error;
        wrong ??= new Unfit(`${field.spec.name}: ${error.message}`);
      }
    }
    if (wrong) throw wrong;
    return call;
  }

  showSnippets() {
    let made;
    try {
      made = snippetsOf(this.chosenDialect, this.read(), serverRoot, Boolean(reader.token));
    } catch (error) {
      if (!(error instanceof Unfit)) throw error;
      made = [...this.snippets.keys()].map(name => ({ name, note: error.message }));
    }
    for (const { name } of made) if (!this.snippets.has(name)) this.snippets.set(name, new Snippet(name));
    for (const [name, snippet] of this.snippets) {
      const one = made.find(one => one.name === name);
      snippet.node.hidden = !one;
      if (one) snippet.update(one);
    }
    const nodes = [...this.snippets.values()].map(snippet => snippet.node);
    if (nodes.some(node => !node.isConnected)) byId("snippets").replaceChildren(...nodes);
  }

  // --- the call ---

  cancel() {
    this.running?.abort();
  }

  async run() {
    if (this.running) return;
    const abort = this.running = new AbortController(), answer = byId("answer");
    let began = performance.now();
    const passed = () => milliseconds(performance.now() - began);
    // The button keeps the focus, so that it can be pressed again.
    byId("run").setAttribute("aria-disabled", "true");
    byId("cancel").hidden = false;
    answer.replaceChildren();
    show(byId("call-status"), "running …");
    try {
      const dialect = this.chosenDialect, call = this.read(), request = dialect.request(call, true);
      const body = await blobOf(request.pieces);
      began = performance.now();
      const response = await reader.fetch(new URL(request.path, serverRoot), {
        method: "POST", headers: request.headers, body, signal: abort.signal, cache: "no-store",
      });
      if (!response.ok) {
        const text = await response.text();
        show(byId("call-status"), `${response.status} ${response.statusText} in ${passed()}`);
        answer.replaceChildren(html("pre", { class: "bad", tabindex: "0", "aria-label": "Error" }, text || "(no text)"));
      } else if (request.streams) {
        const count = await this.showStream(readStream(dialect, response), passed, call.signature.outputs);
        show(byId("call-status"), `${exact(count)} ${count === 1 ? "answer" : "answers"} in ${passed()}`);
      } else {
        const found = await readAnswer(dialect, response, call);
        show(byId("call-status"), `${response.status} in ${passed()}`);
        answer.replaceChildren(...answerNodes(found, call.signature.outputs));
      }
    } catch (error) {
      if (abort.signal.aborted) show(byId("call-status"), `cancelled after ${passed()}`);
      else if (error instanceof Unfit) show(byId("call-status"), error.message);
      else show(byId("call-status"), `the call failed after ${passed()}: ${error.message}`);
    } finally {
      this.running = null;
      byId("run").removeAttribute("aria-disabled");
      if (document.activeElement === byId("cancel")) byId("run").focus();
      byId("cancel").hidden = true;
    }
  }

  // Shows the responses of a stream; returns how many there were.
  async showStream(answers, passed, specs) {
    const list = html("ol");
    let count = 0;
    byId("answer").replaceChildren(list);
    for await (const answer of answers) {
      count += 1;
      list.append(html("li", {}, html("small", {}, `after ${passed()}`), ...answerNodes(answer, specs)));
      if (count > MOST_ANSWERS) {
        list.firstElementChild.remove();
        list.setAttribute("start", String(count - MOST_ANSWERS + 1));
      }
      show(byId("call-status"), `${exact(count)} so far, after ${passed()}`);
    }
    return count;
  }
}

// Triton's statistics: counts, and mean durations.
function statisticRows({ inference_count, execution_count, last_inference, inference_stats, batch_stats }) {
  const row = (title, ...texts) => ["tr", {}, ["th", { scope: "row" }, title], ...texts.map(text => ["td", {}, text])];
  const times = Object.entries(inference_stats).filter(([, { count }]) => count).map(([name, { count, ns }]) =>
    row(name.replaceAll("_", " "), exact(count), `${milliseconds(ns / count / 1e6)} each`));
  const batches = batch_stats.map(({ batch_size, compute_infer }) => row(`batches of ${batch_size}`, exact(compute_infer.count), ""));
  return [
    row("inferences", exact(inference_count), ""),
    row("executions", exact(execution_count), ""),
    row("last inference", last_inference ? new Date(last_inference).toLocaleTimeString() : "–", ""),
    ...times,
    ...batches,
  ];
}

// Shares, calls and latency of the versions, and what a shadow answers otherwise.
function trafficRows({ versions, shadow, set_by }) {
  const row = (title, ...texts) => ["tr", {}, ["th", { scope: "row" }, title], ...texts.map(text => ["td", {}, text])];
  const times = (p50, p99) => `p50 ${milliseconds(p50)}, p99 ${milliseconds(p99)}`;
  const rows = versions.map(({ version, percent, requests, errors, p50_ms, p99_ms }) =>
    row(`version ${version}`, `${exact(percent)} %`, `${exact(requests)} calls, ${exact(errors)} errors`, times(p50_ms, p99_ms)));
  if (shadow) {
    const { compared, different, failed, dropped, differing, largest, ...of } = shadow.verdict;
    const lost = Object.values(dropped).reduce((sum, count) => sum + count, 0);
    rows.push(
      row(`shadow ${[shadow.address, shadow.model, shadow.version].filter(Boolean).join("/")}`, `${exact(shadow.percent)} %`,
        `${exact(compared)} compared, ${exact(different)} differ, ${exact(failed)} failed, ${exact(lost)} dropped`, times(of.p50_ms_shadow, of.p99_ms_shadow)),
      row("calls it copied", "", "", times(of.p50_ms_served, of.p99_ms_served)),
      ...Object.entries(differing).map(([output, count]) =>
        row(`output ${output}`, "", `${exact(count)} differ`, output in largest ? `by up to ${largest[output].toPrecision(3)}` : "")));
  }
  return [...rows, row("set by", set_by, "", "")];
}

const modelView = new ModelView();
