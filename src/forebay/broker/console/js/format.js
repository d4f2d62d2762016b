// Numbers, sizes, times and bytes for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? whole.format(value) : short.format(value);
}

export function size(value) {
  if (value === null || value === undefined) return "–";
  let step = 0;
  let left = value;
  while (left >= 1024 && step < UNITS.length - 1) {
    left /= 1024;
    step += 1;
  }
  return `${step ? short.format(left) : whole.format(left)} ${UNITS[step]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${short.format(seconds * 1e6)} µs`;
  if (seconds < 1) return `${short.format(seconds * 1000)} ms`;
  if (seconds < 120) return `${short.format(seconds)} s`;
  if (seconds < 7200) return `${whole.format(seconds / 60)} min`;
  if (seconds < 172800) return `${short.format(seconds / 3600)} h`;
  return `${short.format(seconds / 86400)} d`;
}

export function dollars(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "$0";
  if (value < 0.01) return "< $0.01";
  return value < 100 ? `$${value.toFixed(2)}` : `$${whole.format(value)}`;
}

const two = (value) => String(value).padStart(2, "0");

/** Local time, to the millisecond. */
export function time(ms) {
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return `${ms} ms`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return `${day} ${clock}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// -- bytes: JSON of the broker has a text, or {"base64": ...} where bytes are no UTF-8

export function toBytes(value) {
  if (typeof value === "string") return new TextEncoder().encode(value);
  return Uint8Array.from(atob(value.base64), (letter) => letter.charCodeAt(0));
}

export const isText = (value) => typeof value === "string";

export function toText(value) {
  return isText(value) ? value : new TextDecoder("utf-8", { fatal: false }).decode(toBytes(value));
}

const ROW = 16;

/** Offset, bytes, letters: as hexdump -C. */
export function hexDump(bytes) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += ROW) {
    const row = [...bytes.subarray(at, at + ROW)];
    const pairs = row.map((byte) => byte.toString(16).padStart(2, "0"));
    const left = pairs.slice(0, 8).join(" ").padEnd(23);
    const right = pairs.slice(8).join(" ").padEnd(23);
    const letters = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${left}  ${right}  ${letters}`);
  }
  return lines.join("\n");
}

/** JSON with line breaks, letter for letter: numbers too large for JavaScript stay what they are. */
export function indentJson(text) {
  JSON.parse(text); // Raises where it is none; the result would have lost digits, so it is not used.
  let out = "";
  let depth = 0;
  let inString = false;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (let at = 0; at < text.length; at += 1) {
    const letter = text[at];
    if (inString) {
      out += letter;
      if (letter === "\\") out += text[(at += 1)];
      else if (letter === '"') inString = false;
    } else if (letter === '"') {
      inString = true;
      out += letter;
    } else if (letter === "{" || letter === "[") {
      const close = letter === "{" ? "}" : "]";
      const rest = /^\s*/.exec(text.slice(at + 1, at + 4096))[0].length;
      if (text[at + 1 + rest] === close) {
        out += letter + close;
        at += 1 + rest;
      } else {
        depth += 1;
        out += letter + line();
      }
    } else if (letter === "}" || letter === "]") {
      depth -= 1;
      out += line() + letter;
    } else if (letter === ",") out += letter + line();
    else if (letter === ":") out += ": ";
    else if (!/\s/.test(letter)) out += letter;
  }
  return out;
}
