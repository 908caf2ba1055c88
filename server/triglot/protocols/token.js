// ---- the reader's token, for a server with an access file

const TOKEN_KEY = "triglot-token", TOKEN_VARIABLE = "TRIGLOT_TOKEN", REFUSED_MS = 30_000;
// For commands in a terminal: the token itself is never shown in the page.
const TOKEN_FIELD = `-H "authorization: Bearer $${TOKEN_VARIABLE}"`;

// A call that the reader may not make, or not without a token.
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the text of an error response.
async function reasonOf(response) {
  const text = await response.text();
  try {
    const { error, status } = JSON.parse(text);
    return error ?? status.msg;
  } catch {
    return text || `the server answers ${response.status}`;
  }
}

// Strategy: requests go through `fetch` here. A reader without a valid token is asked for one, which is kept in the tab's storage
// and dropped once the server rejects it. A refused request that the page repeats is then paused for a while.
class Reader {
  // `known` is called with a new token.
  constructor(known) {
    this.known = known;
    this.token = "";
    // Storage may be disabled; then the token lasts as long as the page.
    try { this.token = sessionStorage.getItem(TOKEN_KEY) ?? "" } catch { }
    this.refusals = new Map();
    this.input = html("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", "aria-describedby": "token-problem" });
    this.problem = html("p", { id: "token-problem", role: "alert" });
    this.form = html("form", { class: "token", "aria-label": "Token", novalidate: "" },
      html("label", { for: "token" }, "Token"), this.input, html("button", { type: "submit" }, "Use token"), this.problem);
    this.form.hidden = true;
    this.forget = html("button", { type: "button" }, "Forget token");
    this.forget.hidden = !this.token;
    this.form.addEventListener("submit", event => {
      event.preventDefault();
      this.take(this.input.value.trim());
    });
    // Reloads, so that nothing stays that the token has shown.
    this.forget.addEventListener("click", () => {
      this.keep("");
      location.reload();
    });
    document.querySelector("header").append(this.forget);
    document.querySelector("header").after(this.form);
  }

  keep(token) {
    this.token = token;
    try { token ? sessionStorage.setItem(TOKEN_KEY, token) : sessionStorage.removeItem(TOKEN_KEY) } catch { }
    this.refusals = new Map();
    this.forget.hidden = !token;
    this.form.hidden = Boolean(token);
  }

  take(token) {
    if (!/^[!-~]+$/.test(token)) return this.ask("expected a token, ASCII without spaces");
    this.keep(token);
    this.input.value = "";
    this.forget.focus();
    this.known();
  }

  ask(problem) {
    const { activeElement } = document, isFree = [document.body, this.forget, null].includes(activeElement);
    if (this.token) this.keep("");
    this.form.hidden = false;
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
    // The focus stays where the reader is typing.
    if (isFree) this.input.focus();
  }

  // Fetches as the browser's `fetch` does, with the token.
  async fetch(url, options = {}) {
    const { token } = this, headers = new Headers(options.headers);
    if (token && !headers.has("authorization")) headers.set("authorization", `Bearer ${token}`);
    const response = await fetch(url, { ...options, headers });
    // Ignores responses to a token that was replaced meanwhile.
    if (response.status === 401 && token === this.token) this.ask(await reasonOf(response.clone()));
    return response;
  }

  // Returns a response's text. Throws `Refused`, without another request for a while, and other errors.
  async text(url, options) {
    const { refusals } = this, refused = refusals.get(String(url));
    if (refused && performance.now() < refused.until) throw refused.error;
    const response = await this.fetch(url, { cache: "no-store", ...options });
    if (response.ok) return response.text();
    const reason = await reasonOf(response);
    if (![401, 403].includes(response.status)) throw new Error(reason);
    const error = new Refused(response.status, reason);
    refusals.set(String(url), { error, until: response.status === 401 ? Infinity : performance.now() + REFUSED_MS });
    throw error;
  }
}
