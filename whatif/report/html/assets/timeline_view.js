// Draws threads of tasks on a canvas. However many tasks there are, a thread is never more rectangles than pixels.
report.TimelineView = class {
  static GUTTER = innerWidth < 640 ? 110 : 190;
  static ROW = 20;
  static TITLE = 22;
  static AXIS = 24;

  constructor(canvas, sides, classes) {
    this.canvas = canvas;
    this.sides = sides;
    this.classes = classes; // of each code of a task: which colour
    this.whole_ns = Math.max(...sides.map((side) => side.length_ns), 1);
    this.begin_ns = 0;
    this.span_ns = this.whole_ns;
    this.marked = null; // rows of texts that were searched for
    this.selected = null; // {side, thread, row}
    this.rows = [];
    let y = this.constructor.AXIS;
    for (const side of sides) {
      y += this.constructor.TITLE;
      side.y = y - 6;
      for (const thread of side.threads) {
        this.rows.push({ side, thread, y });
        y += this.constructor.ROW;
      }
    }
    this.height = y + 6;
    this.drawn = 0;
    this.measure();
  }

  // Asked of the browser once a drawing: each question may make it lay out the page.
  measure() {
    const width = Math.max(this.canvas.parentElement.clientWidth - this.constructor.GUTTER, 50);
    if (width !== this.width) this.labels = new Map();
    this.width = width;
  }

  x(time_ns) {
    return this.constructor.GUTTER + ((time_ns - this.begin_ns) / this.span_ns) * this.width;
  }

  time(x) {
    return this.begin_ns + ((x - this.constructor.GUTTER) / this.width) * this.span_ns;
  }

  show(begin_ns, span_ns) {
    this.span_ns = Math.min(Math.max(span_ns, 1000), this.whole_ns);
    this.begin_ns = Math.min(Math.max(begin_ns, 0), this.whole_ns - this.span_ns);
    this.later();
  }

  zoom(factor, at_ns = this.begin_ns + this.span_ns / 2) {
    const span_ns = Math.min(Math.max(this.span_ns * factor, 1000), this.whole_ns);
    this.show(at_ns - ((at_ns - this.begin_ns) / this.span_ns) * span_ns, span_ns);
  }

  later() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  draw() {
    const began = performance.now();
    this.measure();
    const ratio = devicePixelRatio || 1;
    const width = this.width + this.constructor.GUTTER;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
    }
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, this.height);
    this.colors = this.classes.names.map((_, at) => report.color(`--t${at}`));
    this.ink = { fg: report.color("--fg"), muted: report.color("--muted"), line: report.color("--line"), changed: report.color("--changed") };
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.drawn = 0;
    this.axis(c, width);
    for (const side of this.sides) {
      c.fillStyle = this.ink.fg;
      c.fillText(side.title, 4, side.y - 6);
    }
    // Boxes are collected by colour: setting a colour takes longer than filling a box.
    this.boxes = new Map();
    for (const row of this.rows) this.row(c, row);
    for (const [color, boxes] of this.boxes) this.fill(c, color, boxes);
    this.outline(c);
    this.canvas.dataset.drawn = this.drawn;
    this.canvas.dataset.span = this.span_ns;
    this.canvas.dataset.begin = this.begin_ns;
    this.canvas.dataset.ms = (performance.now() - began).toFixed(2);
  }

  axis(c, width) {
    const wanted = this.span_ns / (this.width / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].find((times) => times * power >= wanted) * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step / 1e6)));
    c.textAlign = "center";
    for (let time = Math.ceil(this.begin_ns / step) * step; time <= this.begin_ns + this.span_ns; time += step) {
      const x = this.x(time);
      c.fillStyle = this.ink.line;
      c.fillRect(x, this.constructor.AXIS - 6, 1, this.height);
      c.fillStyle = this.ink.muted;
      if (x < width - 24) c.fillText(`${report.number(time / 1e6, digits)} ms`, x, 9);
    }
    c.textAlign = "left";
  }

  // The first of a thread's tasks that ends behind a time: they stand by their starts, and hardly overlap.
  firstAfter(row, time_ns) {
    const { side, thread } = row;
    let [low, high] = [thread.first, thread.end];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (side.start[middle] + side.length[middle] <= time_ns) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  row(c, row) {
    const { side, thread, y } = row;
    const height = this.constructor.ROW - 4;
    c.fillStyle = this.ink.muted;
    if (!this.labels.has(row)) this.labels.set(row, clipped(c, thread.name, this.constructor.GUTTER - 12));
    c.fillText(this.labels.get(row), 8, y + height / 2);
    const [left, right] = [this.constructor.GUTTER, this.constructor.GUTTER + this.width];
    const end_ns = this.begin_ns + this.span_ns;
    // Tasks narrower than a pixel share it: the one that takes most of it is shown.
    let pixel = -1;
    let longest = 0;
    let shown = -1;
    const flush = () => {
      if (shown >= 0) this.box(side, shown, pixel, y, 1, height);
      shown = -1;
      longest = 0;
    };
    for (let at = this.firstAfter(row, this.begin_ns); at < thread.end; at++) {
      const start = side.start[at];
      if (start >= end_ns) break;
      const from = Math.max(this.x(start), left);
      const to = Math.min(this.x(start + side.length[at]), right);
      if (to - from >= 1) {
        flush();
        this.box(side, at, from, y, to - from, height);
        continue;
      }
      const place = Math.floor(from);
      if (place !== pixel) {
        flush();
        pixel = place;
      }
      if (side.length[at] >= longest) {
        longest = side.length[at];
        shown = at;
      }
    }
    flush();
  }

  box(side, at, x, y, width, height) {
    const code = side.what[at];
    const dimmed = this.marked && !this.marked.has(side.name[at]) && !this.marked.has(side.layer[at]);
    const add = (color, ...box) => {
      const key = dimmed ? `${color} dimmed` : color;
      if (!this.boxes.has(key)) this.boxes.set(key, []);
      this.boxes.get(key).push(...box);
    };
    add(this.colors[this.classes.of(code)], x, y, width > 3 ? width - 0.5 : width, height);
    if ((code >> 13) & 3) add(this.ink.changed, x, y - 2, width, 2);
    if ((code >> 15) & 1) add(this.ink.fg, x, y + height, width, 2);
    this.drawn++;
  }

  fill(c, key, boxes) {
    const [color, dimmed] = key.split(" ");
    c.globalAlpha = dimmed ? 0.2 : 1;
    c.fillStyle = color;
    for (let at = 0; at < boxes.length; at += 4) c.fillRect(boxes[at], boxes[at + 1], boxes[at + 2], boxes[at + 3]);
    c.globalAlpha = 1;
  }

  outline(c) {
    if (!this.selected) return;
    const { row, side, at } = this.selected;
    const from = Math.max(this.x(side.start[at]), this.constructor.GUTTER);
    const to = Math.min(this.x(side.start[at] + side.length[at]), this.constructor.GUTTER + this.width);
    if (to < from) return;
    c.strokeStyle = this.ink.fg;
    c.lineWidth = 2;
    c.strokeRect(from - 2, row.y - 2, Math.max(to - from, 1) + 4, this.constructor.ROW);
  }

  // The task under a point of the canvas, or close to it; null where there is none.
  find(x, y) {
    const row = this.rows.find((candidate) => y >= candidate.y - 2 && y < candidate.y + this.constructor.ROW - 2);
    if (!row || x < this.constructor.GUTTER) return null;
    const slack_ns = (2 / this.width) * this.span_ns;
    const at = this.firstAfter(row, this.time(x) - slack_ns);
    if (at >= row.thread.end || row.side.start[at] > this.time(x) + slack_ns) return null;
    return { row, side: row.side, at };
  }
};

function clipped(c, name, room) {
  if (c.measureText(name).width <= room) return name;
  let kept = name;
  while (kept.length > 1 && c.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}
