// Start: unpack the timeline, draw, connect the controls.

/** Draw every canvas from the present view. */
function drawAll() {
  layoutView();
  drawTimeline();
  drawOverlay();
  drawOverview();
  drawMemory();
  drawRatios();
}

/** Rebuild everything that depends on the theme or the step, then draw. */
function refreshAll() {
  if (!RUNS.length) return;
  overviewImage = null;
  fillLegend();
  fillShares();
  fillPeaks();
  fillComparison();
  fillOperations();
  requestDraw();
}

/** Print in light colours whatever the screen shows. */
function wirePrint() {
  let before = theme;
  window.addEventListener('beforeprint', () => { before = theme; setTheme('light'); drawAll(); });
  window.addEventListener('afterprint', () => setTheme(before));
}

async function start() {
  const asked = new URLSearchParams(window.location.search).get('theme');
  if (asked in THEMES) theme = asked;
  document.documentElement.dataset.theme = theme;
  fillHead();
  fillBasis();
  const columns = await decodeColumns($('#columns').textContent.trim());
  ratios = { a: columns['ratio.a'], b: columns['ratio.b'], kind: columns['ratio.kind'] };
  RUNS = META.runs.map(info => unpackRun(info, columns));
  $('#overview-section').hidden = !META.overview;
  if (META.overview && META.overview.every > 1) $('#overview-note').textContent += `; every ${META.overview.every}th of ${META.runs[0].row_of.length} ranks`;
  fitSteps();
  chooseRows(0);
  fillSteps();
  refreshAll();
  drawAll();
  wireTimeline();
  if (META.overview) wireOverview();
  wirePrint();
  $('#theme').addEventListener('click', () => setTheme(theme === 'dark' ? 'light' : 'dark'));
  $('#whole').addEventListener('click', resetWindow);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', event => setTheme(event.matches ? 'dark' : 'light'));
  window.addEventListener('resize', requestDraw);
  window.foretrace = { view, kinds: KINDS, runs: () => RUNS, toX, toTime, rowTop, laneRange, meeting };   // for the console
  document.body.dataset.ready = '1';
}

start().catch(error => {
  $('#failed').hidden = false;
  $('#failed').textContent = `This report could not be drawn: ${error.message}`;
  throw error;
});
