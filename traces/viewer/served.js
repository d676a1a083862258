// Pages from `foretrace serve`: documents that are fetched, in parts where a run is large.

/** Return a document and the bytes of its columns: four bytes of length, JSON, columns as they are. */
async function fetchDocument(address, signal) {
  const response = await fetch(address, { signal });
  const data = await response.arrayBuffer();
  const length = new DataView(data).getUint32(0, true);
  const meta = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  if (meta.error) throw new Error(meta.error);
  return [meta, new Uint8Array(data, 4 + length)];
}

/** Return the address of a part of what the page is about. */
function partOf(path, more) {
  const asked = new URLSearchParams(window.location.search);
  asked.delete('theme');
  for (const [name, value] of Object.entries(more)) asked.set(name, value);
  return `${path}?${asked}`;
}

/** Show the run that the address names; of many ranks the overview follows, and then what they lose. */
async function showServed() {
  busy('reading the run');
  const [meta, bytes] = await fetchDocument(partOf('/document', {}));
  showDocument(meta, bytes);
  busy('');
  if (META.windowed) loadOverview().then(loadFindings);
  wireHistory();
  loadHistory();
}

/** Fetch what the run loses: of many ranks it takes the longest. */
async function loadFindings() {
  busy('looking for what the run loses');
  try {
    const [meta] = await fetchDocument(partOf('/findings', {}));
    META.findings = meta.findings;
    fillFindings();
  } finally {
    busy('');
  }
}

/** Say what is being waited for. */
function busy(words) {
  $('#busy').hidden = !words;
  $('#busy').textContent = words && `${words} …`;
}

/** Replace the rows and the step of a large run by others. */
async function loadWindow(pick, step, rank) {
  const { overview, findings } = META;
  const [bins, steps] = [RUNS[0].overviewBins, RUNS[0].overviewStep];
  busy('reading spans');
  try {
    const [meta, bytes] = await fetchDocument(partOf('/document', { pick, step }));
    const [t0, t1] = [view.t0, view.t1];
    showDocument({ ...meta, findings, overview: step === steps ? overview : null }, bytes);
    if (step === steps) keepOverview(overview, bins, steps);
    view.pick = pick;
    chooseRows(pick, rank);
    if (step === steps) showWindow(t0, t1);
    fillPicker();
    fillShares();
    fillPeaks();
    requestDraw();
    busy('');
    if (step !== steps) loadOverview();
  } catch (error) {
    busy('');
    fail(error.message);
  }
}

/** Fetch the overview of all ranks in the step that is shown. */
async function loadOverview() {
  const { step } = stepOf(RUNS[0]);
  busy('drawing all ranks');
  try {
    const [meta, bytes] = await fetchDocument(partOf('/overview', { step }));
    if (!meta.overview || stepOf(RUNS[0]).step !== step) return;
    keepOverview(meta.overview, new ColumnStore(meta, bytes).whole('a.overview'), step);
    $('#overview-section').hidden = false;
    requestDraw();
  } finally {
    busy('');
  }
}

function keepOverview(overview, bins, step) {
  META.overview = overview;
  RUNS[0].overviewBins = bins;
  RUNS[0].overviewStep = step;
  if (overview) stepOf(RUNS[0]).busy = overview.busy;
  overviewImage = null;
}
