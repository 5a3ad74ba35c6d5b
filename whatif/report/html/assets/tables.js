// Tables are sorted by their headers, searched by the words of their rows, and begin with the rows that matter most.
(() => {
  // Rows that are shown have to be laid out at every sort: a table of hundreds would not be sorted at once.
  const FIRST = 12;

  const start = (place) => {
    const table = place.querySelector("table");
    const state = { rows: [...table.tBodies[0].rows], wanted: null, all: false, more: null };
    sortable(table, state);
    if (place.hasAttribute("data-search")) searchable(place, table, state);
    if (state.rows.length > FIRST) shortened(place, table, state);
    show(state);
  };

  // Hide the rows that are not looked for, and those behind the first ones unless all are asked for.
  const show = (state) => {
    let matching = 0;
    for (const row of state.rows) {
      const is = !state.wanted || state.wanted.has(row);
      const hidden = !is || (!state.all && matching >= FIRST);
      matching += is;
      if (row.hidden !== hidden) row.hidden = hidden;
    }
    if (state.more) state.more(matching);
    return matching;
  };

  const sortable = (table, state) => {
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      if (!header.dataset.sort) return;
      const label = header.firstChild; // behind it may stand how the numbers were made
      const button = report.element("button", { type: "button", class: "sort" });
      header.insertBefore(button, label);
      button.append(label);
      header.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const numbers = header.dataset.sort === "number";
        const now = header.getAttribute("aria-sort");
        // Large numbers are what people look for first.
        const descending = now === "none" ? numbers : now === "ascending";
        for (const other of headers) if (other.dataset.sort) other.setAttribute("aria-sort", "none");
        header.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(state, column, numbers, descending);
        show(state);
        table.tBodies[0].append(...state.rows);
      });
    });
  };

  const sort = (state, column, numbers, descending) => {
    const keyed = state.rows.map((row) => [key(row.cells[column], numbers), row]);
    const sign = descending ? -1 : 1;
    keyed.sort(([a], [b]) => {
      if (!numbers) return sign * words.compare(a, b);
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // unknown ones come last
      return sign * (a - b);
    });
    state.rows = keyed.map(([, row]) => row);
  };
  const words = new Intl.Collator();

  const key = (cell, numbers) => {
    if (!numbers) return cell.textContent.toLowerCase();
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return Number.parseFloat(cell.textContent.replaceAll(",", "").replace("−", "-"));
  };

  const searchable = (place, table, state) => {
    const texts = state.rows.map((row) => [row, row.textContent.toLowerCase()]);
    const input = report.element("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    const found = report.element("span", { role: "status", class: "found" });
    const caption = table.caption.querySelector("span").textContent;
    const label = report.element("label", { class: "search" }, `Search ${caption} `, input);
    place.prepend(report.element("div", { class: "tools" }, label, found));
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matching = texts.filter(([, text]) => wanted.every((word) => text.includes(word))).map(([row]) => row);
      state.wanted = wanted.length ? new Set(matching) : null;
      show(state);
      found.textContent = wanted.length ? `${matching.length} of ${texts.length} rows` : "";
    });
  };

  // Prints the number of hidden rows too, because paper has no button.
  const shortened = (place, table, state) => {
    const rowsShown = report.element("span", {});
    const button = report.element("button", { type: "button" });
    const line = report.element("p", { class: "note more" }, rowsShown, " ", button);
    table.parentElement.after(line);
    button.addEventListener("click", () => {
      state.all = !state.all;
      table.parentElement.classList.toggle("all", state.all);
      show(state);
    });
    state.more = (matching) => {
      line.hidden = matching <= FIRST;
      rowsShown.textContent = state.all ? `All ${matching} rows are shown.` : `The first ${FIRST} of ${matching} rows are shown.`;
      button.textContent = state.all ? `Show the first ${FIRST}` : `Show all ${matching}`;
    };
  };

  for (const place of document.querySelectorAll("div.table")) start(place);
})();
