// The spans: gzip'd little-endian columns, sorted by (step, row, lane, start).

const TYPED = { uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, float64: Float64Array };
let [META, KINDS, NAMES, LABELS] = [{ runs: [] }, [], [], []];
const isState = kind => KINDS[kind].group === 'state';
let RUNS = [];

/** Return the bytes of the columns that are embedded in the page. */
async function embeddedBytes() {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser cannot unpack the timeline; one from 2023 or later can');
  }
  const packed = fromBase64($('#columns').textContent.trim());
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Take a document and its columns as what the page shows. */
function useDocument(meta, bytes) {
  META = meta;
  [KINDS, NAMES, LABELS, THEMES] = [meta.kinds, meta.names, meta.labels, meta.palette];
  const columns = columnsOf(meta, bytes);
  ratios = { a: columns['ratio.a'], b: columns['ratio.b'], kind: columns['ratio.kind'] };
  useCritical(columns);
  [linksUsed, linkPixels.image] = [columns['links.used'], null];
  RUNS = meta.runs.map(info => unpackRun(info, columns));
}

/** Return the columns of a document by name. */
function columnsOf(meta, bytes) {
  return Object.fromEntries(meta.columns.map(([name, type, offset, length]) => [name, joined(bytes, TYPED[type], offset, length)]));
}

/** Decode base64. */
function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** Put a column together that is stored byte by byte: all lowest bytes, then the next ones. */
function joined(bytes, Type, offset, length) {
  const size = Type.BYTES_PER_ELEMENT;
  const plane = byte => bytes.subarray(offset + byte * length, offset + (byte + 1) * length);
  if (size === 1) return plane(0).slice();
  const found = new Type(length);
  if (size === 2) {
    const [low, high] = [plane(0), plane(1)];
    for (let i = 0; i < length; i++) found[i] = low[i] | high[i] << 8;
  } else if (size === 4) {
    const [a, b, c, d] = [plane(0), plane(1), plane(2), plane(3)];
    for (let i = 0; i < length; i++) found[i] = a[i] | b[i] << 8 | c[i] << 16 | d[i] << 24;
  } else {
    const raw = new Uint8Array(found.buffer);
    for (let byte = 0; byte < size; byte++) {
      const from = plane(byte);
      for (let i = 0, to = byte; i < length; i++, to += size) raw[to] = from[i];
    }
  }
  return found;
}

/** Return a run with its spans unpacked: absolute times in nanoseconds from the start of their step. */
function unpackRun(info, columns) {
  const own = name => columns[info.key + '.' + name];
  const run = {
    ...info, ptr: own('ptr'), description: own('label'), microbatch: own('microbatch'), layer: own('layer'),
    chunk: own('chunk'), peer: own('peer'), sequence: own('sequence'), waited: own('waited'), hidden: own('hidden'), pair: own('pair'),
    overviewBins: own('overview'), step: info.default_step,
  };
  const gap = own('gap');
  const ticks = own('duration');
  run.start = new Float64Array(gap.length);
  run.end = new Float64Array(gap.length);
  for (let lane = 0; lane + 1 < run.ptr.length; lane++) {
    let tick = 0;
    for (let i = run.ptr[lane]; i < run.ptr[lane + 1]; i++) {
      tick += gap[i];
      run.start[i] = tick * info.tick_ns;
      tick += ticks[i];
      run.end[i] = tick * info.tick_ns;
    }
  }
  run.memory = info.memory.map(series => ({
    ...series, t: own('memory.t').subarray(series.from, series.to), bytes: own('memory.bytes').subarray(series.from, series.to),
  }));
  run.kind = new Uint8Array(gap.length);
  const kinds = Uint8Array.from(LABELS, label => label[0]);
  let most = 0;
  for (let i = 0; i < gap.length; i++) {
    run.kind[i] = kinds[run.description[i]];
    if (run.microbatch[i] > most) most = run.microbatch[i];
  }
  run.n_digits = String(most).length;
  return run;
}

/** Return the range of spans of one lane of one row in the chosen step. */
function laneRange(run, row, lane) {
  const cell = (run.step * run.rows.length + row) * run.lanes.length + lane;
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

/** Return the nanoseconds of [from, to) in which a row computes. */
function computeWithin(run, row, from, to) {
  const [low, high] = laneRange(run, row, 0);
  let total = 0;
  for (let i = firstEndingAfter(run, low, high, from); i < high && run.start[i] < to; i++) {
    if (!isState(run.kind[i])) total += Math.min(to, run.end[i]) - Math.max(from, run.start[i]);
  }
  return total;
}

/** Return whether two spans of the compute lane belong to one cell: same phase, micro-batch and model chunk. */
const sameCell = (run, i, j) =>
  run.kind[i] === run.kind[j] && run.microbatch[i] === run.microbatch[j] && run.chunk[i] === run.chunk[j];

const stepOf = run => run.steps[run.step];
const labelOf = (run, i) => {
  const [kind, name, size, flops, bytes, dtype, group, operation] = LABELS[run.description[i]];
  return { kind: KINDS[kind], name: NAMES[name], size, flops, bytes, dtype: NAMES[dtype], group, operation: NAMES[operation] };
};
