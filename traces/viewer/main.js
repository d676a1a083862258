// Start: unpack the timeline, draw, connect the controls.

/** Draw every canvas from the present view. */
function drawAll() {
  cancelAnimationFrame(frame);
  frame = 0;
  layoutView();
  drawTimeline();
  if (view.pointer) pointAt(view.pointer);   // the view has moved under it
  drawOverlay();
  drawOverview();
  drawLinks();
  drawMemory();
  drawRatios();
  if (MODE === 'run') drawHistory();
  requestPanel();
}

/** Rebuild everything that depends on the theme or the step, then draw. */
function refreshAll() {
  if (!RUNS.length) return;
  overviewImage = null;
  fillLegend();
  fillFindings();
  fillCritical();
  fillShares();
  fillPeaks();
  fillComparison();
  fillOperations();
  if (MODE === 'run') fillHistory();
  requestDraw();
}

/** Print in light colours whatever the screen shows, what lies on top of the schedule on the schedule itself. */
function wirePrint() {
  let before = theme;
  window.addEventListener('beforeprint', () => {
    before = theme;
    view.printing = true;
    setTheme('light');
    drawAll();
  });
  window.addEventListener('afterprint', () => {
    view.printing = false;
    setTheme(before);
  });
}

/** Show a document: all of the page is drawn from it. */
function showDocument(meta, bytes) {
  useDocument(meta, bytes);
  patterns.clear();
  fillHead();
  fillTables();
  fillBasis();
  $('#overview-section').hidden = !META.overview;
  $('#overview-run').textContent = RUNS.length > 1 ? ` of ${RUNS[0].label}:` : '';
  if (META.overview && META.overview.every > 1) $('#overview-note').textContent = `one line for every ${META.overview.every}th of ${META.runs[0].row_of.length} ranks; click one to see its rows below`;
  fitSteps();
  chooseRows(META.pick || 0);
  fillSteps();
  fillPicker();
  refreshAll();
  drawAll();
}

/** Connect what stays on the page whatever it shows. */
function wirePage() {
  wireTimeline();
  wireOverview();
  wireSearch();
  wireLinks();
  wireSelection();
  $('#path').addEventListener('click', togglePath);
  wirePrint();
  $('#theme').addEventListener('click', () => setTheme(theme === 'dark' ? 'light' : 'dark'));
  $('#whole').addEventListener('click', resetWindow);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', event => setTheme(event.matches ? 'dark' : 'light'));
  window.addEventListener('resize', requestDraw);
  window.foretrace = { view, kinds: () => KINDS, runs: () => RUNS, meta: () => META, toX, toTime, rowTop, laneRange, meeting, search, fillPanel, flatColour, hatchOf,
    offered: name => offered(name, CONTROLS.find(entry => entry[0] === name)[2]).map(String) };   // for the console
}

async function start() {
  const asked = new URLSearchParams(window.location.search).get('theme');
  if (['light', 'dark'].includes(asked)) theme = asked;
  document.documentElement.dataset.theme = theme;
  if (MODE === 'file') showDocument(JSON.parse($('#meta').textContent), await embeddedBytes('#columns'));
  else if (MODE === 'run') await showServed();
  else await startPlan();
  wirePage();
  document.body.dataset.ready = performance.now().toFixed(0);   // milliseconds since the page was asked for
  await loadLater();
}

/** Say on the page that something failed; nothing takes it back. */
function fail(message) {
  $('#failed').hidden = !message;
  $('#failed').textContent = message;
}

start().catch(error => {
  fail(`This page could not be drawn: ${error.message}`);
  throw error;
});
