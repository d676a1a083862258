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

const isForward = (run, k) => isForwardKind(run.kind[k]);

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

/** Draw the pair i..j: the forward pass above, the backward pass below, each as high as its share of their time. */
function drawPair(paint, i, j) {
  const { g, run, slot, y, height, columns, words } = paint;
  const of = halvesOf(run, i, j);
  let [widest, wide] = [null, 0];
  for (const block of blocksOf(run, i, j, true)) {
    const whole = block.kind !== PAIR;
    for (const part of block.parts || [block]) part.dimmed = !isState(part.kind) && isDimmed(slot, of[isForwardKind(part.kind) ? 0 : 1]);
    columns.add(toX(block.from), toX(block.to), block.kind, whole ? block.dimmed : block);
    const [x0, x1] = between(block.from, block.to);
    if (!whole && x1 - x0 > wide) [widest, wide] = [block, x1 - x0];
  }
  if (wide < EDGE_PX) return;
  const [x0, x1] = between(widest.from, widest.to);
  words.push(() => {
    let top = y;
    for (const { kind, share, dimmed } of widest.parts) {
      const tall = height * share;
      const first = of.find(k => run.kind[k] === kind);
      if (first !== undefined && !view.hide.has(kind)) {
        edgeWork(paint, first, x0, x1, top, tall, dimmed);
        if (!dimmed) drawWorkLabel(g, run, first, 0, x0, x1, top, tall);
      }
      top += tall;
    }
  });
}

/** Return which pass of a pair, 0 forward or 1 backward, lies at a height, a share of that of the row. */
function halfAt(run, i, j, share) {
  let [forward, work] = [0, 0];
  for (let k = i; k <= j; k++) {
    if (isState(run.kind[k])) continue;
    work += run.end[k] - run.start[k];
    if (isForward(run, k)) forward += run.end[k] - run.start[k];
  }
  return share * work < forward ? 0 : 1;
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
