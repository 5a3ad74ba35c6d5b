// The timeline of a step: what moves it, what it tells of a task, and what its colours mean.
(() => {
  const data = report.data("timeline-data");
  const canvas = document.getElementById("timeline-canvas");
  const tip = document.getElementById("timeline-tip");
  const taskText = document.getElementById("timeline-task");
  const tools = document.getElementById("timeline-tools");

  const CLASSES = [
    ["products, convolutions, attention", ["gemm", "convolution", "attention", "rnn"]],
    ["normalization, softmax, reductions", ["normalization", "layer_norm", "softmax", "reduction", "pooling"]],
    ["element by element, copies of layout, others", []],
    ["optimizer", ["optimizer"]],
    ["communication", ["communication"]],
    ["copies and memsets", ["memcpy", "memset"]],
    ["operators on the CPU", ["cpu_op"]],
    [data.calls, ["runtime"]],
    ["other CPU time", ["gap"]],
    ["data loading", ["data_loading"]],
    ["waits", ["wait"]],
  ];
  // Without kernels their colours are free: operators on the CPU take them by their phase.
  const PHASES = { forward: 0, backward: 1, update: 3 };
  const classOf = (word) => CLASSES.findIndex(([, words]) => words.includes(word));
  const [kernel, operator] = ["kernel", "cpu_op"].map((kind) => data.kinds.indexOf(kind));
  const ofKind = data.kinds.map(classOf);
  const ofFamily = data.families.map((family) => (classOf(family) < 0 ? 2 : classOf(family)));
  const ofPhase = data.phases.map((phase) => PHASES[phase] ?? classOf("cpu_op"));
  const classesOf = (sides) => {
    const onCpu = !sides.some((side) => side.what.some((code) => (code & 15) === kernel));
    const names = CLASSES.map(([name]) => name);
    if (onCpu) Object.entries(PHASES).forEach(([phase, at]) => (names[at] = `${phase}: ${names[classOf("cpu_op")]}`));
    const of = (code) => {
      const kind = code & 15;
      const family = ((code >> 4) & 63) - 1;
      if (kind === kernel) return family < 0 ? 2 : ofFamily[family];
      return onCpu && kind === operator ? ofPhase[(code >> 10) & 7] : ofKind[kind];
    };
    return { names, of, used: new Set(sides.flatMap((side) => [...new Set(side.what)].map(of))) };
  };

  const words = (name) => name.replaceAll("_", " ");
  const sort = (kind, family) => {
    const parts = [data.kinds[kind], family < 0 ? "" : data.families[family]].filter(Boolean).map(words);
    return [...new Set(parts)].join(", ");
  };
  const describe = ({ row, side, at }) => {
    const { kind, family, phase, change, critical } = report.what(side.what[at]);
    const [name, layer] = [data.texts[side.name[at]], data.texts[side.layer[at]]];
    return [
      name || words(data.kinds[kind]),
      `${report.number(side.length[at] / 1e3, 3)} µs from ${report.number(side.start[at] / 1e6, 3)} ms`,
      `${sort(kind, family)} on ${row.thread.name} (${side.title})`,
      phase ? `phase: ${data.phases[phase]}` : "",
      layer ? `layer: ${layer}` : "",
      change ? `${data.changes[change]} by the what-if` : "",
      critical ? "on the critical path" : "",
    ].filter(Boolean);
  };

  const run = async () => {
    const sides = await Promise.all(data.sides.map((side) => report.unpack(side, data.unit_ns)));
    const classes = classesOf(sides);
    const view = new report.TimelineView(canvas, sides, classes);
    report.timeline = view;
    legend(classes);
    buttons(view);
    pointer(view);
    keyboard(view);
    new ResizeObserver(() => view.later()).observe(canvas.parentElement);
    report.themed.push(() => view.draw());
    view.draw();
    canvas.dataset.ready = "yes";
  };

  const legend = ({ names, used }) => {
    const list = document.getElementById("timeline-legend");
    names.forEach((name, at) => {
      if (used.has(at)) list.append(report.element("li", {}, report.element("span", { class: `swatch s${at}` }), name));
    });
  };

  const buttons = (view) => {
    const add = (label, call) => {
      const button = report.element("button", { type: "button" }, label);
      button.addEventListener("click", call);
      tools.append(button);
    };
    add("Zoom in", () => view.zoom(0.5));
    add("Zoom out", () => view.zoom(2));
    add("Left", () => view.show(view.begin_ns - view.span_ns / 2, view.span_ns));
    add("Right", () => view.show(view.begin_ns + view.span_ns / 2, view.span_ns));
    add("Show all", () => view.show(0, view.whole_ns));
    const input = report.element("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    const found = report.element("span", { role: "status", class: "found" });
    tools.append(report.element("label", { class: "search" }, "Find tasks by name or layer ", input), found);
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      const texts = data.texts.map((text, at) => (text.toLowerCase().includes(wanted) ? at : -1)).filter((at) => at >= 0);
      view.marked = wanted ? new Set(texts) : null;
      const hit = (side, at) => view.marked.has(side.name[at]) || view.marked.has(side.layer[at]);
      const count = (side) => side.name.reduce((sum, _, at) => sum + hit(side, at), 0);
      found.textContent = wanted ? view.sides.map((side) => `${count(side)} ${side.title}`).join(", ") : "";
      view.later();
    });
  };

  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  const pointer = (view) => {
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, begin_ns: view.begin_ns, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (held && !held.moved) select(view, view.find(...point(event)));
      held = null;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        const moved = event.clientX - held.x;
        held.moved ||= Math.abs(moved) > 3;
        view.show(held.begin_ns - (moved / view.width) * view.span_ns, view.span_ns);
      }
      hover(view, event);
    });
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => view.zoom(0.25, view.time(point(event)[0])));
    // Without Ctrl the wheel scrolls the page, as everywhere.
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        view.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), view.time(point(event)[0]));
      },
      { passive: false },
    );
  };

  const hover = (view, event) => {
    const [x, y] = point(event);
    const task = view.find(x, y);
    tip.hidden = !task;
    if (!task) return;
    tip.replaceChildren(...describe(task).map((line) => report.element("div", {}, line)));
    const room = canvas.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(0, Math.min(x + 14, room))}px`;
    tip.style.top = `${y + 16}px`;
  };

  const select = (view, task) => {
    view.selected = task;
    taskText.textContent = task ? describe(task).join("; ") : "";
    if (task) {
      const [start, length] = [task.side.start[task.at], task.side.length[task.at]];
      if (start < view.begin_ns || start + length > view.begin_ns + view.span_ns) {
        view.show(start + length / 2 - view.span_ns / 2, view.span_ns);
      }
    }
    view.later();
  };

  const keyboard = (view) => {
    const middle = () => {
      const task = view.selected;
      return task ? task.side.start[task.at] + task.side.length[task.at] / 2 : view.begin_ns + view.span_ns / 2;
    };
    const along = (by) => {
      const task = view.selected;
      if (!task) return select(view, first(view, view.rows[0]));
      const at = task.at + by;
      if (at >= task.row.thread.first && at < task.row.thread.end) select(view, { ...task, at });
    };
    const across = (by) => {
      const place = view.selected ? view.rows.indexOf(view.selected.row) + by : 0;
      if (view.rows[place]) select(view, first(view, view.rows[place], view.selected ? middle() : view.begin_ns));
    };
    const keys = {
      ArrowRight: () => along(1),
      ArrowLeft: () => along(-1),
      ArrowDown: () => across(1),
      ArrowUp: () => across(-1),
      "+": () => view.zoom(0.5, middle()),
      "=": () => view.zoom(0.5, middle()),
      "-": () => view.zoom(2, middle()),
      0: () => view.show(0, view.whole_ns),
      Escape: () => select(view, null),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  };

  const first = (view, row, time_ns = view.begin_ns) => {
    const at = Math.min(view.firstAfter(row, time_ns), row.thread.end - 1);
    return { row, side: row.side, at };
  };

  run().catch((error) => {
    taskText.textContent = `This browser cannot show the timeline (${error.message}); the tables above show the same step.`;
  });
})();
