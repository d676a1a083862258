// What a step loses, in words, and the chain of work and transfers that sets its length.

let critical = null;   // {row, start, end}: pieces of the path, one after the other

/** Take the pieces of the critical path from the columns of a document. */
function useCritical(columns) {
  const [row, start, end] = ['row', 'start', 'end'].map(name => columns.whole(`critical.${name}`));
  critical = row ? { row, start, end } : null;
}

/** Fill the list of what the step loses, with a bar for the share of each. */
function fillFindings() {
  const found = META.findings || [];
  $('#findings').hidden = !found.length;
  $('#findings').replaceChildren(...found.map(({ text: words, share }) => element('li', {},
    element('span', { class: 'meter', 'aria-hidden': 'true' }, element('span', { style: { width: `${Math.min(100, 100 * share)}%` } })),
    words)));
}

/** Show what the critical path is made of, and the button that draws it. */
function fillCritical() {
  const about = META.critical;
  $('#critical').hidden = !about;
  $('#path').hidden = !about;
  if (!about) return;
  const parts = about.parts.filter(([, ns]) => ns > 0);
  $('#critical').replaceChildren(
    element('span', {}, element('b', {}, 'Critical path'), ` of step ${about.step}: ${about.n_pieces.toLocaleString('en')} pieces on ${about.n_ranks} rank${about.n_ranks > 1 ? 's' : ''}`),
    element('span', { class: 'stack', 'aria-hidden': 'true' }, ...parts.map(([kind, ns]) =>
      element('span', { title: `${KINDS[kind].label}: ${formatTime(ns)}`, style: { width: `${100 * ns / about.length_ns}%`, background: cssFill(KINDS[kind]) } }))),
    element('span', {}, parts.filter(([, ns]) => ns >= 0.005 * about.length_ns).map(([kind, ns]) => `${(100 * ns / about.length_ns).toFixed(0)} % ${KINDS[kind].short}`).join(' · ')));
}

/** Draw or take away the critical path. */
function togglePath() {
  if (!critical) return;
  view.path = !view.path;
  $('#path').setAttribute('aria-pressed', String(view.path));
  requestDraw();
}

/** Draw the critical path: a line along the rows that it runs on, and from row to row where it changes. */
function drawCritical(g) {
  const run = RUNS[0];
  if (!critical || stepOf(run).step !== META.critical.step) return;
  const rows = new Map(view.slots.map((slot, index) => [slot.row, index]));
  const [offset] = view.lanes[0];
  const path = new Path2D();
  let before = null;
  for (let i = 0; i < critical.row.length; i++) {
    const index = rows.get(critical.row[i]);
    if (index === undefined || critical.end[i] < view.t0 || critical.start[i] > view.t1) { before = null; continue; }
    const y = rowTop(index) + offset - 1;
    const [x0, x1] = [toX(critical.start[i]), toX(critical.end[i])];
    if (before === null) path.moveTo(x0, y); else path.lineTo(x0, y);
    path.lineTo(x1, y);
    before = y;
  }
  g.lineJoin = 'round';
  g.strokeStyle = surface().bg;
  g.lineWidth = 5;
  g.stroke(path);
  g.strokeStyle = surface().limit;
  g.lineWidth = 2.6;
  g.stroke(path);
}
