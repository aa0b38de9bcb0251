"use strict";

// Leaderboards: a heading sorts by its column, the other way if it is selected again.
document.querySelectorAll(".sorted").forEach((table) => {
  const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells], [body] = table.tBodies;
  headings.forEach((heading, place) => heading.firstElementChild.addEventListener("click", () => {
    const keyed = [...body.rows].map((row) => {
      const text = row.cells[place].textContent.trim(), number = Number.parseFloat(text);
      return { row, text, number };
    });
    const words = !keyed.some(({ number }) => !Number.isNaN(number));
    const [first, second] = words ? ["ascending", "descending"] : ["descending", "ascending"];
    const order = heading.ariaSort === first ? second : first, sign = order === "ascending" ? 1 : -1;
    // Rows without a number stay at the bottom in both orders.
    keyed.sort((a, b) => words ? sign * a.text.localeCompare(b.text)
      : Number.isNaN(a.number) - Number.isNaN(b.number) || sign * (a.number - b.number) || 0);
    headings.forEach((each) => { each.ariaSort = each === heading ? order : "none"; });
    body.append(...keyed.map(({ row }) => row));
  }));
});
