// Following one micro-batch through the stages, or one communication across its ranks.

const pipelineOf = slot => slot.run.rows[slot.row].pipeline;

/** Follow what was clicked, or stop following it. */
function toggleFollow(hit) {
  view.follow = null;
  if (!hit) return;
  const { slot, lane, index } = hit;
  const run = slot.run;
  const first = hit.half ?? hit.first;
  if (lane > 0) {
    const { group } = labelOf(run, index);
    if (run.sequence[index] !== NO_SEQUENCE) {
      view.follow = { run, lane, index, group, sequence: run.sequence[index], rank: slot.rank, peer: run.peer[index] };
    }
  } else if (run.microbatch[first] >= 0) {   // of the whole cell: the pointer may be on a gap inside it
    view.follow = { microbatch: run.microbatch[first], pipeline: pipelineOf(slot) };
  }
}

const NO_SEQUENCE = -1;

/** Draw the path of what is followed. */
function drawFollowed(g) {
  if (view.follow.microbatch === undefined) drawMeeting(g, meeting());
  else RUNS.forEach(run => drawPath(g, pathOf(run)));
}

/** Return the cells of the followed micro-batch in the order of time: {row, start, end}. */
function pathOf(run) {
  const cells = [];
  view.slots.forEach((slot, row) => {
    if (slot.run !== run || pipelineOf(slot) !== view.follow.pipeline) return;
    const [low, high] = laneRange(run, slot.row, 0);
    let previous = -1;
    for (let i = low; i < high; i++) {
      if (isState(run.kind[i]) || run.microbatch[i] !== view.follow.microbatch) continue;
      if (KINDS[run.kind[i]].id === 'backward_weight') continue;
      const cell = cells[cells.length - 1];
      if (previous >= 0 && sameCell(run, previous, i)) cell.end = run.end[i];
      else cells.push({ row, start: run.start[i], end: run.end[i] });
      previous = i;
    }
  });
  return cells.sort((a, b) => a.start - b.start);
}

/** Draw arrows from each cell of a path to the next one on another row. */
function drawPath(g, cells) {
  const [offset, height] = view.lanes[0];
  g.strokeStyle = g.fillStyle = surface().ink;
  g.lineWidth = 1.6;
  for (let i = 1; i < cells.length; i++) {
    const [from, to] = [cells[i - 1], cells[i]];
    if (from.row === to.row) continue;
    const down = to.row > from.row;
    const [x0, x1] = [toX(from.end), toX(to.start)];
    const y0 = rowTop(from.row) + offset + (down ? height : 0);
    const y1 = rowTop(to.row) + offset + (down ? 0 : height);
    g.beginPath();
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
    g.stroke();
    const back = down ? -6 : 6;
    g.beginPath();
    g.moveTo(x1, y1);
    g.lineTo(x1 - 3.2, y1 + back);
    g.lineTo(x1 + 3.2, y1 + back);
    g.fill();
  }
}

/** Return the spans of the rows shown that take part in the followed communication. */
function meeting() {
  const { run, group, sequence, rank, peer } = view.follow;
  const found = [];
  for (const slot of view.slots) {
    if (slot.run !== run || (peer >= 0 && slot.rank !== rank && slot.rank !== peer)) continue;
    for (let lane = 1; lane < run.lanes.length; lane++) {
      const [low, high] = laneRange(run, slot.row, lane);
      for (let i = low; i < high; i++) {
        if (run.sequence[i] !== sequence || labelOf(run, i).group !== group) continue;
        if (peer >= 0 && (slot.rank === rank ? i !== view.follow.index : run.peer[i] !== rank)) continue;
        found.push({ slot, lane, first: i, last: i });
      }
    }
  }
  return found;
}

/** Mark the spans of one communication and join the moments at which its ranks arrived. */
function drawMeeting(g, spans) {
  spans.forEach(span => drawOutline(g, span, 2));
  g.strokeStyle = g.fillStyle = surface().limit;
  g.lineWidth = 1.4;
  g.beginPath();
  for (const { slot, lane, first } of spans) {
    const [offset, height] = view.lanes[lane];
    g.lineTo(toX(slot.run.start[first]), rowTop(view.slots.indexOf(slot)) + offset + height / 2);
  }
  g.stroke();
  for (const { slot, lane, first } of spans) {
    const [offset, height] = view.lanes[lane];
    g.beginPath();
    g.arc(toX(slot.run.start[first]), rowTop(view.slots.indexOf(slot)) + offset + height / 2, 3.2, 0, 7);
    g.fill();
  }
}
