"use strict";

// The leaderboard: lines are hidden by the filters, and ordered by the heading that was pressed.
const filters = document.getElementById("filters");
if (filters) {
  const body = filters.parentElement.querySelector("tbody");
  const lines = [...body.rows];
  const show = () => {
    const { measured, dataset, backbone } = filters.elements;
    let shown = 0;
    for (const line of lines) {
      const wanted = (!measured.checked || line.classList.contains("ours"))
        && [dataset, backbone].every(({ name, value }) => !value || line.dataset[name] === value);
      line.hidden = !wanted;
      shown += wanted;
    }
    filters.querySelector("output").textContent = `${shown} of ${lines.length} lines`;
  };
  const order = (heading) => {
    const headings = [...heading.parentElement.children], place = headings.indexOf(heading);
    const words = heading.classList.contains("name");
    const first = words ? "ascending" : "descending", second = words ? "descending" : "ascending";
    const direction = heading.ariaSort === first ? second : first, sign = direction === "ascending" ? 1 : -1;
    headings.forEach((each) => { each.ariaSort = each === heading ? direction : "none"; });
    const keyed = lines.map((line) => {
      const text = line.cells[place].textContent.trim();
      return [words ? text.toLowerCase() : Number.parseFloat(text), line];
    });
    // What has no number stays below, whichever way the others run.
    keyed.sort(([a], [b]) => words ? sign * a.localeCompare(b) : Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0);
    body.append(...keyed.map(([, line]) => line));
  };
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("change", show);
  filters.parentElement.querySelectorAll("th[aria-sort]").forEach((heading) => {
    heading.querySelector("button").addEventListener("click", () => order(heading));
  });
  filters.hidden = false;
  show();
}
