// Small line drawings for buttons. Each is decoration: the button has words.

import { svg } from '../show.js';

const PATHS = {
  attach: 'M8 12.5l6-6a3 3 0 0 1 4.2 4.2l-8 8a5 5 0 0 1-7-7l8-8',
  branch: 'M7 4v10m0 0a3 3 0 1 0 .01 0M17 10a3 3 0 1 0-.01 0m0 0c0 4-10 1-10 6',
  close: 'M6 6l12 12M18 6L6 18',
  copy: 'M9 9h10v11H9zM5 15V4h10',
  down: 'M12 5v14m-6-6l6 6 6-6',
  edit: 'M5 19l1-4L16 5l3 3L9 18zM14 7l3 3',
  export: 'M12 4v11m-4-4l4 4 4-4M5 19h14',
  import: 'M12 15V4m-4 4l4-4 4 4M5 19h14',
  left: 'M14 6l-6 6 6 6',
  menu: 'M4 7h16M4 12h16M4 17h16',
  plus: 'M12 5v14M5 12h14',
  regenerate: 'M19 12a7 7 0 1 1-2-5l2 2m0-5v5h-5',
  right: 'M10 6l6 6-6 6',
  settings: 'M4 7h9m5 0h2M4 17h2m5 0h9M15.500 4.500v5M8.500 14.500v5',
  trash: 'M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13',
};

export function icon(name) {
  return svg('svg', { class: 'icon', viewBox: '0 0 24 24', 'aria-hidden': 'true', focusable: 'false' }, svg('path', { d: PATHS[name] }));
}

/** Puts an icon before the words of the buttons that name one (`data-icon`). */
export function drawIcons(root) {
  for (const node of root.querySelectorAll('[data-icon]')) node.prepend(icon(node.dataset.icon));
}
