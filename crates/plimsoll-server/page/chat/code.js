// Code with a copy button and colours. highlight.js is fetched from this server when the first code block appears.

import { attribute, el, text } from '../show.js';
import { copyButton } from './copy.js';
import { HIGHLIGHT_CHARS_MAX } from './limits.js';

let library = null;
let loading = null;

function load() {
  loading ??= import('../vendor/highlight.min.js').then(
    (module) => (library = module.default),
    // Without it, code has no colours. A later block tries again.
    () => (loading = null),
  );
  return loading;
}

/** A code block. `old` is reused if it is a code block, too: while an answer streams, its button and scroll position stay. */
export function codeBlock(code, info, old) {
  const language = info.split(/[\s,{]/, 1)[0].toLowerCase();
  const node = old?.classList.contains('code') ? old : frame();
  text(node.querySelector('.code-language'), language || 'text');
  attribute(node.querySelector('pre'), 'aria-label', language ? `Code in ${language}` : 'Code');
  paint(node.querySelector('code'), code, language);
  return node;
}

function frame() {
  const content = el('code');
  const head = el('div', { class: 'code-head' }, el('span', { class: 'code-language' }));
  head.append(copyButton('Copy code', () => content.textContent));
  return el('div', { class: 'code' }, head, el('pre', { tabindex: 0 }, content));
}

function paint(content, code, language) {
  content.source = code;
  if (language === '' || code.length > HIGHLIGHT_CHARS_MAX) return text(content, code);
  if (library === null) {
    text(content, code);
    load().then(() => {
      if (library !== null && content.source === code) paint(content, code, language);
    });
    return;
  }
  if (!library.getLanguage(language)) return text(content, code);
  const { _emitter: emitter } = library.highlight(code, { language, ignoreIllegals: true });
  content.replaceChildren(...nodes(emitter.rootNode.children));
}

/** The library's tree as elements: each scope is a class. */
function nodes(children) {
  return children.map((child) => {
    if (typeof child === 'string') return child;
    // An embedded language has no scope of its own.
    const scope = child.scope ? `hl-${child.scope.split('.')[0]}` : null;
    return el('span', { class: scope }, ...nodes(child.children));
  });
}
