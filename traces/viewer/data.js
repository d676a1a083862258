// The spans: gzip'd little-endian columns, sorted by (step, row, lane, start).

const TYPED = {
  uint8: Uint8Array, int8: Int8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, float64: Float64Array,
};
const PER_CELL = ['description', 'microbatch', 'layer', 'chunk', 'peer', 'sequence', 'waited', 'hidden', 'pair'];
let [META, KINDS, NAMES, LABELS] = [{ runs: [] }, [], [], []];
const isState = kind => KINDS[kind].group === 'state';
let RUNS = [];

/** Return the bytes of columns that are embedded in the page. */
async function embeddedBytes(selector) {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser cannot unpack the timeline; one from 2023 or later can');
  }
  const packed = fromBase64($(selector).textContent.trim());
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Take a document and its columns as what the page shows. */
function useDocument(meta, bytes) {
  META = meta;
  [KINDS, NAMES, LABELS, THEMES] = [meta.kinds, meta.names, meta.labels, meta.palette];
  const columns = new ColumnStore(meta, bytes);
  ratios = { a: columns.whole('ratio.a'), b: columns.whole('ratio.b'), kind: columns.whole('ratio.kind') };
  linkPixels.image = null;
  RUNS = meta.runs.map(info => unpackRun(info, columns));
}

/** Decode base64. */
function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** The columns of a document, by name. */
class ColumnStore {
  constructor(meta, bytes) {
    this.known = new Map(meta.columns.map(([name, type, offset, length, only]) => [name, { bytes, Type: TYPED[type], offset, length, only }]));
  }

  /** Return a column as a typed array; undefined where the document has none of that name. */
  whole(name) {
    const column = this.known.get(name);
    if (!column) return undefined;
    const found = new column.Type(column.length);
    putTogether(column, 0, column.length, found, 0);
    return found;
  }
}

/**
 * Put the values [from, to) of a column together, as the values of `into` from `at` on. A column is stored as all lowest
 * bytes, then the next ones; one of which all values are alike as that value.
 */
function putTogether({ bytes, offset, length, only }, from, to, into, at) {
  const n = to - from;
  if (only !== undefined) { into.fill(only, at, at + n); return; }
  const size = into.BYTES_PER_ELEMENT;
  if (size === 1) { into.set(bytes.subarray(offset + from, offset + to), at); return; }
  if (size === 2) {
    for (let i = 0, low = offset + from, high = low + length; i < n; i++) into[at + i] = bytes[low + i] | bytes[high + i] << 8;
    return;
  }
  const raw = new Uint8Array(into.buffer, into.byteOffset);
  for (let byte = 0; byte < size; byte++) {
    const plane = offset + byte * length + from;
    for (let i = 0, where = at * size + byte; i < n; i++, where += size) raw[where] = bytes[plane + i];
  }
}

/** Return a run; its spans are unpacked lane by lane when they are asked for, most of a large run never. */
function unpackRun(info, columns) {
  const cells = columns.whole(`${info.key}.ptr`).at(-1);
  const whole = name => columns.whole(`${info.key}.${name}`);
  const run = { ...info, ptr: whole('ptr'), overviewBins: whole('overview'), step: info.default_step, columns: columnsOfCells(columns, info.key) };
  for (const name of PER_CELL) if (run.columns[name]) run[name] = new run.columns[name].Type(cells);
  run.start = new Float64Array(cells);
  run.end = new Float64Array(cells);
  run.kind = new Uint8Array(cells);
  run.kindOfLabel = Uint8Array.from(LABELS, label => label[0]);
  run.unpacked = new Uint8Array(run.ptr.length - 1);
  const [t, bytes] = [whole('memory.t'), whole('memory.bytes')];
  const [row, start, end] = ['row', 'start', 'end'].map(name => whole(`critical.${name}`));
  run.path = row && { row, start, end };
  run.linksUsed = whole('links');
  run.memory = info.memory.map(series => ({ ...series, t: t.subarray(series.from, series.to), bytes: bytes.subarray(series.from, series.to) }));
  run.n_digits = String(info.most_microbatch).length;
  return run;
}

/**
 * Unpack one lane of one row in one step: absolute times in nanoseconds from the start of the step, and words.
 * Returns false where its columns have not come yet.
 */
function unpackLane(run, lane) {
  const [from, to] = [run.ptr[lane], run.ptr[lane + 1]];
  const [first, until] = run.first;
  const isHere = from >= first && to <= until;
  if (!isHere && !run.later) return false;
  run.unpacked[lane] = 1;
  const columns = isHere ? run.columns : run.later;
  const at = isHere ? from - first : from < first ? from : from - (until - first);
  for (const name of PER_CELL) if (columns[name]) putTogether(columns[name], at, at + to - from, run[name], from);
  const [gap, duration] = ['gap', 'duration'].map(name => {
    const found = new columns[name].Type(to - from);
    putTogether(columns[name], at, at + to - from, found, 0);
    return found;
  });
  for (let i = from, tick = 0; i < to; i++) {
    tick += gap[i - from];
    run.start[i] = tick * run.tick_ns;
    tick += duration[i - from];
    run.end[i] = tick * run.tick_ns;
    run.kind[i] = run.kindOfLabel[run.description[i]];
  }
  return true;
}

/** Take the columns that are not needed for the first picture, when that has been seen. */
async function loadLater() {
  if (META.later?.length) {
    if (document.readyState === 'loading') await new Promise(done => { document.addEventListener('DOMContentLoaded', done, { once: true }); });
    await new Promise(done => { setTimeout(done, 50); });
    const store = new ColumnStore({ columns: META.later }, await embeddedBytes('#later'));
    for (const run of RUNS) run.later = columnsOfCells(store, run.key);
    requestDraw();
  }
  document.body.dataset.whole = '1';
}

/** Return the columns of a run that have a value for each cell. */
function columnsOfCells(store, key) {
  const columns = {};
  for (const name of [...PER_CELL, 'gap', 'duration']) columns[name] = store.known.get(`${key}.${name === 'description' ? 'label' : name}`);
  return columns;
}

/** Return the range of spans of one lane of one row in the chosen step; an empty one where they have not come yet. */
function laneRange(run, row, lane) {
  const cell = (run.step * run.rows.length + row) * run.lanes.length + lane;
  if (!run.unpacked[cell] && !unpackLane(run, cell)) return [0, 0];
  return [run.ptr[cell], run.ptr[cell + 1]];
}

/** Return the first span of [low, high) that ends after `t`. Spans of a lane never overlap. */
function firstEndingAfter(run, low, high, t) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.end[middle] <= t) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return whether two spans of the compute lane belong to one cell: same phase, micro-batch and model chunk. */
const sameCell = (run, i, j) =>
  run.kind[i] === run.kind[j] && run.microbatch[i] === run.microbatch[j] && run.chunk[i] === run.chunk[j];

const stepOf = run => run.steps[run.step];
const labelOf = (run, i) => {
  const [kind, name, size, flops, bytes, dtype, group, operation] = LABELS[run.description[i]];
  return { kind: KINDS[kind], name: NAMES[name], size, flops, bytes, dtype: NAMES[dtype], group, operation: NAMES[operation] };
};
