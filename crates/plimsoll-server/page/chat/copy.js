// Copying, also where the browser has no clipboard API: pages over plain HTTP from another machine.

import { announce, el, text } from '../show.js';
import { icon } from './icons.js';

const SHOWN_MS = 1500;

/** A button that copies what `words()` returns. `idle`: its caption while nothing was copied. */
export function copyButton(label, words, idle = 'Copy') {
  const caption = el('span', {}, idle);
  const button = el('button', { type: 'button', class: 'small-button copy', 'aria-label': label, title: label }, icon('copy'), caption);
  button.addEventListener('click', async () => {
    const done = await copied(words());
    text(caption, done ? 'Copied' : 'Not copied');
    announce(done ? 'Copied' : 'The browser refused the clipboard. Select the text and copy it.');
    setTimeout(() => text(caption, idle), SHOWN_MS);
  });
  return button;
}

async function copied(words) {
  try {
    await navigator.clipboard.writeText(words);
    return true;
  } catch {
    return copiedBySelection(words);
  }
}

function copiedBySelection(words) {
  const focused = document.activeElement;
  const field = el('textarea', { class: 'visually-hidden', tabindex: -1, 'aria-hidden': 'true' });
  field.value = words;
  (document.querySelector('dialog[open]') ?? document.body).append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  focused?.focus();
  return done;
}
