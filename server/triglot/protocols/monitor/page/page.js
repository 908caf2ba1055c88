// ---- the page

function showAll(data) {
  const { name, version, uptime_seconds, ready } = data.server;
  show(byId("server"), name);
  document.title = `${name} monitor`;
  show(byId("about"), `Triglot ${version}, up ${duration(uptime_seconds)}${ready ? ", ready" : ""}`);
  show(byId("ready"), ready ? "" : `not ready: ${whyNotReady(data.models)}`);
  byId("ready").hidden = ready;
  for (const { nodes, values } of TILES) values(data).forEach((text, index) => show(nodes[index], text));
  for (const { chart, series } of CHARTS) chart.update(recent(data.history, series(data.history)));
  showModels(data.models);
  modelView.show();
  showProtocols(data.protocols);
  showMetrics(data.metrics);
}

// What a server that is not ready waits for.
function whyNotReady(models) {
  const waits = models.filter(model => !model.ready && model.reason !== "unloaded");
  const first = waits.find(model => model.reason) ?? waits[0];
  if (!first) return models.length ? "it is stopping" : "no models yet";
  return `${first.name} ${first.reason || `is ${first.state.toLowerCase()}`}${waits.length > 1 ? `, and ${waits.length - 1} more` : ""}`;
}

function visit(section) {
  section.scrollIntoView();
  section.focus({ preventScroll: true });
}

const fetched = path => reader.text(new URL(path, monitor), { signal: AbortSignal.timeout(TIMEOUT_MS) });

function connection(state, text, banner = "") {
  byId("connection").className = state;
  show(byId("connection"), text);
  show(byId("banner"), banner);
  byId("banner").hidden = !banner;
  document.querySelector("main").classList.toggle("stale", state !== "live" && Boolean(latest));
  document.querySelector("main").classList.toggle("limited", state === "refused" && !latest);
}

function lost(error) {
  if (error instanceof Refused) {
    // The form explains why a token is needed.
    connection("refused", error.status === 401 ? "needs a token" : "limited", error.status === 401 ? "" : error.message);
    return;
  }
  // The browser's text for failed fetches is not helpful; the server's is.
  const reason = error instanceof TypeError || error.name === "TimeoutError" ? "" : ` (${error.message})`;
  connection("lost", "offline", `Connection lost, retrying${reason}`);
}

let timer = 0, running = false, latest = null;
const reader = new Reader(() => refresh());

// Readers who may not see all models together may still see one, and call it.
async function fetchAll() {
  try {
    latest = JSON.parse(await fetched("overview"));
    await Promise.all([
      ...[...metrics.values()].filter(metric => metric.unfolded).map(metric => metric.refresh()),
      modelView.refresh(latest.models),
    ]);
    connection("live", "live");
  } catch (error) {
    if (error.status === 403) latest = null;
    lost(error);
    if (error.status === 403) await modelView.refresh([]).then(() => modelView.show()).catch(lost);
    return false;
  }
  return true;
}

async function refresh() {
  clearTimeout(timer);
  if (running) return;
  running = true;
  try {
    const isFirst = !latest;
    if (await fetchAll()) {
      showAll(latest);
      // The form comes first where the charts are empty. Nothing moves while the page is open.
      if (isFirst && latest.totals.requests) byId("now").after(byId("chart-section"), byId("model-section"));
    }
    modelView.follow();
  } finally {
    running = false;
    if (!document.hidden) timer = setTimeout(refresh, REFRESH_MS);
  }
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) refresh();
});

// ---- theme: the system's, or the one selected here

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  show(byId("theme"), `Theme: ${theme}`);
  // Storage may be disabled; then the choice lasts as long as the page.
  try { localStorage.setItem("triglot-theme", theme) } catch { }
}

let stored = null;
try { stored = localStorage.getItem("triglot-theme") } catch { }
setTheme(THEMES.includes(stored) ? stored : "auto");
byId("theme").hidden = false;
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
});
// Without JavaScript these links lead to the root of the host, which may be a proxy's.
for (const link of document.querySelectorAll("a[href^='/']")) link.href = new URL(link.getAttribute("href").slice(1), serverRoot);
for (const id of ["filter", "state-filter"]) byId(id).addEventListener("input", showFirst);
byId("metric-filter").addEventListener("input", () => latest && showMetrics(latest.metrics));
byId("charts").append(...CHARTS.map(({ chart }) => chart.figure));
refresh();
