// Many runs in one chart: how long each step of each took.

const HISTORY = { left: 64, right: 14, top: 10, bottom: 26, height: 230 };
const history = { runs: [], shown: new Set() };

/** Fetch the steps of all runs that are served, and draw this run with those of the same model. */
async function loadHistory() {
  const name = new URLSearchParams(window.location.search).get('run');
  const { runs } = await (await fetch('/history')).json();
  const own = runs.find(run => run.name === name);
  if (!own || (runs.length < 2 && own.steps.length < 2)) return;
  history.runs = [own, ...runs.filter(run => run !== own)];
  history.shown = new Set(history.runs.filter(run => run.model === own.model).slice(0, colours().series.length).map(run => run.name));
  $('#history-section').hidden = false;
  fillHistory();
}

/** Return the colour of a run of the chart. */
const historyColour = run => colours().series[history.runs.indexOf(run) % colours().series.length];

/** List the runs, each to be shown or not, and draw those that are. */
function fillHistory() {
  $('#history-runs').replaceChildren(...history.runs.map(run => {
    const button = element('button', { type: 'button', 'aria-pressed': String(history.shown.has(run.name)) },
      element('span', { class: 'swatch', style: { background: historyColour(run) } }),
      ` ${run.name}, ${run.origin}: ${run.steps.length} step${run.steps.length > 1 ? 's' : ''}, median ${formatTime(run.median_ns)}`);
    button.addEventListener('click', () => { if (!history.shown.delete(run.name)) history.shown.add(run.name); fillHistory(); });
    return button;
  }));
  drawHistory();
}

/** Return where steps and times lie on the chart: {runs, x, y, far, top}. */
function historyScale(width) {
  const runs = history.runs.filter(run => history.shown.has(run.name));
  const all = runs.flatMap(run => run.steps);
  const [low, far] = [Math.min(...all), Math.max(...all)];
  const top = Math.max(...runs.flatMap(run => run.times_ns)) * 1.08;
  const [wide, tall] = [width - HISTORY.left - HISTORY.right, HISTORY.height - HISTORY.top - HISTORY.bottom];
  const x = step => HISTORY.left + (far > low ? (step - low) / (far - low) : 0.5) * wide;
  // In the middle of a pixel: a flat line between two would have the colour of neither run nor page.
  return { runs, x, y: ns => Math.floor(HISTORY.top + tall - ns / top * tall) + 0.5, low, far, top };
}

/** Draw the time of each step, from zero; a run that was simulated is dashed. */
function drawHistory() {
  if (!history.runs.length) return;
  const width = $('#history').parentElement.clientWidth;
  const g = sizeCanvas($('#history'), width, HISTORY.height);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, width, HISTORY.height);
  const { runs, x, y, low, far, top } = historyScale(width);
  if (!runs.length) return;
  for (const ns of ticksBetween(0, top, 4)[0]) {
    g.fillStyle = surface().grid;
    g.fillRect(HISTORY.left, y(ns) - 0.5, width - HISTORY.left - HISTORY.right, 1);
    text(g, formatTimeLike(ns, top), HISTORY.left - 6, y(ns), { align: 'right', size: 11, colour: surface().muted });
  }
  for (const step of far > low ? ticksBetween(low, far, 8)[0].filter(Number.isInteger) : [low]) {
    text(g, `step ${step}`, x(step), HISTORY.height - 12, { align: step === far && far > low ? 'right' : 'center', size: 11, colour: surface().muted });
  }
  for (const run of runs) {
    g.strokeStyle = g.fillStyle = historyColour(run);
    g.lineWidth = run === history.runs[0] ? 2.6 : 1.6;
    g.setLineDash(run.origin === 'simulated' ? [6, 4] : []);
    g.beginPath();
    run.steps.forEach((step, i) => g.lineTo(x(step), y(run.times_ns[i])));
    if (run.steps.length === 1) { g.moveTo(HISTORY.left, y(run.times_ns[0])); g.lineTo(width - HISTORY.right, y(run.times_ns[0])); }
    g.stroke();
    g.setLineDash([]);
    if (run.steps.length < 100) for (const [i, step] of run.steps.entries()) { g.beginPath(); g.arc(x(step), y(run.times_ns[i]), 2.6, 0, 7); g.fill(); }
  }
}

/** Say which step lies nearest to the pointer. */
function wireHistory() {
  $('#history').addEventListener('pointermove', event => {
    const { runs, x, y } = historyScale($('#history').parentElement.clientWidth);
    let nearest = null;
    for (const run of runs) run.steps.forEach((step, i) => {
      const far = Math.hypot(x(step) - event.offsetX, y(run.times_ns[i]) - event.offsetY);
      if (far < 30 && (!nearest || far < nearest.far)) nearest = { far, run, step, ns: run.times_ns[i] };
    });
    showWords(nearest && [nearest.run.name, [['step', nearest.step], ['time', formatTime(nearest.ns)]]], event.clientX, event.clientY);
  });
  $('#history').addEventListener('pointerleave', () => showWords(null));
}
