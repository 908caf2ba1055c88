// ---- the reader's token, for a server with an access file

const TOKEN_KEY = "triglot-token", TOKEN_VARIABLE = "TRIGLOT_TOKEN", REFUSED_MS = 30_000;
// Of a call for a terminal: the token itself stands nowhere in the page.
const TOKEN_FIELD = `-H "authorization: Bearer $${TOKEN_VARIABLE}"`;

// What the reader may not do, or not without a token.
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// What the server says of an answer that is an error.
async function reasonOf(response) {
  const text = await response.text();
  try {
    const { error, status } = JSON.parse(text);
    return error ?? status.msg;
  } catch {
    return text || `the server answers ${response.status}`;
  }
}

// Strategy: requests go through `fetch` here. Whoever the server does not know is asked for a token, which the tab keeps; a
// token that it does not know any more is forgotten. What is asked again and again rests once it was refused.
class Reader {
  // `known`: called when there is another token.
  constructor(known) {
    this.known = known;
    this.token = "";
    // Storage may be forbidden; then the token lasts as long as the page.
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
    // Nothing that the token has shown stays.
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
    // Who is busy elsewhere stays there.
    if (isFree) this.input.focus();
  }

  // As the browser's.
  async fetch(url, options = {}) {
    const { token } = this, headers = new Headers(options.headers);
    if (token && !headers.has("authorization")) headers.set("authorization", `Bearer ${token}`);
    const response = await fetch(url, { ...options, headers });
    // Not for the answer to a token that was replaced meanwhile.
    if (response.status === 401 && token === this.token) this.ask(await reasonOf(response.clone()));
    return response;
  }

  // The text of an answer. Raises `Refused`, then for a while without asking again, and other errors.
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
