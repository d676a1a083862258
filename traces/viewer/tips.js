// What the pointer is on, in words.

/** Return what lies under a point of the schedule: {slot, lane, index, first, last, level}, or null. */
function hitAt(x, y) {
  const row = Math.floor((y - GEOMETRY.axis) / view.rowHeight);
  const slot = view.slots[row];
  if (!slot || x < view.left || x > view.left + view.plot) return null;
  const inside = y - rowTop(row);
  const lane = view.lanes.findIndex(([top, height]) => inside >= top - 0.5 && inside <= top + height + 0.5);
  if (lane < 0 || lane >= slot.run.lanes.length) return null;
  const slack = 1.5 / view.plot * (view.t1 - view.t0);
  const [low, high] = laneRange(slot.run, slot.row, lane);
  const t = toTime(x);
  const index = firstEndingAfter(slot.run, low, high, lane ? t - slack : t);
  if (index >= high || slot.run.start[index] > t + (lane ? slack : 0)) return null;
  const kind = lane && !slot.run.lanes[lane].stream ? slot.run.lanes[lane].kind : slot.run.kind[index];
  if (view.hide.has(kind)) return null;
  const drawn = lane ? { first: index, last: index, level: 2 } : drawnAround(slot.run, slot.row, index);
  const [top, height] = view.lanes[lane];
  const half = drawn.halves && drawn.halves[halfAt(slot.run, drawn.first, drawn.last, (inside - top) / height)];
  return { slot, lane, index, half, ...drawn };
}

/** Return the title and the lines of the tooltip of a hit: [title, [[what, value], ...], note]. */
function describeHit(hit) {
  const { slot, lane, first, last } = hit;
  const run = slot.run;
  const where = `${slot.label}${RUNS.length > 1 ? ' · ' + run.label : ''}`;
  const length = run.end[last] - run.start[first];
  const lines = [
    ['time', `${formatMoment(run.start[first])} → ${formatMoment(run.end[last])}`],
    ['duration', `${formatTime(length, 3)} (${formatShare(length / stepOf(run).rows[slot.row].window_ns)} of the step)`],
  ];
  if (hit.halves) return describePair(hit, where, lines);
  if (lane > 0 && !run.lanes[lane].stream) return describeTransfer(run, slot, first, where, lines);
  const kind = KINDS[run.kind[first]];
  if (kind.group === 'state') return [`${kind.label} · ${where}`, lines, kind.meaning];
  return describeWork(hit, kind, where, lines);
}

/** Describe one or several compute spans drawn as one cell. */
function describeWork({ slot, first, last, level }, kind, where, lines) {
  const run = slot.run;
  const label = labelOf(run, first);
  if (run.n_chunks > 1 && run.chunk[first] >= 0) lines.unshift(['virtual stage', run.chunk[first]]);
  const layers = layerSpan(run, first, last);
  if (layers) lines.unshift(layers);
  if (run.microbatch[first] >= 0) lines.unshift(['micro-batch', run.microbatch[first]]);
  if (first === last) {
    if (label.name) lines.unshift(['what', label.name]);
    const seconds = (run.end[first] - run.start[first]) / 1e9;
    if (label.flops > 0) lines.push(['work', `${formatSI(label.flops, 'FLOP')}, ${formatSI(label.flops / seconds, 'FLOP/s')}`]);
    if (label.bytes > 0) lines.push(['memory', `${formatSI(label.bytes, 'B')}, ${formatSI(label.bytes / seconds, 'B/s')}`]);
    if (label.dtype) lines.push(['dtype', label.dtype]);
    return [`${kind.label} · ${where}`, lines];
  }
  const idle = new Map();
  let spans = 0;
  for (let k = first; k <= last; k++) {
    if (!isState(run.kind[k])) { spans++; continue; }
    idle.set(run.kind[k], (idle.get(run.kind[k]) || 0) + run.end[k] - run.start[k]);
  }
  for (const [state, ns] of idle) lines.push([KINDS[state].short + ' within', formatTime(ns)]);
  lines.push(['made of', `${spans} spans${level < 2 ? '; zoom in to see them' : ''}`]);
  return [`${kind.label} · ${where}`, lines];
}

/** Return the tooltip line that says which layers the spans belong to. */
function layerSpan(run, first, last) {
  let [low, high] = [Infinity, -1];
  for (let k = first; k <= last; k++) {
    if (isState(run.kind[k]) || run.layer[k] < 0) continue;
    low = Math.min(low, run.layer[k]);
    high = Math.max(high, run.layer[k]);
  }
  return high < 0 ? null : low === high ? ['layer', low] : ['layers', `${low} to ${high}`];
}

/** Describe one collective or point-to-point transfer. */
function describeTransfer(run, slot, i, where, lines) {
  const label = labelOf(run, i);
  const waited = run.waited[i] * run.tick_ns;
  const moving = run.end[i] - run.start[i] - waited;
  const hidden = run.hidden[i] * run.tick_ns;
  if (run.microbatch[i] >= 0) lines.unshift(['micro-batch', run.microbatch[i]]);
  if (run.layer[i] >= 0) lines.unshift(['layer', run.layer[i]]);
  if (label.name && label.name !== label.operation) lines.unshift(['what', label.name]);
  if (waited > 0) lines.push(['waits for the last rank', formatTime(waited, 3)]);
  if (moving > 0) {
    lines.push(['transfer', formatTime(moving, 3)], ['hidden behind compute', formatShare(hidden / moving)]);
    if (label.size > 0) lines.push(['size', `${formatSI(label.size, 'B')}, ${formatSI(label.size / moving * 1e9, 'B/s')} (size ÷ transfer)`]);
  }
  if (run.peer[i] >= 0) lines.push(['other rank', run.peer[i]]);
  if (run.sequence[i] !== NO_SEQUENCE) lines.push(['number in its group', run.sequence[i]]);
  return [`${label.operation.replaceAll('_', ' ')} · ${label.kind.label} · ${where}`, lines, view.slots.length > 1 ? 'Click: the same transfer on the other rows' : null];
}

/** Show the tooltip of a hit beside the pointer, or hide it. */
function showTip(hit, x, y) {
  showWords(hit && describeHit(hit), x, y);
}

/** Show a title, lines and a note beside the pointer, or hide what is shown. */
function showWords(words, x, y) {
  const tip = $('#tip');
  if (!words) { tip.style.display = 'none'; return; }
  const [title, lines, note] = words;
  tip.replaceChildren(
    element('b', {}, title),
    element('table', {}, ...lines.map(([what, value]) => element('tr', {}, element('td', {}, what), element('td', {}, String(value))))),
    note ? element('p', {}, note) : '',
  );
  tip.style.display = 'block';
  tip.style.left = Math.max(4, Math.min(window.innerWidth - tip.offsetWidth - 8, x + 14)) + 'px';
  tip.style.top = (y + tip.offsetHeight + 22 > window.innerHeight ? Math.max(4, y - tip.offsetHeight - 12) : y + 16) + 'px';
}
