// How numbers and elements are shown. All text from the server goes through `text` or `el`, which make text nodes: nothing here or
// elsewhere on the page turns a string into markup.

const SVG = 'http://www.w3.org/2000/svg';

export const byId = (id) => document.getElementById(id);

/** An HTML element; attributes that are null are left out, children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Sets an element's text, and only if it is another: a screen reader need not hear the same twice. */
export function text(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

/** Sets an attribute if it is another. */
export function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const UNITS = ['KiB', 'MiB', 'GiB', 'TiB'];

/** 1536 → "1.5 KiB". */
export function bytes(count) {
  if (Math.abs(count) < 1024) return `${Math.round(count)} B`;
  let value = count / 1024;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(1)} ${UNITS[unit]}`;
}

export const signedBytes = (count) => (count < 0 ? `−${bytes(-count)}` : `+${bytes(count)}`);

/** 12345 → "12,345"; small values with a decimal: 3.21 → "3.2". */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  return Number.isInteger(value) || value >= 100 ? Math.round(value).toLocaleString('en') : value.toFixed(1);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Seconds for people: "4.2 s", "3 min 5 s", "2 h 10 min". */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** "kv_pages" → "kv pages", for names this page does not know. */
export const spoken = (name) => String(name).replaceAll('_', ' ');

/** Tells screen readers something that has happened. */
export function announce(words) {
  text(byId('news'), words);
}
