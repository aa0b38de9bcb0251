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

// Queries: what the worse of two runs fails on and the better one does not, the largest difference first.
const FEW = 6;
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
document.querySelectorAll(".contest").forEach((section) => {
  const contest = JSON.parse(section.querySelector("script").textContent);
  const form = section.querySelector("form"), { first, second, swap } = form.elements;
  const clip = (video, words, own) => element("figure", { className: own ? "own" : "" },
    ...(contest.videos[video] ? [element("img",
      { src: contest.videos[video], alt: `Frames of ${video}, ${own ? "the right video" : "a wrong video"}` })] : []),
    element("figcaption", {}, `${words} ${video}`));
  const compared = (better, worse) => {
    const found = Object.entries(contest.failures[worse])
      .map(([query, wrong]) => ({ ...contest.shown[query], wrong }))
      .filter(({ ranks }) => ranks && ranks[better] < ranks[worse])
      .sort((a, b) => Math.log(b.ranks[worse] / b.ranks[better]) - Math.log(a.ranks[worse] / a.ranks[better]));
    const [ahead, behind] = [better, worse].map((run) => contest.runs[run]);
    const items = found.map(({ caption, right, wrong, ranks }, place) => element("li", { hidden: place >= FEW, tabIndex: -1 },
      element("p", {}, element("strong", {}, `“${caption}”`)),
      element("p", { className: "muted" }, `Right video ranked ${ranks[better]} by ${ahead}, ${ranks[worse]} by ${behind}`),
      element("div", { className: "panels" }, clip(right, "right:", true), clip(wrong, `${behind} found`, false))));
    const more = element("button", { type: "button", hidden: items.length <= FEW }, `Show ${items.length - FEW} more`);
    more.addEventListener("click", () => {
      items.forEach((item) => { item.hidden = false; });
      more.hidden = true;
      items[FEW].focus(); // the reader continues after the ones already shown
    });
    const higher = contest.better[better][worse];
    const told = items.length ? (items.length < higher ? `; ${items.length} of them:` : ":") : "; none of those that were drawn.";
    return element("div", {},
      element("h3", {}, `${ahead} against ${behind}`),
      element("p", { className: "muted" },
        `It ranks the right video higher on ${higher} of ${contest.queries} queries${told}`),
      element("ol", {}, ...items), more);
  };
  const show = () => {
    const [one, other] = [first, second].map(({ value }) => Number(value));
    section.querySelector(".queries").replaceChildren(...(one === other
      ? [element("p", {}, "Choose two different runs.")] : [compared(one, other), compared(other, one)]));
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", show);
  swap.addEventListener("click", () => { [first.value, second.value] = [second.value, first.value]; show(); });
  form.hidden = false;
  show();
});
