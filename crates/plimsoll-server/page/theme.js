// Sets the theme that was chosen here before anything is painted. A classic script, so that it runs before the body.
'use strict';
try {
  const chosen = localStorage.getItem('plimsoll-theme');
  if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's theme is used.
}
