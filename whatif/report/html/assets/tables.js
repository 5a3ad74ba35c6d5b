// Tables are sorted by their headers and searched by the words of their rows.
(() => {
  const sortable = (table) => {
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
        sort(table, column, numbers, descending);
      });
    });
  };

  const sort = (table, column, numbers, descending) => {
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [key(row.cells[column], numbers), row]);
    const sign = descending ? -1 : 1;
    keyed.sort(([a], [b]) => {
      if (!numbers) return sign * a.localeCompare(b);
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // unknown ones come last
      return sign * (a - b);
    });
    body.append(...keyed.map(([, row]) => row));
  };

  const key = (cell, numbers) => {
    if (!numbers) return cell.textContent.toLowerCase();
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return Number.parseFloat(cell.textContent.replaceAll(",", "").replace("−", "-"));
  };

  const searchable = (place) => {
    const table = place.querySelector("table");
    const rows = [...table.tBodies[0].rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const input = report.element("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    const found = report.element("span", { role: "status", class: "found" });
    const caption = table.caption.querySelector("span").textContent;
    const label = report.element("label", { class: "search" }, `Search ${caption} `, input);
    place.prepend(report.element("div", { class: "tools" }, label, found));
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, at) => {
        const is = words.every((word) => texts[at].includes(word));
        if (row.hidden === is) row.hidden = !is;
        shown += is;
      });
      found.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    });
  };

  for (const place of document.querySelectorAll("div.table")) {
    sortable(place.querySelector("table"));
    if (place.hasAttribute("data-search")) searchable(place);
  }
})();
