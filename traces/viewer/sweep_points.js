// The picture of many layouts: throughput, or what is chosen, against memory.

/** Room over the highest point, in pixels: for the name of the limit, and below it that of the best layout. */
const HEADROOM = 58;
const LABEL = { height: 22, gap: 12 };

/** Return the scales of the picture: memory logarithmic, so that twice as much is as far everywhere.
 *  What all layouts have more than half of is cut off, or they would lie on one line. */
function scales(layouts) {
  const sizes = layouts.map(one => one.peak_memory_bytes);
  const limit = SWEEP.layouts.find(one => one.memory_limit_bytes)?.memory_limit_bytes || 0;
  const [low, high] = [Math.min(...sizes, limit || Infinity) / 1.15, Math.max(...sizes, limit) * 1.15];
  const [least, most] = [Math.min(...layouts.map(one => one[sweep.up])), Math.max(...layouts.map(one => one[sweep.up]))];
  const base = least > most / 2 && least < most ? Math.max(0, least - (most - least) * 0.5) : 0;
  const [plot, tall] = [sweep.width - FRAME.left - FRAME.right, FRAME.height - FRAME.top - FRAME.bottom];
  const top = base + ((most - base) * tall / (tall - HEADROOM) || 1);
  return {
    limit, low, high, top, base,
    x: bytes => FRAME.left + Math.log(bytes / low) / Math.log(high / low) * plot,
    y: value => FRAME.top + tall * (1 - (value - base) / (top - base)),
    right: FRAME.left + plot, foot: FRAME.top + tall,
  };
}

function write(g, words, x, y, { align = 'left', size = 11.5, weight = 400, colour = surface().ink } = {}) {
  g.font = `${weight} ${size}px ${FONT}`;
  g.textAlign = align;
  g.textBaseline = 'middle';
  g.fillStyle = colour;
  g.fillText(words, x, y);
}

/** Draw every layout, the limit, the front and the best. */
function drawPoints() {
  const canvas = $('#points');
  sweep.width = Math.max(300, canvas.parentElement.clientWidth);
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  [canvas.width, canvas.height] = [Math.round(sweep.width * ratio), Math.round(FRAME.height * ratio)];
  [canvas.style.width, canvas.style.height] = [sweep.width + 'px', FRAME.height + 'px'];
  const g = canvas.getContext('2d');
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, sweep.width, FRAME.height);
  const layouts = shown();
  if (!layouts.length) return;
  const scale = scales(layouts);
  drawAxes(g, scale);
  const names = groups();
  for (const one of layouts) if (!one.fits) drawPoint(g, one, scale, names, 0.3);
  for (const one of layouts) if (one.fits) drawPoint(g, one, scale, names, 0.9);
  drawFront(g, frontOf(layouts), scale);
  drawBest(g, bestOf(layouts), scale);
  for (const one of new Set([sweep.marked, sweep.hover])) if (one && layouts.includes(one)) drawRing(g, one, scale);
}

function drawAxes(g, scale) {
  const { limit, x, y, right, foot } = scale;
  if (limit && limit < scale.high) {
    g.fillStyle = mix(surface().bg, surface().limit, 0.07);
    g.fillRect(x(limit), FRAME.top, right - x(limit), foot - FRAME.top);
  }
  const [ticks] = ticksBetween(scale.base, scale.top, 6);
  for (const value of ticks) {
    g.fillStyle = surface().grid;
    g.fillRect(FRAME.left, Math.round(y(value)), right - FRAME.left, 1);
    write(g, SAID[sweep.up](value || 0), FRAME.left - 8, y(value), { align: 'right', colour: surface().muted });
  }
  const factor = x(2e9) - x(1e9) < 52 ? 4 : 2;
  for (let bytes = 2 ** Math.ceil(Math.log2(scale.low / 1e9)) * 1e9; bytes <= scale.high; bytes *= factor) {
    g.fillStyle = surface().grid;
    g.fillRect(Math.round(x(bytes)), FRAME.top, 1, foot - FRAME.top);
    write(g, formatSI(bytes, 'B').replace(/\.0+ /, ' '), x(bytes), foot + 14, { align: 'center', colour: surface().muted });
  }
  write(g, 'peak memory of the fullest rank', (FRAME.left + right) / 2, foot + 33, { align: 'center', colour: surface().muted });
  write(g, figureOf(sweep.up).label + (scale.base ? ', not from 0' : ''), 8, 10, { colour: surface().muted });
  if (!limit || limit >= scale.high) return;
  g.fillStyle = surface().limit;
  for (let at = FRAME.top; at < foot; at += 10) g.fillRect(x(limit) - 0.75, at, 1.5, 6);
  const room = right - x(limit) > 190;
  write(g, `does not fit: over ${formatSI(limit, 'B')}`, x(limit) + (room ? 6 : -6), FRAME.top + 9, { align: room ? 'left' : 'right', colour: surface().limit });
}

/** Draw one layout. */
function drawPoint(g, one, scale, names, strength) {
  const { colour, shape } = lookOf(groupOf(one), names);
  const [x, y, r] = [scale.x(one.peak_memory_bytes), scale.y(one[sweep.up]), 4.6];
  g.globalAlpha = strength;
  g.fillStyle = colour;
  g.strokeStyle = surface().bg;
  g.lineWidth = 0.8;
  g.beginPath();
  if (shape === 0) g.arc(x, y, r, 0, 7);
  else if (shape === 1) g.rect(x - r * 0.87, y - r * 0.87, r * 1.74, r * 1.74);
  else {
    const corners = { 2: [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]], 3: [[0, -1.15], [1.1, 0.85], [-1.1, 0.85]], 4: [[-1.1, -0.85], [1.1, -0.85], [0, 1.15]] }[shape];
    corners.forEach(([dx, dy], i) => (i ? g.lineTo(x + dx * r, y + dy * r) : g.moveTo(x + dx * r, y + dy * r)));
    g.closePath();
  }
  g.fill();
  g.stroke();
  g.globalAlpha = 1;
}

function drawFront(g, front, scale) {
  g.strokeStyle = surface().ink;
  g.lineWidth = 1.3;
  g.beginPath();
  front.forEach((one, i) => {
    const [x, y] = [scale.x(one.peak_memory_bytes), scale.y(one[sweep.up])];
    if (i) { g.lineTo(x, scale.y(front[i - 1][sweep.up])); g.lineTo(x, y); } else g.moveTo(x, y);
  });
  g.stroke();
}

/** Return the words that name the best layout, and where: beyond its point, where no other that fits can be. */
function labelOf(g, best, scale) {
  g.font = `600 12px ${FONT}`;
  const said = [`best that fits: ${settingsOf(best)}, ${SAID[sweep.up](best[sweep.up])}`, `best that fits: ${SAID[sweep.up](best[sweep.up])}`];
  const words = said.find(one => g.measureText(one).width + 14 < scale.right - FRAME.left) || 'best';
  const width = g.measureText(words).width + 14;
  const [x, y] = [scale.x(best.peak_memory_bytes), scale.y(best[sweep.up])];
  const over = figureOf(sweep.up).better === 'high';
  const top = over ? y - LABEL.gap - LABEL.height : Math.min(scale.foot - LABEL.height - 2, y + LABEL.gap);
  return { words, x, y, over, width, height: LABEL.height, top, left: Math.max(FRAME.left + 4, Math.min(scale.right - width, x - width + 16)) };
}

/** Name the best layout that fits. */
function drawBest(g, best, scale) {
  if (!best) return;
  const { words, x, y, over, width, height, top, left } = labelOf(g, best, scale);
  g.strokeStyle = g.fillStyle = surface().ink;
  g.lineWidth = 1;
  g.beginPath();
  g.moveTo(x, y);
  g.lineTo(x, over ? top + height : top);
  g.stroke();
  g.fillStyle = surface().bg;
  g.fillRect(left, top, width, height);
  g.strokeRect(left, top, width, height);
  write(g, words, left + 7, top + height / 2 + 0.5, { size: 12, weight: 600 });
}

function drawRing(g, one, scale) {
  g.strokeStyle = surface().ink;
  g.lineWidth = 2;
  g.beginPath();
  g.arc(scale.x(one.peak_memory_bytes), scale.y(one[sweep.up]), 8, 0, 7);
  g.stroke();
}
