// ---- tiles

const last = values => values[values.length - 1] ?? null;
const sum = values => values.reduce((total, value) => total + (value ?? 0), 0);
const TILES = [
  ["requests", "Requests", ({ totals, history }) =>
    [perSecond(sum(Object.values(history.requests).map(last))), `${exact(totals.requests)} since the start`]],
  ["latency", "Latency, median", ({ history }) =>
    [milliseconds(last(history.p50_ms)), `99 % within ${milliseconds(last(history.p99_ms))}`]],
  ["in-flight", "In flight", ({ totals }) => [exact(totals.in_flight), `${exact(totals.queue_depth)} waiting`]],
  ["failures", "Failures", ({ totals, history }) =>
    [perSecond(last(history.failures)), `${exact(totals.failures)} since the start`]],
  ["models", "Models ready", ({ models }) =>
    [exact(models.filter(model => model.ready).length), `of ${exact(models.length)}`]],
  ["lag", "Event loop lag", ({ history }) => [milliseconds(last(history.loop_lag_ms)), "longest of the second"]],
].map(([name, title, values]) => {
  const nodes = [html("dd"), html("dd")];
  byId("tiles").append(html("div", { class: "tile", "data-tile": name }, html("dt", {}, title), ...nodes));
  return { nodes, values };
});

// ---- tables

const COLUMNS = [
  ["requests", "Requests", model => model.requests, exact],
  ...Object.entries(PROTOCOLS).map(([protocol, title]) => [protocol, title, model => model.protocols?.[protocol] ?? 0, exact]),
  ["failures", "Failures", model => model.failures, exact],
  ["rate", "Rate", model => model.request_rate, perSecond, "requests per second, of the last seconds"],
  ["p50", "p50", model => model.latency_ms.p50, milliseconds, "half of the last seconds' requests took at most this"],
  ["p99", "p99", model => model.latency_ms.p99, milliseconds, "99 % of the last seconds' requests took at most this"],
  ["queue", "Waiting", model => model.queue_depth, exact],
  ["wait", "Wait", model => model.queue_ms, milliseconds, "mean time in the queue, since the start"],
  ["run", "Compute", model => model.compute_ms, milliseconds, "mean time of the model, since the start"],
  ["batch", "Batch", model => model.mean_batch_size, plain, "mean size of the last seconds' batches"],
];
const STATES = ["failed", "unknown", "loading", "unloading", "unloaded", "ready"];
const stateOf = ({ state, reason }) => (state !== "UNAVAILABLE" ? state.toLowerCase() : reason === "unloaded" ? reason : "failed");
// What each column is sorted by.
const ORDERS = new Map([
  ["name", model => model.name], ["state", model => STATES.indexOf(stateOf(model))], ...COLUMNS.map(([name, , value]) => [name, value])]);
const sorting = { by: "state", descending: false };

// Updates a table's rows by key: creates missing ones in the order of `items`, and removes obsolete ones.
function rows(body, known, items, keyOf, makeRow) {
  const kept = new Set(), focused = document.activeElement;
  items.forEach((item, index) => {
    const key = keyOf(item);
    kept.add(key);
    if (!known.has(key)) known.set(key, makeRow(item));
    const node = known.get(key).node;
    if (body.children[index] !== node) body.insertBefore(node, body.children[index] ?? null);
  });
  for (const [key, row] of known) {
    if (kept.has(key)) continue;
    row.node.remove();
    known.delete(key);
  }
  // A row that was moved has lost it.
  if (body.contains(focused)) focused.focus({ preventScroll: true });
}

// Makes a container's controls one stop of Tab; two arrow keys, Home and End move between them. `settle` is for new ones.
function roving(container, selector, back, forth) {
  const all = () => [...container.querySelectorAll(selector)];
  const choose = chosen => all().forEach(control => { control.tabIndex = control === chosen ? 0 : -1 });
  container.addEventListener("focusin", event => event.target.matches(selector) && choose(event.target));
  container.addEventListener("keydown", event => {
    const controls = all(), here = controls.indexOf(event.target), last = controls.length - 1;
    const target = { [back]: Math.max(0, here - 1), [forth]: Math.min(last, here + 1), Home: 0, End: last }[event.key];
    if (here < 0 || target === undefined) return;
    event.preventDefault();
    controls[target].focus();
  });
  return () => all().some(control => control.tabIndex === 0) || choose(all()[0]);
}

const headings = [["name", "Model"], ["state", "State"], ...COLUMNS].map(([name, text, , , title]) => {
  const button = html("button", { type: "button" }, text);
  button.addEventListener("click", () => sortModels(name));
  const left = name === "state" && { class: "left" };
  return html("th", { scope: "col", role: "columnheader", "data-sort": name, ...(title && { title }), ...left }, button);
});
byId("models").tHead.rows[0].append(...headings);
roving(byId("models").tHead, "button", "ArrowLeft", "ArrowRight")();
const settleModels = roving(byId("models").tBodies[0], "button", "ArrowUp", "ArrowDown");
const modelRows = new Map();
let mostRows = ROWS;
byId("model-frame").addEventListener("scroll", ({ target }) => {
  if (target.scrollTop + 2 * target.clientHeight < target.scrollHeight || modelRows.size < mostRows) return;
  mostRows += ROWS;
  showModels(latest.models);
});

// Sorts by a column: numbers from the highest one, or by a second click from the lowest.
function sortModels(by) {
  sorting.descending = by === sorting.by ? !sorting.descending : !["name", "state"].includes(by);
  sorting.by = by;
  showFirst();
}

function showFirst() {
  mostRows = ROWS;
  byId("model-frame").scrollTop = 0;
  if (latest) showModels(latest.models);
}

function modelRow(model) {
  const cell = (name, title) => html("td", { role: "cell", "data-field": name, "data-label": title });
  const cells = new Map(COLUMNS.map(([name, title]) => [name, cell(name, title)]));
  const about = html("small"), state = html("span"), reason = html("small");
  const stateCell = html("td", { role: "cell", class: "state left", "data-field": "state" }, state, reason);
  const open = html("button", { type: "button", class: "name", title: "Show its details, and call it", tabindex: "-1" }, model.name);
  open.addEventListener("click", () => modelView.open(model.name, String(model.version)));
  const title = html("th", { scope: "row", role: "rowheader" }, open, " ", about);
  const node = html("tr", { role: "row" }, title, stateCell, ...cells.values());
  node.dataset.model = model.name;
  node.dataset.version = model.version ?? "";
  return { node, cells, about, state, reason, stateCell };
}

function showModels(models) {
  const wanted = byId("filter").value.trim().toLowerCase(), state = byId("state-filter").value;
  const value = ORDERS.get(sorting.by), sign = sorting.descending ? -1 : 1;
  const order = (one, other) => (one === other ? 0 : (one ?? -1) < (other ?? -1) ? -sign : sign);
  const found = models.filter(model => model.name.toLowerCase().includes(wanted) && (!state || stateOf(model) === state))
    .sort((one, other) => order(value(one), value(other)));
  const shown = found.slice(0, mostRows);
  rows(byId("models").tBodies[0], modelRows, shown, model => JSON.stringify([model.name, model.version]), modelRow);
  settleModels();
  for (const heading of headings) {
    if (heading.dataset.sort === sorting.by) heading.ariaSort = sorting.descending ? "descending" : "ascending";
    else heading.removeAttribute("aria-sort");
  }
  for (const model of shown) {
    const row = modelRows.get(JSON.stringify([model.name, model.version]));
    show(row.about, [model.version === null ? "" : `version ${model.version}`, model.platform].filter(Boolean).join(" · "));
    show(row.state, stateOf(model));
    show(row.reason, model.reason);
    row.stateCell.className = `state left ${stateOf(model)}`;
    for (const [name, , value, format] of COLUMNS) show(row.cells.get(name), format(value(model)));
    row.cells.get("failures").classList.toggle("some", model.failures > 0);
    row.node.classList.toggle("idle", !model.requests);
    row.stateCell.classList.toggle("why", Boolean(model.reason));
    // A long reason takes the cells of numbers that do not exist yet.
    const alone = Boolean(model.reason) && !model.requests;
    row.stateCell.colSpan = alone ? COLUMNS.length + 1 : 1;
    for (const cell of row.cells.values()) cell.hidden = alone;
  }
  const states = Map.groupBy(models, stateOf);
  replaceOptions(byId("state-filter"), [["", "all states"], ...STATES.filter(one => states.has(one)).map(one => [one, `${one} (${states.get(one).length})`])]);
  byId("model-section").hidden = false;
  byId("model-filters").hidden = models.length < FILTER_FROM;
  show(byId("found"), found.length < models.length ? `${exact(found.length)} of ${exact(models.length)}` : "");
  byId("models").hidden = !found.length;
  show(byId("no-models"), models.length ? "No model is like that." : "No models yet.");
  byId("no-models").hidden = found.length > 0;
}

const protocolRows = new Map();

function showProtocols(protocols) {
  const entries = Object.entries(protocols);
  rows(byId("protocols").tBodies[0], protocolRows, entries, ([name]) => name, ([name]) => {
    const requests = html("td", { "data-field": "requests" }), failures = html("td", { "data-field": "failures" });
    const title = html("th", { scope: "row" }, PROTOCOLS[name] ?? name);
    return { node: html("tr", { "data-protocol": name }, title, requests, failures), requests, failures };
  });
  for (const [name, counts] of entries) {
    const row = protocolRows.get(name);
    show(row.requests, exact(counts.requests));
    show(row.failures, exact(counts.failures));
    row.failures.classList.toggle("some", counts.failures > 0);
  }
  byId("protocol-section").hidden = !entries.length;
}

// ---- all metrics: a line each, which expands to its chart

const AGO = [[30, "d"], [54, "h"], [114, "min"], [174, "s"]];
const TREND_MARKS = [[0, "30 days"], [30, "24 h"], [54, "60 minutes"], [114, "60 seconds"]]
  .map(([index, text]) => ({ index, text, anchor: "start" }));
const CDF_MARKS = [10, 30, 50, 70, 90, 95, 101];
// grps has no percentiles between 99 and 100.
const percentile = x => ({ 100: 99.9, 101: 99.99 })[x] ?? x;

const cdfMark = (x, index) => ({ index, text: String(percentile(x)), anchor: x > 100 ? "end" : "middle" });

function trendAt(index) {
  const [end, unit] = AGO.find(([end]) => index < end);
  const ago = end - index - (unit === "s" ? 1 : 0);
  return ago ? `${ago} ${unit} ago` : "now";
}

class Metric {
  constructor(name) {
    this.name = name;
    this.value = html("b");
    this.button = html("button", { type: "button", "aria-expanded": "false" }, html("span", {}, name), this.value);
    this.chart = new Chart({ title: name, format: unitOf(name), empty: "no data", quiet: true });
    this.chart.figure.hidden = true;
    this.node = html("li", {}, this.button, this.chart.figure);
    this.node.dataset.metric = name;
    this.button.addEventListener("click", () => {
      this.chart.figure.hidden = !this.chart.figure.hidden;
      this.button.setAttribute("aria-expanded", String(this.unfolded));
      if (this.unfolded) this.refresh().catch(lost);
    });
  }

  get unfolded() {
    return !this.chart.figure.hidden;
  }

  async refresh() {
    const text = await fetched(`series?name=${encodeURIComponent(this.name)}`);
    // For an unknown name the response is a text that is not JSON.
    const { label, data } = text.startsWith("{") ? JSON.parse(text) : { label: "trend", data: [] };
    const series = [{ name: "", values: data.map(([, value]) => value) }];
    if (label === "cdf") {
      const marks = data.flatMap(([x], index) => (CDF_MARKS.includes(x) ? [cdfMark(x, index)] : []));
      this.chart.update({ series, marks, at: index => `${percentile(data[index][0])} % within` });
    } else {
      const known = data.length > 0;
      this.chart.update({ series, at: trendAt, marks: known ? TREND_MARKS : [], borders: known ? [30, 54, 114] : [] });
    }
  }
}

const metrics = new Map();

function showMetrics(listed) {
  const list = byId("metrics");
  rows(list, metrics, listed, metric => metric.name, metric => new Metric(metric.name));
  const wanted = byId("metric-filter").value.trim().toLowerCase();
  for (const { name, value } of listed) {
    show(metrics.get(name).value, unitOf(name)(value));
    metrics.get(name).node.hidden = !name.toLowerCase().includes(wanted);
  }
  byId("metric-filter").hidden = listed.length < METRIC_FILTER_FROM;
  // Removes the list for readers without JavaScript.
  while (list.children.length > listed.length) list.lastElementChild.remove();
}
