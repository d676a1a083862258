// Many layouts: a point for each, the front that no other beats, and a table; marked in both at once.

const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const FRAME = { height: 440, left: 84, right: 26, top: 22, bottom: 46 };
const SHOWN_LINES = 100;
const WORDS = {
  cluster: 'machine', gpus: 'GPUs', tp: 'TP', pp: 'PP', dp: 'DP', cp: 'CP', ep: 'EP', expert_tp: 'expert TP', virtual_stages: 'virtual stages', micro_batch: 'micro-batch',
};
const NUMBERS = { peak_memory_bytes: 'peak memory', step_time_s: 'step time', tokens_per_s_per_gpu: 'tokens/s per GPU', mfu: 'MFU', usd_per_1b_tokens: 'USD / 10⁹ tokens' };
const SAID = {
  peak_memory_bytes: value => formatSI(value, 'B'), step_time_s: value => formatTime(value * 1e9), mfu: formatShare,
  tokens_per_s_per_gpu: value => Math.round(value).toLocaleString('en'), usd_per_1b_tokens: value => '$' + Math.round(value).toLocaleString('en'),
};
const SWEEP = JSON.parse($('#meta').textContent);
const sweep = { up: SWEEP.figures[0].key, by: ['tp', 'pp', ...SWEEP.settings].find(name => SWEEP.settings.includes(name)) || '', sort: SWEEP.figures[0].key, hidden: new Set(), hover: null, marked: null, width: 0 };
THEMES = SWEEP.palette;

const word = name => WORDS[name] || name.replaceAll('_', ' ');
const figureOf = key => SWEEP.figures.find(one => one.key === key);
const isBetter = (key, a, b) => (figureOf(key)?.better === 'high' ? a > b : a < b);
const groupOf = layout => (sweep.by ? String(layout[sweep.by] ?? '–') : '');
const shown = () => SWEEP.layouts.filter(one => one[sweep.up] !== null && !sweep.hidden.has(groupOf(one)));

/** Return the names of the groups that are told apart, numbers in their order. */
function groups() {
  const found = [...new Set(SWEEP.layouts.map(groupOf))];
  return found.sort((a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b));
}

/** Return the colour and the shape of a group: neighbours differ in both. */
function lookOf(name, names) {
  const { series } = colours();
  const at = names.indexOf(name);
  const spread = names.length > 1 ? Math.round(at * (series.length - 1) / Math.max(1, Math.min(names.length, series.length) - 1)) : 1;
  return { colour: series[spread % series.length], shape: at % 5 };
}

/** Return the best layout that fits, by the figure that is drawn upwards. */
function bestOf(layouts) {
  return layouts.filter(one => one.fits).reduce((best, one) => (best === null || isBetter(sweep.up, one[sweep.up], best[sweep.up]) ? one : best), null);
}

/** Return the layouts that fit and that none beats which needs no more memory, by memory. */
function frontOf(layouts) {
  const found = [];
  for (const one of layouts.filter(layout => layout.fits).sort((a, b) => a.peak_memory_bytes - b.peak_memory_bytes || (isBetter(sweep.up, a[sweep.up], b[sweep.up]) ? -1 : 1))) {
    if (!found.length || isBetter(sweep.up, one[sweep.up], found[found.length - 1][sweep.up])) found.push(one);
  }
  return found;
}

/** Return what tells a layout from the others, in words. */
const settingsOf = one => SWEEP.settings.filter(name => one[name] !== null).map(name => (name === 'schedule' ? one[name] : `${word(name)} ${one[name]}`)).join(' · ') || one.name;

/** Return the layout whose point is under the pointer. */
function pointAt(x, y) {
  const layouts = shown();
  if (!layouts.length) return null;
  const scale = scales(layouts);
  let [nearest, least] = [null, 11 ** 2];
  for (const one of layouts) {
    const far = (scale.x(one.peak_memory_bytes) - x) ** 2 + (scale.y(one[sweep.up]) - y) ** 2;
    if (far < least) [nearest, least] = [one, far];
  }
  return nearest;
}

function showTip(one, x, y) {
  const tip = $('#tip');
  tip.style.display = one ? 'block' : 'none';
  if (!one) return;
  const lines = [...[...SWEEP.marks, ...SWEEP.settings].map(name => [word(name), one[name] ?? '–']), ...Object.keys(NUMBERS).filter(key => one[key] !== null).map(key => [NUMBERS[key], SAID[key](one[key])])];
  tip.replaceChildren(element('b', {}, one.fits ? 'Fits' : 'Does not fit'),
    element('table', {}, ...lines.map(([what, value]) => element('tr', {}, element('td', {}, what), element('td', {}, String(value))))));
  tip.style.left = Math.max(4, Math.min(window.innerWidth - tip.offsetWidth - 8, x + 14)) + 'px';
  tip.style.top = (y + tip.offsetHeight + 22 > window.innerHeight ? Math.max(4, y - tip.offsetHeight - 12) : y + 16) + 'px';
}

/** Fill the head: title, what all layouts share, the figures of the best that fits. */
function fillHead() {
  $('#title').textContent = SWEEP.title;
  const same = Object.entries(SWEEP.same).map(([name, value]) => `${word(name)} ${value}`);
  const fitting = SWEEP.layouts.filter(one => one.fits).length;
  $('#subtitle').textContent = [`${SWEEP.layouts.length.toLocaleString('en')} layouts, ${fitting.toLocaleString('en')} of them fit`, ...same].join(' · ');
  $('#notes').replaceChildren(...SWEEP.notes.map(note => element('li', {}, note)));
  const best = bestOf(SWEEP.layouts.filter(one => one[sweep.up] !== null));
  const card = (name, value, note, look = '') => element('div', { class: `figure ${look}` }, element('span', {}, name), element('b', {}, value), element('i', {}, note || ''));
  $('#headline').replaceChildren(...(best ? [
    card('Best that fits', settingsOf(best), `by ${figureOf(sweep.up).label}`, 'named'),
    ...Object.keys(NUMBERS).filter(key => best[key] !== null).map(key => card(NUMBERS[key], SAID[key](best[key]), key === 'peak_memory_bytes' && best.memory_limit_bytes ? `of ${formatSI(best.memory_limit_bytes, 'B')}` : '')),
  ] : [card('Best that fits', 'none', 'no layout fits')]));
}

/** Fill the names of the groups, each a button that hides its layouts. */
function fillKey() {
  const names = groups();
  $('#key').replaceChildren(...(sweep.by ? names.map(name => {
    const { colour, shape } = lookOf(name, names);
    const button = element('button', { type: 'button', 'aria-pressed': String(!sweep.hidden.has(name)) },
      element('span', { style: { color: colour }, 'aria-hidden': 'true' }, '●■◆▲▼'[shape]), ` ${word(sweep.by)} ${name}`);
    button.addEventListener('click', () => { if (!sweep.hidden.delete(name)) sweep.hidden.add(name); fillKey(); fillTable(); drawPoints(); });
    return button;
  }) : []));
}

/** Fill the table, sorted; a line is marked with its point. */
function fillTable() {
  const keys = Object.keys(NUMBERS).filter(key => SWEEP.layouts.some(one => one[key] !== null));
  const columns = [...SWEEP.marks, ...SWEEP.settings, ...keys];
  const heads = columns.map(key => element('th', { 'aria-sort': key === sweep.sort ? 'descending' : null },
    element('button', { type: 'button', onclick: () => { sweep.sort = key; fillTable(); } }, NUMBERS[key] || word(key), key === sweep.sort ? ' ▾' : '')));
  const sorted = shown().sort((a, b) => b.fits - a.fits || inOrder(a, b));
  $('#counted').textContent = sorted.length > SHOWN_LINES ? `the first ${SHOWN_LINES} of ${sorted.length.toLocaleString('en')}` : '';
  $('#layouts').replaceChildren(element('thead', {}, element('tr', {}, ...heads, element('th', {}, 'fits'))),
    element('tbody', {}, ...sorted.slice(0, SHOWN_LINES).map(one => lineOf(one, keys))));
}

/** Return the order of two layouts in the table: the better one first, equal ones by throughput. */
function inOrder(a, b) {
  const key = sweep.sort;
  const [p, q] = [a[key], b[key]];
  if (p === q || p === null || q === null) return b.tokens_per_s_per_gpu - a.tokens_per_s_per_gpu;
  if (typeof p === 'string' || typeof q === 'string') return String(p).localeCompare(String(q));
  return figureOf(key)?.better === 'high' ? q - p : p - q;
}

function lineOf(one, keys) {
  return element('tr', { class: one === sweep.marked ? 'marked' : null, onclick: () => mark(one), onmouseenter: () => { sweep.hover = one; drawPoints(); } },
    ...[...SWEEP.marks, ...SWEEP.settings].map((name, i) => element(i ? 'td' : 'th', i ? {} : { scope: 'row' }, String(one[name] ?? '–'))),
    ...keys.map(key => element('td', {}, one[key] === null ? '–' : SAID[key](one[key]))),
    element('td', { class: one.fits ? null : 'misfit' }, one.fits ? 'yes' : 'no'));
}

function mark(one) {
  sweep.marked = sweep.marked === one ? null : one;
  fillTable();
  drawPoints();
}

/** Rebuild what depends on the theme or a choice. */
function refreshAll() {
  fillHead();
  fillKey();
  fillTable();
  drawPoints();
}

function startSweep() {
  const asked = new URLSearchParams(window.location.search).get('theme');
  if (['light', 'dark'].includes(asked)) theme = asked;
  document.documentElement.dataset.theme = theme;
  $('#upwards').replaceChildren(...SWEEP.figures.map(({ key, label }) => element('option', { value: key }, label)));
  $('#coloured').replaceChildren(...SWEEP.settings.map(name => element('option', { value: name }, word(name))));
  $('#coloured').value = sweep.by;
  $('#upwards').addEventListener('change', () => { sweep.up = sweep.sort = $('#upwards').value; refreshAll(); });
  $('#coloured').addEventListener('change', () => { sweep.by = $('#coloured').value; sweep.hidden.clear(); refreshAll(); });
  const canvas = $('#points');
  canvas.addEventListener('pointermove', event => {
    const one = pointAt(event.offsetX, event.offsetY);
    showTip(one, event.clientX, event.clientY);
    if (one !== sweep.hover) { sweep.hover = one; drawPoints(); }
  });
  canvas.addEventListener('pointerleave', () => { sweep.hover = null; showTip(null); drawPoints(); });
  canvas.addEventListener('click', event => { const one = pointAt(event.offsetX, event.offsetY); if (one) mark(one); });
  document.addEventListener('keydown', event => { if (event.key === 'Escape') { sweep.marked = sweep.hover = null; showTip(null); refreshAll(); } });
  $('#theme').addEventListener('click', () => setTheme(theme === 'dark' ? 'light' : 'dark'));
  window.addEventListener('resize', drawPoints);
  let before = theme;
  window.addEventListener('beforeprint', () => { before = theme; setTheme('light'); });
  window.addEventListener('afterprint', () => setTheme(before));
  refreshAll();
  window.foretrace = {   // for the console
    sweep, layouts: SWEEP.layouts,
    place: one => { const scale = scales(shown()); return [scale.x(one.peak_memory_bytes), scale.y(one[sweep.up])]; },
    label: () => labelOf(canvas.getContext('2d'), bestOf(shown()), scales(shown())),
  };
  document.body.dataset.ready = performance.now().toFixed(0);
}

startSweep();
