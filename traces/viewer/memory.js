// Memory over time, on the time axis of the schedule, against what the device has.

const MEMORY_HEIGHT = 216;

/** What memory is mostly held for. Each has one colour on every page, whatever is largest on it. */
const PARTS = ['activations', 'gradients', 'parameters', 'gathered', 'reserved', 'buffers', 'logits', 'optimizer'];

/** Return the memory curves of the rows on the screen: total of each, with its label and colour. */
function shownMemory() {
  const rows = view.slots.map(slot => ({ slot, series: slot.run.memory.filter(s => s.row === slot.row) }));
  return rows.filter(({ series }) => series.length).map(({ slot, series }, index) => ({
    slot, series: series[0], peak: peakIn(slot.run, series[0]), index,
  }));
}

/** Return the largest value of a curve within the chosen step, in bytes. */
function peakIn(run, { t, bytes }) {
  const { t0_ns: from, length_ns: length } = stepOf(run);
  let peak = 0;
  for (let i = 0; i < t.length; i++) {
    const until = i + 1 < t.length ? t[i + 1] : Infinity;
    if (until > from && t[i] < from + length) peak = Math.max(peak, bytes[i]);
  }
  return peak;
}

/** Draw one curve per row shown, and the limit of the device. */
function drawMemory() {
  const curves = shownMemory();
  $('#memory-section').hidden = !curves.length;
  $('#memory-section h2 span').textContent = `${META.memory_held}, same time axis`;
  if (!curves.length) return;
  const g = sizeCanvas($('#memory'), view.width, MEMORY_HEIGHT);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, view.width, MEMORY_HEIGHT);
  const limit = META.memory_limit_bytes || 0;
  const peak = Math.max(...curves.map(curve => curve.peak), 1);
  const top = Math.max(peak * 1.08, limit && peak > limit * 0.15 ? limit * 1.1 : 0);
  const toY = bytes => MEMORY_HEIGHT - 22 - bytes / top * (MEMORY_HEIGHT - 40);
  drawMemoryAxes(g, top, toY, limit);
  g.save();
  g.beginPath();
  g.rect(view.left, 0, view.plot, MEMORY_HEIGHT);
  g.clip();
  curves.forEach(curve => drawCurve(g, curve, toY, curve.peak === peak));
  g.restore();
  if (limit && limit <= top) nameLimit(g, limit, toY(limit));
  if (!narrow()) drawMemoryLegend(g, curves, toY);
}

const curveColour = index => colours().series[index % colours().series.length];

/** Draw the steps of one curve; runs are aligned at the start of their step. */
function drawCurve(g, { slot, series, index }, toY, highest) {
  const { t, bytes } = series;
  const origin = stepOf(slot.run).t0_ns;
  g.strokeStyle = curveColour(RUNS.length > 1 ? Math.floor(index / RUNS.length) : index);
  g.setLineDash(slot.run === RUNS[0] ? [] : [5, 3]);
  g.lineWidth = highest ? 2.6 : 1.4;
  g.beginPath();
  for (let i = 0; i < t.length; i++) {
    const x = toX(t[i] - origin);
    if (i) g.lineTo(x, toY(bytes[i - 1]));
    g.lineTo(x, toY(bytes[i]));
  }
  if (t.length) g.lineTo(Math.min(view.left + view.plot, toX(stepOf(slot.run).length_ns)), toY(bytes[t.length - 1]));
  g.stroke();
  g.setLineDash([]);
}

function drawMemoryAxes(g, top, toY, limit) {
  const [ticks] = ticksBetween(0, top, 5);
  for (const bytes of ticks) {
    g.fillStyle = surface().grid;
    g.fillRect(view.left, Math.round(toY(bytes)), view.plot, 1);
    text(g, formatSI(bytes, 'B').replace(/\.0+ /, ' '), view.left - 8, toY(bytes), { align: 'right', size: 11, colour: surface().muted });
  }
  drawTimeAxis(g, MEMORY_HEIGHT - 22, MEMORY_HEIGHT - 18, MEMORY_HEIGHT - 9);
  if (!limit || limit > top) {
    if (limit) text(g, `device limit ${formatSI(limit, 'B')} is far above`, view.left + 8, 10, { colour: surface().muted });
    return;
  }
  g.strokeStyle = surface().limit;
  g.lineWidth = 1.5;
  g.setLineDash([6, 4]);
  g.beginPath();
  g.moveTo(view.left, toY(limit));
  g.lineTo(view.left + view.plot, toY(limit));
  g.stroke();
  g.setLineDash([]);
}

/** Name the limit, over the curves: where they rise above it, it has to be read. */
function nameLimit(g, limit, y) {
  const words = `device limit ${formatSI(limit, 'B')}`;
  g.font = `400 11.5px ${FONT}`;
  g.fillStyle = surface().bg;
  g.fillRect(view.left + 4, y - 16, widthOf(g, words) + 8, 14);
  text(g, words, view.left + 8, y - 8, { colour: surface().limit });
}

/** Name the curves at the right, near their peaks, moved apart where they would collide. */
function drawMemoryLegend(g, curves, toY) {
  const spacing = Math.min(13, (MEMORY_HEIGHT - 22) / curves.length);
  if (spacing < 8) return;
  const labels = curves.map(curve => ({ curve, y: toY(curve.peak) })).sort((a, b) => a.y - b.y);
  let free = 22;
  for (const label of labels) { label.y = Math.max(label.y, free); free = label.y + spacing; }
  free = MEMORY_HEIGHT - 8;
  for (const label of labels.reverse()) { label.y = Math.min(label.y, free); free = label.y - spacing; }
  const left = view.left + view.plot + 12;
  text(g, RUNS.length > 1 ? `peak; dashed: ${RUNS[1].label}` : 'peak in this step', left, 10, { size: 11, colour: surface().muted });
  for (const { curve, y } of labels) {
    g.fillStyle = curveColour(RUNS.length > 1 ? Math.floor(curve.index / RUNS.length) : curve.index);
    for (const [from, width] of curve.slot.run === RUNS[0] ? [[0, 12]] : [[0, 5], [8, 5]]) g.fillRect(left + from, y - 1.5, width, 3);
    textWithin(g, `${formatSI(curve.peak, 'B')}  ${curve.slot.label}`, left + 17, y, view.width - left - 20, { size: 11 });
  }
}

/** Fill the table of what the highest point of each row is made of, largest part first. */
function fillPeaks() {
  const rows = shareRows().flatMap(({ run, row }) => run.memory_peaks.filter(peak => peak.row === row && peak.parts.length).map(peak => ({ run, peak })));
  const table = $('#peaks');
  table.hidden = !rows.length;
  if (!rows.length) return;
  const names = [...new Set(rows.flatMap(({ peak }) => peak.parts.map(part => part[0])))];
  const whole = Math.max(META.memory_limit_bytes || 0, ...rows.map(({ peak }) => peak.bytes));
  const known = [...PARTS, ...names.filter(name => !PARTS.includes(name))];
  const apart = [0, 5, 3, 6, 1, 4, 2, 7];   // the series runs from cold to warm: neighbours in a bar should not
  const colour = name => colours().series[apart[known.indexOf(name) % apart.length]];
  const swatch = name => element('span', { class: 'swatch', style: { background: colour(name) } });
  const heads = ['row', 'at its highest', 'peak', 'of the device', 'at', ...names];
  table.replaceChildren(
    element('caption', {}, 'What each row holds at its highest point' + (META.memory_limit_bytes ? '; the full width is the memory of the device.' : '.')),
    element('thead', {}, element('tr', {}, ...heads.map((name, i) => element('th', { class: i === 1 ? 'bar' : null }, i > 4 ? swatch(name) : null, name)))),
    element('tbody', {}, ...rows.map(({ run, peak }) => peakLine(run, peak, names, whole, colour))));
}

function peakLine(run, peak, names, whole, colour) {
  const of = Object.fromEntries(peak.parts);
  const bar = element('div', { class: 'stack outlined', 'aria-hidden': 'true' }, ...peak.parts.map(([name, bytes]) =>
    element('span', { title: `${name}: ${formatSI(bytes, 'B')}`, style: { width: `${100 * bytes / whole}%`, background: colour(name) } })));
  return element('tr', {}, element('th', { scope: 'row' }, run.rows[peak.row].label, RUNS.length > 1 ? element('small', {}, run.label) : null),
    element('td', { class: 'bar' }, bar), element('td', {}, formatSI(peak.bytes, 'B')),
    element('td', {}, META.memory_limit_bytes ? formatShare(peak.bytes / META.memory_limit_bytes) : '–'), element('td', {}, formatTime(peak.t_ns)),
    ...names.map(name => element('td', {}, of[name] ? formatSI(of[name], 'B') : '–')));
}
