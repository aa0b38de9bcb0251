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
    filters.querySelector("output").textContent = `${shown} of ${lines.length} rows`;
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

// Curves of several runs over one axis: a box shows or hides a run's.
document.addEventListener("change", ({ target }) => {
  if (!target.dataset.curve) return;
  target.closest(".overlaid").querySelectorAll(`.${target.dataset.curve}`).forEach((curve) => {
    curve.style.display = target.checked ? "" : "none";
  });
});

// Any figure in the whole window; Escape closes it, and the focus returns to where it was.
const dialog = document.querySelector("dialog");
const enlarge = (figure) => {
  const copy = figure.cloneNode(true);
  copy.querySelector(".enlarge").remove();
  copy.removeAttribute("tabindex");
  dialog.lastElementChild.replaceChildren(copy);
  dialog.showModal();
};
document.querySelectorAll(".enlarge").forEach((button) => {
  const figure = button.closest(".chart");
  button.hidden = false;
  button.addEventListener("click", () => enlarge(figure));
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure || event.key !== "Enter") return;
    event.preventDefault(); // else the same press reaches the button that closes it again
    enlarge(figure);
  });
});
dialog.querySelector("button").addEventListener("click", () => dialog.close());

// The query browser: what the loser of two runs fails on and the winner does not, the widest gap first.
const FEW = 6;
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
document.querySelectorAll(".contest").forEach((section) => {
  const contest = JSON.parse(section.querySelector("script").textContent);
  const form = section.querySelector("form"), { first, second, swap } = form.elements;
  const clip = (video, words, own) => {
    const source = contest.pictures[video], alt = `Frames of ${video}, ${own ? "the right video" : "a wrong video"}`;
    return element("figure", { className: own ? "clip own" : "clip other" },
      ...(source ? [element("img", { className: "strip", src: source, alt })] : []),
      element("figcaption", {}, `${words} ${video}`));
  };
  const beaten = (winner, loser) => {
    const found = Object.entries(contest.failures[loser])
      .map(([query, wrong]) => ({ ...contest.shown[query], wrong }))
      .filter(({ ranks }) => ranks[winner] < ranks[loser])
      .sort((a, b) => Math.log(b.ranks[loser] / b.ranks[winner]) - Math.log(a.ranks[loser] / a.ranks[winner]));
    const [ahead, behind] = [winner, loser].map((run) => contest.runs[run].words);
    const items = found.map(({ caption, right, wrong, ranks }, place) => element("li", { hidden: place >= FEW, tabIndex: -1 },
      element("p", {}, element("strong", {}, `“${caption}”`)),
      element("p", { className: "muted" }, `Right video ranked ${ranks[winner]} by ${ahead}, ${ranks[loser]} by ${behind}`),
      element("div", { className: "clips" }, clip(right, "right:", true), clip(wrong, `${behind} found`, false))));
    const more = element("button", { type: "button", hidden: items.length <= FEW }, `Show ${items.length - FEW} more`);
    more.addEventListener("click", () => {
      items.forEach((item) => { item.hidden = false; });
      more.hidden = true;
      items[FEW].focus(); // the reader continues after the ones already shown
    });
    const higher = contest.better[winner][loser];
    const told = items.length ? (items.length < higher ? `; ${items.length} of them:` : ":") : "; none of those that were drawn.";
    return element("div", {},
      element("h4", {}, `${ahead} beats ${behind}`),
      element("p", { className: "muted" },
        `It ranks the right video higher on ${higher} of ${contest.queries} queries${told}`),
      element("ol", {}, ...items), more);
  };
  const show = () => {
    const [one, other] = [first, second].map(({ value }) => Number(value));
    section.querySelector(".queries").replaceChildren(...(one === other
      ? [element("p", {}, "Choose two different runs.")] : [beaten(one, other), beaten(other, one)]));
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", show);
  swap.addEventListener("click", () => { [first.value, second.value] = [second.value, first.value]; show(); });
  form.hidden = false;
  show();
});
