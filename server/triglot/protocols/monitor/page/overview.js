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
  ["requests", "Requests", model => exact(model.requests)],
  ...Object.entries(PROTOCOLS).map(([protocol, title]) => [protocol, title, model => exact(model.protocols?.[protocol] ?? 0)]),
  ["failures", "Failures", model => exact(model.failures)],
  ["rate", "Rate", model => perSecond(model.request_rate), "requests per second, of the last seconds"],
  ["p50", "p50", model => milliseconds(model.latency_ms.p50), "half of the last seconds' requests took at most this"],
  ["p99", "p99", model => milliseconds(model.latency_ms.p99), "99 % of the last seconds' requests took at most this"],
  ["queue", "Waiting", model => exact(model.queue_depth)],
  ["wait", "Wait", model => milliseconds(model.queue_ms), "mean time in the queue, since the start"],
  ["run", "Run", model => milliseconds(model.compute_ms), "mean time of the model, since the start"],
  ["batch", "Batch", model => plain(model.mean_batch_size), "mean size of the last seconds' batches"],
];

// Updates a table's rows by key: creates missing ones in the order of `items`, and removes obsolete ones.
function rows(body, known, items, keyOf, makeRow) {
  const kept = new Set();
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
}

byId("models").querySelector("thead tr").append(
  ...[["", "Model"], ["", "State"], ...COLUMNS].map(([, text, , title], index) =>
    html("th", { scope: "col", role: "columnheader", ...(title && { title }), ...(index === 1 && { class: "left" }) }, text)));
const modelRows = new Map();

function modelRow(model) {
  const cell = (name, title) => html("td", { role: "cell", "data-field": name, "data-label": title });
  const cells = new Map(COLUMNS.map(([name, title]) => [name, cell(name, title)]));
  const about = html("small"), state = html("span"), reason = html("small");
  const stateCell = html("td", { role: "cell", class: "state left", "data-field": "state" }, state, reason);
  const open = html("button", { type: "button", class: "name", title: "Show its details, and call it" }, model.name);
  open.addEventListener("click", () => modelView.open(model.name, String(model.version)));
  const title = html("th", { scope: "row", role: "rowheader" }, open, " ", about);
  const node = html("tr", { role: "row" }, title, stateCell, ...cells.values());
  node.dataset.model = model.name;
  node.dataset.version = model.version ?? "";
  return { node, cells, about, state, reason, stateCell };
}

function showModels(models) {
  rows(byId("models").tBodies[0], modelRows, models, model => JSON.stringify([model.name, model.version]), modelRow);
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const model of models) {
    const row = modelRows.get(JSON.stringify([model.name, model.version]));
    show(row.about, [model.version === null ? "" : `version ${model.version}`, model.platform].filter(Boolean).join(" · "));
    show(row.state, model.state.toLowerCase().replaceAll("_", " "));
    show(row.reason, model.reason);
    row.stateCell.className = `state left ${model.state.toLowerCase()}`;
    for (const [name, , value] of COLUMNS) show(row.cells.get(name), value(model));
    row.cells.get("failures").classList.toggle("some", model.failures > 0);
    row.node.classList.toggle("idle", !model.requests);
    row.stateCell.classList.toggle("why", Boolean(model.reason));
    // A long reason takes the cells of numbers that do not exist yet.
    const alone = Boolean(model.reason) && !model.requests;
    row.stateCell.colSpan = alone ? COLUMNS.length + 1 : 1;
    for (const cell of row.cells.values()) cell.hidden = alone;
    row.node.hidden = !model.name.toLowerCase().includes(wanted);
  }
  byId("model-section").hidden = false;
  byId("filter").hidden = models.length < FILTER_FROM;
  byId("models").hidden = !models.length;
  byId("no-models").hidden = models.length > 0;
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
