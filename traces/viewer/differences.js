// Two runs: a waterfall of what makes the second one slower or faster, and the numbers behind it.

/** Fill the comparison, if there are two runs. */
function fillComparison() {
  const comparison = META.comparison;
  $('#comparison-section').hidden = !comparison;
  if (!comparison) return;
  $('#comparison-words').textContent = comparison.words;
  $('#waterfall').replaceChildren(...waterfall(comparison));
  const like = Math.max(comparison.total.a_ns, comparison.total.b_ns);
  const [a, b] = RUNS.map(run => run.label);
  const head = ['what', a, b, 'difference', `${b} ÷ ${a}`];
  $('#differences').replaceChildren(
    element('caption', {}, comparison.caption),
    element('thead', {}, element('tr', {}, ...head.map(name => element('th', {}, name)))),
    element('tbody', {}, ...comparison.lines.map(line => differenceLine(line, like)), differenceLine(comparison.total, like, 'total')));
}

function differenceLine({ name, kind, a_ns: a, b_ns: b }, like, cls) {
  return element('tr', { class: cls || null }, element('th', { scope: 'row' },
    kind === null ? null : element('span', { class: 'swatch', style: { background: cssFill(KINDS[kind]) } }), name),
  element('td', {}, formatTimeLike(a, like)), element('td', {}, formatTimeLike(b, like)), element('td', {}, signed(b - a, largest())),
  element('td', {}, formatRatio(isShown(a, like) ? a : 0, b)));
}

/** Return the largest difference of a cause, in whose unit all of them are said. */
const largest = () => Math.max(1, ...META.comparison.lines.map(line => Math.abs(line.b_ns - line.a_ns)));

/** Return whether a duration is more than 0.0 in a column of *like*: what is not has nothing to be compared with. */
const isShown = (ns, like) => Number.parseFloat(formatTimeLike(ns, like)) > 0;
const signed = (ns, like) => (ns > 0 ? '+' : ns < 0 ? '−' : '±') + formatTimeLike(Math.abs(ns), like);

/** Return one line per cause: a bar from where the sum stood before it to where it stands after it. */
function waterfall({ lines, total }) {
  const causes = lines.filter(line => Math.abs(line.b_ns - line.a_ns) >= largest() / 1000);
  const edges = causes.reduce((sums, line) => [...sums, sums[sums.length - 1] + line.b_ns - line.a_ns], [0]);
  const [low, high] = [Math.min(...edges), Math.max(...edges, 1)];
  const percent = ns => 100 * (ns - low) / (high - low || 1);
  const bar = (name, from, to, cls) => element('div', { class: 'fall ' + cls }, element('span', { class: 'name' }, name),
    element('span', { class: 'track' },
      element('span', { class: 'zero', style: { left: percent(0) + '%' } }),
      element('span', { class: 'delta', style: { left: percent(Math.min(from, to)) + '%', width: Math.max(0.3, Math.abs(percent(to) - percent(from))) + '%' } })),
    element('span', { class: 'value' }, signed(to - from, largest())));
  return [
    ...causes.map((line, i) => bar(line.name, edges[i], edges[i + 1], line.b_ns > line.a_ns ? 'slower' : 'faster')),
    bar(total.name, 0, total.b_ns - total.a_ns, 'sum'),
  ];
}

/** Fill the table of operations that were joined one by one, and draw the ratio of each. */
function fillOperations() {
  const comparison = META.comparison;
  $('#operations-section').hidden = !comparison || !comparison.operations.length;
  if ($('#operations-section').hidden) return;
  const [a, b] = RUNS.map(run => run.label);
  const like = 1e9 * Math.max(...comparison.operations.map(line => Math.max(line.a_total_s, line.b_total_s)));
  $('#operations').replaceChildren(
    element('caption', {}, comparison.operations_caption),
    element('thead', {}, element('tr', {}, ...['operation', 'spans', a, b, `median ${b} ÷ ${a}`].map(name => element('th', {}, name)))),
    element('tbody', {}, ...comparison.operations.map(line => element('tr', {},
      element('th', { scope: 'row' }, element('span', { class: 'swatch', style: { background: cssFill(KINDS[line.colour]) } }), line.name),
      element('td', {}, line.n_joined.toLocaleString('en')), element('td', {}, formatTimeLike(1e9 * line.a_total_s, like)),
      element('td', {}, formatTimeLike(1e9 * line.b_total_s, like)),
      element('td', {}, formatRatio(1, line.median_ratio))))));
}

let ratios = null;

/** Draw every joined operation: how long it takes in the first run, and how many times longer in the second. */
function drawRatios() {
  if ($('#operations-section').hidden) return;
  const canvas = $('#ratios');
  const width = Math.max(240, canvas.parentElement.clientWidth);
  const [height, left, right, top, bottom] = [280, 46, 10, 12, 34];
  const g = sizeCanvas(canvas, width, height);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, width, height);
  const { a, b, kind } = ratios;
  const [low, high] = [Math.log10(Math.min(...a)) - 0.1, Math.log10(Math.max(...a)) + 0.1];
  const spread = Math.max(0.12, ...a.map((ns, i) => Math.min(1, Math.abs(Math.log10(b[i] / ns))))) * 1.08;
  const toX = ns => left + (Math.log10(ns) - low) / (high - low) * (width - left - right);
  const toY = ratio => top + (spread - Math.max(-spread, Math.min(spread, Math.log10(ratio)))) / (2 * spread) * (height - top - bottom);
  drawRatioAxes(g, { width, height, left, right, bottom, low, high, spread, toX, toY });
  g.globalAlpha = 0.6;
  for (let i = 0; i < a.length; i++) {
    g.fillStyle = flatColour(KINDS[kind[i]]);
    g.fillRect(toX(a[i]) - 2, toY(b[i] / a[i]) - 2, 4, 4);
  }
  g.globalAlpha = 1;
}

function drawRatioAxes(g, { width, height, left, right, bottom, low, high, spread, toX, toY }) {
  const [first, second] = RUNS.map(run => run.label);
  g.fillStyle = surface().ink;
  g.globalAlpha = 0.07;
  g.fillRect(left, toY(1.1), width - left - right, toY(0.9) - toY(1.1));
  g.globalAlpha = 1;
  const drawn = [];
  for (const ratio of [1, 2, 0.5, 5, 0.2, 10, 0.1, 1.5, 0.7, 1.25, 0.8, 1.1, 0.9]) {   // the rounder ones have the room
    if (Math.abs(Math.log10(ratio)) > spread || drawn.some(y => Math.abs(y - toY(ratio)) < 13)) continue;
    drawn.push(toY(ratio));
    g.fillStyle = ratio === 1 ? surface().ink : surface().grid;
    g.fillRect(left, Math.round(toY(ratio)), width - left - right, 1);
    text(g, '× ' + ratio, left - 6, toY(ratio), { align: 'right', size: 11, colour: surface().muted });
  }
  for (let power = Math.ceil(low); power <= high; power++) {
    g.fillStyle = surface().grid;
    g.fillRect(Math.round(toX(10 ** power)), 8, 1, height - bottom - 8);
    text(g, formatTime(10 ** power, 0), toX(10 ** power), height - bottom + 9, { align: 'center', size: 11, colour: surface().muted });
  }
  text(g, `duration, ${first}; upwards: ${second} ÷ ${first}, band ± 10 %`, left, height - 8, { size: 11, colour: surface().muted });
}
