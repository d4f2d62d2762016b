// Asking the broker. The token goes into a header, never into an address, and lives in this tab only.

const KEY = "forebay.token";
/** A stream that is silent for longer is dead: the broker gives a sign of life every few seconds. */
const SILENCE_MS = 30_000;

export class Problem extends Error {
  constructor(status, type, message, hint, requestId) {
    super(message);
    this.status = status;
    this.type = type;
    this.hint = hint;
    this.requestId = requestId;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

let askForToken = async () => false;
let asking = null;
let declined = false;

/** Whoever can ask a person for a token; answers whether there is one now. */
export function onTokenWanted(ask) {
  askForToken = ask;
}

/** After somebody said no, nobody is asked again until the button is used. */
export function wantTokenAgain() {
  declined = false;
}

async function tokenGiven(reason) {
  if (declined) return false;
  asking ??= askForToken(reason).finally(() => {
    asking = null;
  });
  const given = await asking;
  declined = !given;
  return given;
}

async function send(method, path, options) {
  const headers = { Accept: options.accept || "application/json", ...options.headers };
  const mine = token.get();
  if (mine) headers.Authorization = `Bearer ${mine}`;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  try {
    const response = await fetch(path, {
      method,
      headers,
      body: options.body === undefined ? undefined : JSON.stringify(options.body),
      signal: options.signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    return [response, mine];
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const hint = "is it running, and can this machine reach it? The page tries again by itself where it shows live data";
    throw new Problem(0, "Unreachable", "The broker does not answer.", hint, "");
  }
}

async function problemOf(response) {
  const requestId = response.headers.get("X-Request-Id") || "";
  try {
    const { error } = await response.json();
    return new Problem(response.status, error.type, error.message, error.hint, error.request_id || requestId);
  } catch {
    return new Problem(response.status, `HTTP ${response.status}`, "The answer cannot be read.", "", requestId);
  }
}

/** A response; asks for a token where one is wanted, and tries once more with it. */
async function respond(method, path, options) {
  for (;;) {
    const [response, used] = await send(method, path, options);
    if (response.status !== 401) return response;
    const problem = await problemOf(response);
    // Somebody else may have given one meanwhile.
    if (token.get() !== used) continue;
    if (!(await tokenGiven(used ? "This token is not accepted: unknown, revoked or expired." : "This broker wants a token."))) throw problem;
  }
}

/** JSON of an answer. `also`: statuses whose body is an answer and no error. */
export async function ask(method, path, options = {}) {
  const response = await respond(method, path, options);
  if (response.ok || (options.also || []).includes(response.status)) {
    const body = await response.json();
    if (response.ok || !body.error) return body;
    throw new Problem(response.status, body.error.type, body.error.message, body.error.hint, body.error.request_id);
  }
  throw await problemOf(response);
}

export const get = (path, signal) => ask("GET", path, { signal });
export const post = (path, body, options) => ask("POST", path, { body, ...options });

/** Server-sent events by fetch, since EventSource cannot send a header. Returns when the stream ends. */
export async function events(path, { signal, onOpen, onEvent }) {
  const response = await respond("GET", path, { accept: "text/event-stream", signal });
  if (!response.ok) throw await problemOf(response);
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const silence = setTimeout(() => reader.cancel(), SILENCE_MS);
    const { value, done } = await reader.read().finally(() => clearTimeout(silence));
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { type: "message", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.type = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) onEvent(event);
    }
  }
}

const part = encodeURIComponent;

export const paths = {
  topic: (topic) => `/topics/${part(topic)}`,
  partition: (topic, partition, what) => `/topics/${part(topic)}/partitions/${part(partition)}/${what}`,
  group: (group) => `/groups/${part(group)}`,
  tail: (topic, partition, from) => `/tail?${new URLSearchParams({ topic, partition, from })}`,
};

/** Do it for all, a few at a time, in order; what fails is an error in its place. */
export async function each(items, work, atOnce = 4) {
  const results = new Array(items.length);
  let next = 0;
  const worker = async () => {
    while (next < items.length) {
      const mine = next;
      next += 1;
      try {
        results[mine] = await work(items[mine]);
      } catch (error) {
        if (error.name === "AbortError") throw error;
        results[mine] = error;
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(atOnce, items.length) }, worker));
  return results;
}
