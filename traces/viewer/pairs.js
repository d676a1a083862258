// A forward and a backward pass that a rank computes in turns, each while the data of the other is on its way:
// one cell, split in two, until the zoom shows the turns themselves.

const TURN_PX = 16;   // draw the turns of a pair once they are this wide on average

/** Return the first span of the pair that span i belongs to, or i if it belongs to none. */
function pairStart(run, i, low) {
  if (!run.pair || i >= run.pair.length || !run.pair[i]) return i;
  let first = i;
  while (first > low && run.pair[first - 1] === run.pair[i]) first--;
  return first;
}

/** Return where drawing begins so that span i is seen: at the start of its pair or of its cell. */
function drawnFrom(run, i, low, high) {
  if (i >= high) return i;
  const first = pairStart(run, i, low);
  return wholePair(run, first, high) >= first ? first : cellStart(run, i, low, high);
}

/** Return the last span of the pair that begins with span i; -1 if none does, or if its turns can be seen. */
function wholePair(run, i, high) {
  if (!run.pair || i >= high || !run.pair[i]) return -1;
  let [last, turns] = [i, 0];
  for (let k = i, before = -1; k < high && run.pair[k] === run.pair[i]; k++) {
    last = k;
    if (isState(run.kind[k])) continue;
    if (before < 0 || !sameCell(run, before, k)) turns++;
    before = k;
  }
  const width = (run.end[last] - run.start[i]) / (view.t1 - view.t0) * view.plot;
  return width < turns * TURN_PX ? last : -1;
}

const isForward = (run, k) => KINDS[run.kind[k]].id === 'forward';

/** Return the first span of the forward and of the backward pass of the pair i..j. */
function halvesOf(run, i, j) {
  const found = [-1, -1];
  for (let k = i; k <= j && found.includes(-1); k++) {
    if (isState(run.kind[k])) continue;
    const half = isForward(run, k) ? 0 : 1;
    // a backward pass that computes its forward again is named after the backward
    if (found[half] < 0 && KINDS[run.kind[k]].id !== 'recompute') found[half] = k;
  }
  return found.map(k => (k < 0 ? i : k));
}

/** Draw the pair i..j: the forward pass above, the backward pass below, at the foot what neither of them hides. */
function drawPair(paint, i, j) {
  const { g, run, slot, y, height, small } = paint;
  const [x0, x1] = extent(run, i, j);
  const halves = halvesOf(run, i, j);
  if (x1 - x0 < SMALL_PX) {
    halves.forEach(k => small.add(x0, (x1 - x0) / 2, run.kind[k]));
    return;
  }
  small.flush();
  const half = (drawStrip(paint, i, j, x0, x1) - y) / 2;
  halves.forEach((k, n) => {
    if (view.hide.has(run.kind[k])) return;
    const dimmed = isDimmed(slot, k);
    const top = y + n * half;
    g.globalAlpha = dimmed ? 0.16 : 1;
    fillWork({ ...paint, y: top, height: half }, k, x0, x1);
    if (!dimmed) drawWorkLabel(g, run, k, 0, x0, x1, top, half);
    g.globalAlpha = 1;
  });
  if (x1 - x0 <= 3) return;
  g.fillStyle = surface().bg;
  g.fillRect(x0, y + half - 0.5, x1 - x0, 1);
  g.fillRect(x1 - 0.7, y, 0.7, height);
}

/** Return the tooltip of the pair of a hit: [title, lines, note]. */
function describePair({ slot, first, last, halves }, where, lines) {
  const { run } = slot;
  const computed = [0, 0];
  const idle = new Map();
  let turns = 0;
  for (let k = first, before = -1; k <= last; k++) {
    const length = run.end[k] - run.start[k];
    if (isState(run.kind[k])) { idle.set(run.kind[k], (idle.get(run.kind[k]) || 0) + length); continue; }
    computed[isForward(run, k) ? 0 : 1] += length;
    if (before < 0 || !sameCell(run, before, k)) turns++;
    before = k;
  }
  const said = halves.map((k, n) => {
    const stage = run.n_chunks > 1 && run.chunk[k] >= 0 ? `, virtual stage ${run.chunk[k]}` : '';
    return [KINDS[run.kind[k]].short, `micro-batch ${run.microbatch[k]}${stage}: computes ${formatTime(computed[n])}`];
  });
  for (const [state, ns] of idle) lines.push([KINDS[state].short + ' within', formatTime(ns)]);
  lines.push(['in', `${turns} turns; zoom in to see them`]);
  return [`Forward and backward as a pair · ${where}`, [...said, ...lines], 'Each computes while the data of the other is on its way.'];
}
