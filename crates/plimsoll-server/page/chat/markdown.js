// Markdown as elements. The lexer of marked gives tokens; this file makes nodes of them and never a string of HTML.
// HTML in an answer is shown as text. Images of an answer become links: nothing is fetched unless the reader clicks.

import { lexer } from '../vendor/marked.esm.js';
import { el } from '../show.js';
import { codeBlock } from './code.js';
import { decoded } from './entities.js';
import { DEPTH_MAX } from './limits.js';

/** Addresses that a link may lead to. */
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

const INLINE_TAGS = { strong: 'strong', em: 'em', del: 's' };

/** Shows `text` in `node`. A block that is as it was keeps its element, so that selections and scroll positions stay. */
export function showMarkdown(node, text) {
  const blocks = tokensOf(text).filter((token) => token.type !== 'space' && token.type !== 'def');
  blocks.forEach((token, i) => {
    const old = node.children[i];
    // A later definition may change what a link of an earlier block means, so links are part of the comparison.
    const key = `${token.type}\n${token.raw}\n${(token.tokens ?? []).map((part) => part.href ?? '').join('\n')}`;
    if (old?.markdownKey === key) return;
    const made = block(token, 0, old);
    made.markdownKey = key;
    if (old === undefined) node.append(made);
    else if (old !== made) old.replaceWith(made);
  });
  while (node.children.length > blocks.length) node.lastElementChild.remove();
}

function tokensOf(text) {
  try {
    return lexer(text);
  } catch {
    // Nested too deeply for the lexer: as one plain paragraph.
    return [{ type: 'text', raw: text, text, escaped: false }];
  }
}

function block(token, depth, old) {
  if (depth > DEPTH_MAX) return el('p', { class: 'raw' }, token.raw);
  switch (token.type) {
    case 'heading':
      // The page's own headings are above: an answer begins at the fourth level.
      return el(`h${Math.min(6, token.depth + 3)}`, { class: `md-h${token.depth}` }, ...inline(token.tokens, depth));
    case 'code':
      return codeBlock(token.text, token.lang ?? '', old);
    case 'blockquote':
      return el('blockquote', {}, ...blocks(token.tokens, depth + 1));
    case 'list':
      return list(token, depth);
    case 'table':
      return table(token, depth);
    case 'hr':
      return el('hr');
    case 'html':
      return el('p', { class: 'raw' }, token.raw.trimEnd());
    case 'paragraph':
      return el('p', {}, ...inline(token.tokens, depth));
    case 'text':
      return el('p', {}, ...(token.tokens ? inline(token.tokens, depth) : [decoded(token.text)]));
    default:
      return el('p', {}, token.raw);
  }
}

function blocks(tokens, depth) {
  return tokens.filter((token) => token.type !== 'space' && token.type !== 'def').map((token) => block(token, depth));
}

function list(token, depth) {
  const items = token.items.map((item) => {
    const parts = item.tokens.flatMap((part) => {
      // An item of a tight list holds its words without a paragraph.
      if (part.type === 'text') return part.tokens ? inline(part.tokens, depth) : [decoded(part.text)];
      return part.type === 'checkbox' ? inline([part], depth) : blocks([part], depth + 1);
    });
    return el('li', { class: item.task ? 'task' : null }, ...parts);
  });
  if (!token.ordered) return el('ul', {}, ...items);
  return el('ol', { start: token.start === 1 || token.start === '' ? null : token.start }, ...items);
}

function table(token, depth) {
  const cell = (tag) => (part) => {
    const scope = tag === 'th' ? 'col' : null;
    return el(tag, { scope, class: part.align ? `align-${part.align}` : null }, ...inline(part.tokens, depth));
  };
  const head = el('thead', {}, el('tr', {}, ...token.header.map(cell('th'))));
  const rows = token.rows.map((row) => el('tr', {}, ...row.map(cell('td'))));
  // A wide table scrolls by itself, also by keyboard.
  const scroller = { class: 'md-table', tabindex: 0, role: 'region', 'aria-label': 'Table' };
  return el('div', scroller, el('table', {}, head, el('tbody', {}, ...rows)));
}

function inline(tokens, depth) {
  if (depth > DEPTH_MAX) return tokens.map((token) => token.raw);
  return tokens.flatMap((token) => {
    switch (token.type) {
      case 'text':
        return token.tokens ? inline(token.tokens, depth + 1) : [decoded(token.text)];
      case 'strong':
      case 'em':
      case 'del':
        return [el(INLINE_TAGS[token.type], {}, ...inline(token.tokens, depth + 1))];
      case 'codespan':
        return [el('code', {}, token.text)];
      case 'br':
        return [isBreak(token.raw) ? el('br') : token.raw];
      case 'link':
        return [link(token, depth)];
      case 'image':
        return [link({ ...token, tokens: [{ type: 'text', text: `Image: ${token.text || token.href}` }] }, depth)];
      case 'checkbox':
        return [el('input', { type: 'checkbox', disabled: '', checked: token.checked ? '' : null, 'aria-label': token.checked ? 'done' : 'to do' }), ' '];
      case 'html':
        // The one tag that models write for a line break in a table.
        return [/^<br\s*\/?>$/i.test(token.text) ? el('br') : token.text];
      case 'escape':
        return [token.text];
      default:
        return [token.raw];
    }
  });
}

const isBreak = (raw) => /\n/.test(raw);

function link(token, depth) {
  const words = inline(token.tokens, depth + 1);
  const address = decoded(token.href);
  if (!SAFE_LINK.test(address)) return el('span', {}, ...words);
  return el('a', { href: address, title: token.title ? `${token.title} (${address})` : address, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...words);
}
