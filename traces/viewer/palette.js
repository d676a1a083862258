// Colours and hatches. Solid is working, hatched is waiting: hue and direction say for what.

let THEMES = {};
let theme = window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
const patterns = new Map();

const colours = () => THEMES[theme];
const surface = () => THEMES[theme].surface;

/** Blend two #rrggbb colours; `share` is how much of the second. */
function mix(first, second, share) {
  const a = parseInt(first.slice(1), 16);
  const b = parseInt(second.slice(1), 16);
  const part = shift => Math.round((a >> shift & 255) * (1 - share) + (b >> shift & 255) * share);
  return '#' + ((1 << 24) | (part(16) << 16) | (part(8) << 8) | part(0)).toString(16).slice(1);
}

/** Return black or white, whichever can be read on a colour. */
function inkOn(colour) {
  const n = parseInt(colour.slice(1), 16);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = 0.2126 * linear(n >> 16) + 0.7152 * linear(n >> 8 & 255) + 0.0722 * linear(n & 255);
  return luminance > 0.32 ? '#10151d' : '#ffffff';
}

const axisColour = axis => colours().axes[axis] || colours().axes.world;

/** Return the hatch of a state: background, stroke colour, direction and stroke width. */
function hatchOf(kind) {
  const idle = colours().idle[kind.id];
  if (idle) return { back: idle[0], line: idle[1], direction: THEMES.hatch[kind.id], width: 1.15 };
  const colour = axisColour(kind.axis);
  const moving = kind.id.startsWith('exposed:');
  const back = mix(colour, surface().bg, moving ? 0.62 : 0.9);
  return { back, line: colour, direction: THEMES.hatch[kind.axis] || '\\', width: moving ? 2.1 : 1.15 };
}

/** Return one flat colour for a kind: its own, or that of its hatch seen from far away. */
function flatColour(kind) {
  if (kind.group === 'compute') return colours().compute[kind.colour];
  if (kind.group !== 'state') return axisColour(kind.axis);
  const hatch = hatchOf(kind);
  return mix(hatch.back, hatch.line, kind.id === 'bubble' ? 0.25 : 0.7);
}

/** Return the fill of a kind for a canvas: a colour, or a hatch pattern for a state. */
function fillOf(context, kind) {
  if (kind.group !== 'state') return flatColour(kind);
  const key = theme + kind.id;
  if (!patterns.has(key)) patterns.set(key, context.createPattern(hatchTile(hatchOf(kind)), 'repeat'));
  return patterns.get(key);
}

/** Draw one repeatable tile of a hatch. */
function hatchTile({ back, line, direction, width }) {
  const size = 7;
  const tile = document.createElement('canvas');
  tile.width = tile.height = size;
  const g = tile.getContext('2d');
  g.fillStyle = back;
  g.fillRect(0, 0, size, size);
  g.strokeStyle = g.fillStyle = line;
  g.lineWidth = width;
  g.beginPath();
  for (const o of [-size, 0, size]) {
    if (direction === '/' || direction === 'x') { g.moveTo(o, size); g.lineTo(o + size, 0); }
    if (direction === '\\' || direction === 'x') { g.moveTo(o, 0); g.lineTo(o + size, size); }
  }
  if (direction === '|' || direction === '+') { g.moveTo(2.5, 0); g.lineTo(2.5, size); }
  if (direction === '-' || direction === '+') { g.moveTo(0, 2.5); g.lineTo(size, 2.5); }
  g.stroke();
  if (direction === '.') { g.beginPath(); g.arc(2.5, 2.5, width, 0, 7); g.fill(); }
  return tile;
}

/** Return the CSS background of a kind, for legends, bars and tables outside the canvas. */
function cssFill(kind) {
  if (kind.group === 'compute') return flatColour(kind);
  if (kind.group === 'host') return mix(axisColour(''), surface().bg, 0.62);
  if (kind.group === 'communication') {
    const colour = axisColour(kind.axis);
    return `linear-gradient(90deg, ${mix(colour, surface().bg, 0.62)} 50%, ${colour} 50%)`;
  }
  return `url(${hatchTile(hatchOf(kind)).toDataURL()})`;
}

/** Switch between light and dark, and redraw everything that has a colour. */
function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
  patterns.clear();
  refreshAll();
}
