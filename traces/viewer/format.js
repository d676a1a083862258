// Durations, sizes and rates as a person says them. Times are nanoseconds, sizes are bytes.

/** Return a duration in the largest unit that keeps it at 1 or more. */
function formatTime(ns, digits) {
  const size = Math.abs(ns);
  if (size >= 1e9) return (ns / 1e9).toFixed(digits ?? 3) + ' s';
  if (size >= 1e6) return (ns / 1e6).toFixed(digits ?? 2) + ' ms';
  if (size >= 1e3) return (ns / 1e3).toFixed(digits ?? 1) + ' µs';
  return ns.toFixed(0) + ' ns';
}

/** Return a point in time to the microsecond. */
const formatMoment = ns => formatTime(ns, ns >= 1e9 ? 6 : 3);

/** Return a duration in the unit and with the digits that suit another one, to be compared in a column. */
function formatTimeLike(ns, reference) {
  const [scale, unit] = reference >= 1e9 ? [1e9, 's'] : reference >= 1e6 ? [1e6, 'ms'] : [1e3, 'µs'];
  return `${(ns / scale).toFixed(reference >= 100 * scale ? 1 : reference >= 10 * scale ? 2 : 3)} ${unit}`;
}

/** Return how many times longer b is than a; "–" where a is nothing to compare with. */
function formatRatio(a, b) {
  return a > 0 ? (b / a < 100 ? `× ${(b / a).toFixed(2)}` : '> × 100') : '–';
}

/** Return a quantity with an SI prefix, three significant digits. */
function formatSI(value, unit) {
  if (!value) return '0 ' + unit;
  const steps = [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];
  for (const [scale, prefix] of steps) {
    if (value >= scale * 0.9995) return (value / scale).toPrecision(3) + ' ' + prefix + unit;
  }
  return value.toPrecision(3) + ' ' + unit;
}

/** Return words in which a number and its unit stay on one line. */
const unbroken = words => words.replace(/(\d) (?=[%\p{L}])/gu, '$1\u00a0');

/** Return a share of 1 as a percentage, with one digit behind the point unless told otherwise. */
function formatShare(share, digits = 1) {
  if (!(share > 0)) return '0 %';
  if (share < 0.001) return '< 0.1 %';
  return (share * 100).toFixed(digits) + ' %';
}

/** Return round tick positions between two values, about `count` of them, and their distance. */
function ticksBetween(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * magnitude).find(s => s >= rough * 0.9999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-9; i++) ticks.push(i * step);
  return [ticks, step];
}

/** Return the label of a time tick; all labels of one axis share a unit, chosen from its far end. */
function tickLabel(ns, step, far) {
  const [scale, unit] = far >= 2e9 && step >= 1e6 ? [1e9, 's'] : step >= 1e4 ? [1e6, 'ms'] : [1e3, 'µs'];
  const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return (ns / scale).toFixed(digits) + ' ' + unit;
}

/** Return an element with text and children; text from input never becomes markup. */
function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'class') node.className = value;
    else if (value === true) node.setAttribute(name, '');
    else if (name === 'style') Object.assign(node.style, value);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
