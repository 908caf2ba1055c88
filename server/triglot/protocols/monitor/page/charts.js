"use strict";

// Strategy: one JSON document per second is drawn as it is. Elements are kept and only their text changes; data from the
// server is always inserted as text, never as markup.

const REFRESH_MS = 1000, TIMEOUT_MS = 5000, FILTER_FROM = 9, ROWS = 50, METRIC_FILTER_FROM = 25;
const PROTOCOLS = { kserve: "KServe V2", tfserving: "TF Serving", grps: "grps", mlflow: "MLflow" };
// The page has two addresses, and may be behind a proxy's path prefix.
const monitor = new URL(location.pathname.endsWith("/monitor/metrics") ? "./" : "grps/v1/monitor/", location.href);

const byId = id => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const html = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function show(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- numbers for people: `scale` is the value that determines the unit

const power = value => Math.floor(Math.log10(Math.abs(value) || 1) + 1e-9);

function digits(value, step) {
  const places = step ? -power(step) : 2 - power(value);
  return String(Number(value.toFixed(Math.min(4, Math.max(0, places)))));
}

const inUnits = units => (value, scale = value, step = 0) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(scale);
  const [factor, unit] = units.find(([factor]) => size >= factor) ?? units[units.length - 1];
  const space = unit && !unit.startsWith("/") ? "\u00a0" : "";
  return value === 0 ? "0" : digits(value / factor, step / factor) + space + unit;
};
const plain = inUnits([[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
const perSecond = inUnits([[1e9, "G/s"], [1e6, "M/s"], [1e3, "k/s"], [1, "/s"]]);
const milliseconds = inUnits([[60e3, "min"], [1e3, "s"], [1, "ms"], [1e-3, "µs"]]);
const percent = value => (value === null || value === undefined ? "–" : `${digits(value)}\u00a0%`);
const exact = value => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

function duration(seconds) {
  const whole = unit => Math.floor(seconds / unit);
  const parts = [[whole(86400), "d"], [whole(3600) % 24, "h"], [whole(60) % 60, "min"], [whole(1) % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

function unitOf(name) {
  const unit = /\(([^()]*)\)$/.exec(name)?.[1];
  if (unit === "ms") return milliseconds;
  if (unit === "%") return percent;
  return unit ? (value, scale, step) => plain(value, scale, step) + (value ? "\u00a0" + unit : "") : plain;
}

// ---- charts

const HEIGHT = 150, TOP = 10, BOTTOM = 20, RIGHT = 12;

function ticks(lowest, highest, whole) {
  const rough = (highest - lowest || 1) / 3, unit = 10 ** power(rough);
  let step = unit * [1, 2, 5, 10].find(factor => factor * unit >= rough * 0.999);
  if (whole) step = Math.max(1, step);
  const first = Math.floor(lowest / step + 1e-9), last = Math.max(first + 1, Math.ceil(highest / step - 1e-9));
  return { step, values: Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step) };
}

class Chart {
  // options: title, format, empty (text without values), emptyAtZero (also if all values are 0),
  // whole (integer ticks), quiet (the title is already shown above)
  constructor(options) {
    this.options = options;
    this.when = html("span");
    this.image = svg("svg", { role: "img", tabindex: "0" });
    this.legend = html("ul", { class: "legend" });
    const caption = html("figcaption", {}, options.quiet ? "" : options.title, this.when);
    this.figure = html("figure", options.quiet ? {} : { class: "card" }, caption, this.image, this.legend);
    this.data = null;
    this.cursor = null;
    this.image.addEventListener("pointermove", event => this.point(this.indexAt(event)));
    this.image.addEventListener("pointerdown", event => this.point(this.indexAt(event)));
    this.image.addEventListener("pointerleave", event => event.pointerType === "mouse" && this.point(null));
    this.image.addEventListener("blur", () => this.point(null));
    this.image.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.image);
  }

  // data: series [{name, values}], at(index) → text, marks [{index, text, anchor}], borders [index]
  update(data) {
    this.data = data;
    this.draw();
  }

  get count() {
    return Math.max(0, ...this.data.series.map(one => one.values.length));
  }

  x(index) {
    return this.left + (index / Math.max(1, this.count - 1)) * (this.width - this.left - RIGHT);
  }

  indexAt(event) {
    if (!this.data || !this.count) return null;
    const x = event.clientX - this.image.getBoundingClientRect().left;
    const part = (x - this.left) / (this.width - this.left - RIGHT);
    return Math.min(this.count - 1, Math.max(0, Math.round(part * (this.count - 1))));
  }

  point(index) {
    this.cursor = index;
    this.legend.removeAttribute("aria-live");
    this.draw();
  }

  key(event) {
    const last = this.data ? this.count - 1 : -1, here = this.cursor ?? last;
    const target = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last, Escape: null }[event.key];
    if (last < 0 || target === undefined) return;
    event.preventDefault();
    this.point(target === null ? null : Math.min(last, Math.max(0, target)));
    // Values are announced only while the reader moves the cursor.
    if (target !== null) this.legend.setAttribute("aria-live", "polite");
  }

  draw() {
    this.width = this.image.clientWidth;
    if (!this.data || !this.width) return;
    const known = this.data.series.flatMap(one => one.values).filter(value => value !== null);
    const nothing = !known.some(value => value || !this.options.emptyAtZero);
    const { step, values } = ticks(Math.min(0, ...known), Math.max(0, ...known), this.options.whole);
    const lowest = values[0], top = values[values.length - 1];
    const y = value => HEIGHT - BOTTOM - ((value - lowest) / (top - lowest)) * (HEIGHT - TOP - BOTTOM);
    const labels = values.map(value => this.options.format(value, top, step));
    this.left = Math.max(...labels.map(label => label.length)) * 6.4 + 8;
    const across = at => svg("line", { class: "grid", x1: this.left, x2: this.width - RIGHT, y1: y(at), y2: y(at) });
    const upright = (x, name) => svg("line", { class: name, x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
    const text = (x, y, anchor, text) => svg("text", { x, y, "text-anchor": anchor }, text);
    this.image.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.image.replaceChildren(
      ...values.map(across),
      ...(nothing ? [] : values).map((value, index) => text(this.left - 6, y(value) + 4, "end", labels[index])),
      ...(this.data.borders ?? []).map(index => upright(this.x(index), "grid")),
      ...this.data.marks.map(mark => text(this.x(mark.index), HEIGHT - 5, mark.anchor ?? "middle", mark.text)),
      ...this.data.series.map((one, number) => svg("path", { class: `series series-${number}`, d: this.path(one.values, y) })),
      ...(nothing ? [text((this.left + this.width) / 2, (HEIGHT - BOTTOM) / 2, "middle", this.options.empty)] : []),
      ...(this.cursor === null ? [] : [upright(this.x(this.cursor), "now")]),
    );
    this.read(known, nothing);
  }

  path(values, y) {
    let path = "", joined = false;
    values.forEach((value, index) => {
      const point = value === null ? "" : `${this.x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      // A value between unknown ones is drawn as a dot.
      path += point && (joined ? `L${point}` : `M${point}h.01`);
      joined = value !== null;
    });
    return path;
  }

  read(known, nothing) {
    const { series, at } = this.data, { title, format, empty } = this.options;
    const index = this.cursor ?? this.count - 1, when = index < 0 ? "" : at(index);
    const values = series.map(one => format(one.values[index] ?? null));
    const names = series.map(one => one.name);
    if (this.names !== names.join()) {
      this.names = names.join();
      this.legend.replaceChildren(...names.map((name, number) => {
        const line = svg("path", { class: `series series-${number}`, d: "M2 4H24" });
        return html("li", {}, svg("svg", { "aria-hidden": "true" }, line), name && `${name} `, html("b"));
      }));
    }
    values.forEach((value, number) => show(this.legend.children[number].querySelector("b"), value));
    show(this.when, when);
    const summary = values.map((value, number) => `${names[number]} ${value}`.trim()).join(", ");
    const label = nothing ? empty : `${when}: ${summary}; highest shown ${format(Math.max(...known))}`;
    this.image.setAttribute("aria-label", nothing ? `${title}: ${label}` : `${title}, ${label}`);
  }
}

const SHORT = 60;

// The last minute, or the whole history once it is longer.
function recent(history, series) {
  const count = Math.max(SHORT, history.seconds);
  const [step, unit, size] = count > SHORT ? [60, "min", 60] : [15, "s", 1];
  const marks = [{ index: count - 1, text: "now", anchor: "end" }];
  for (let ago = step; ago < count; ago += step) {
    marks.push({ index: count - 1 - ago, text: `−${ago / size}\u00a0${unit}` });
  }
  return {
    series: series.map(({ name, values }) => ({ name, values: [...Array(count - values.length).fill(null), ...values] })),
    marks,
    at: index => (index < count - 1 ? `${duration(count - 1 - index)} ago` : "now"),
  };
}

const CHARTS = [
  [{ title: "Requests per second", format: perSecond, whole: true, empty: "no requests yet", emptyAtZero: true },
    history => Object.entries(history.requests).map(([name, values]) => ({ name: PROTOCOLS[name] ?? name, values }))],
  [{ title: "Latency", format: milliseconds, empty: "no requests yet" },
    history => ["p50", "p90", "p99"].map(name => ({ name, values: history[`${name}_ms`] }))],
  [{ title: "Waiting and in flight", format: plain, whole: true, empty: "nothing waits or runs", emptyAtZero: true },
    history => [{ name: "waiting", values: history.queue_depth }, { name: "in flight", values: history.in_flight }]],
  [{ title: "Batch size", format: plain, empty: "nothing ran yet" },
    history => [{ name: "mean", values: history.mean_batch_size }]],
  [{ title: "Failures per second", format: perSecond, whole: true, empty: "no failures", emptyAtZero: true },
    history => [{ name: "failed", values: history.failures }]],
  [{ title: "Event loop lag", format: milliseconds, empty: "not measured yet" },
    history => [{ name: "longest", values: history.loop_lag_ms }]],
].map(([options, series]) => ({ chart: new Chart(options), series }));
