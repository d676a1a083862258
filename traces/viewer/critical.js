// What a step loses, in words, and the chain of work and transfers that sets its length.

const TURN_GAP_PX = 6;   // between two lines from row to row

/** Fill the list of what the step loses, with a bar for the share of each; of two runs, under the name of each. */
function fillFindings() {
  const found = META.findings || [];
  $('#findings').hidden = !found.length;
  $('#findings').replaceChildren(...found.flatMap(({ text: words, advice, share, run }, i) => [
    RUNS.length > 1 && run !== found[i - 1]?.run ? element('li', { class: 'of' }, `${run}:`) : null,
    element('li', {}, element('span', { class: 'meter', 'aria-hidden': 'true' }, element('span', { style: { width: `${Math.min(100, 100 * share)}%` } })), element('span', {}, words, advice ? element('small', {}, `${advice[0].toUpperCase()}${advice.slice(1)}.`) : null)),
  ].filter(Boolean)));
}

/** Show what the critical path of each run is made of, and the button that draws it. */
function fillCritical() {
  const known = RUNS.filter(run => run.critical);
  for (const id of ['#critical', '#path']) $(id).hidden = !known.length;
  $('#critical').replaceChildren(...known.map(run => criticalLine(run)));
}

function criticalLine(run) {
  const about = run.critical;
  const parts = about.parts.filter(([, ns]) => ns > 0);
  const whose = RUNS.length > 1 ? `${run.label}, step` : 'of step';
  return element('span', { class: 'line' },
    element('span', {}, element('b', {}, 'Critical path'), ` ${whose} ${about.step}: ${about.n_pieces.toLocaleString('en')} pieces on ${about.n_ranks} rank${about.n_ranks > 1 ? 's' : ''}`),
    element('span', { class: 'stack', 'aria-hidden': 'true' }, ...parts.map(([kind, ns]) =>
      element('span', { title: `${KINDS[kind].label}: ${formatTime(ns)}`, style: { width: `${100 * ns / about.length_ns}%`, background: cssFill(KINDS[kind]) } }))),
    element('span', {}, parts.filter(([, ns]) => ns >= 0.005 * about.length_ns).map(([kind, ns]) => `${formatShare(ns / about.length_ns, 0)} ${KINDS[kind].short}`).join(' · ')));
}

/** Draw or take away the critical path. */
function togglePath() {
  if (!RUNS.some(run => run.path)) return;
  view.path = !view.path;
  $('#path').setAttribute('aria-pressed', String(view.path));
  requestDraw();
}

/** Draw the critical path of each run: a line along the rows that it runs on, and from row to row where it changes. */
function drawCritical(g) {
  const path = new Path2D();
  for (const run of RUNS) if (run.path && stepOf(run).step === run.critical.step) addCritical(path, run);
  g.lineJoin = 'round';
  g.strokeStyle = surface().bg;
  g.lineWidth = 5;
  g.stroke(path);
  g.strokeStyle = surface().limit;
  g.lineWidth = 2.6;
  g.stroke(path);
}

/** Add the critical path of one run to a path on the screen. */
function addCritical(path, run) {
  const { row, start, end } = run.path;
  const rows = new Map(view.slots.flatMap((slot, index) => (slot.run === run ? [[slot.row, index]] : [])));
  const [offset] = view.lanes[0];
  let [before, turned] = [null, -Infinity];
  for (let i = 0; i < row.length; i++) {
    const index = rows.get(row[i]);
    if (index === undefined || end[i] < view.t0 || start[i] > view.t1) { before = null; continue; }
    const y = rowTop(index) + offset - 1;
    const [x0, x1] = [toX(start[i]), toX(end[i])];
    const turns = before !== null && y !== before;
    // where it goes to and fro within a few pixels, lines from row to row would hide the rows
    if (before === null || (turns && x0 - turned < TURN_GAP_PX)) path.moveTo(x0, y); else path.lineTo(x0, y);
    path.lineTo(x1, y);
    if (turns) turned = x0;
    before = y;
  }
}
