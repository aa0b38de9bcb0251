"use strict";
const $ = (id) => document.getElementById(id);
const state = { last: null, asked: 0 };

/* 2:03.4, or 1:02:03.4 from an hour on. */
function clock(seconds) {
  const tenths = Math.round(seconds * 10);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  const minutes = Math.floor(tenths / 600), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

async function fetchJson(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch {
    throw new Error("the server does not answer; is tvr serve running?");
  }
  const content = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  if (!response.ok) throw new Error(content.detail);
  return content;
}

function filters() {
  const values = new URLSearchParams({ top: $("top").value || "12" });
  for (const name of ["shortest", "longest", "path", "caption"]) if ($(name).value) values.set(name, $(name).value);
  return values;
}

function textAddress(query, rerank) {
  const values = filters();
  values.set("query", query);
  if (rerank) values.set("rerank", rerank);
  values.set("normalize", $("normalize").value || "none");
  return `/api/search?${values}`;
}

/* Ask for one answer, or two to show side by side; an answer that was overtaken by a later question is dropped. */
async function ask(requests) {
  const mine = ++state.asked;
  say("Searching …");
  try {
    const answers = await Promise.all(requests.map((request) => fetchJson(...request)));
    if (mine !== state.asked) return;
    $("answers").replaceChildren(...answers.map(drawAnswer));
    const notes = answers.flatMap((answer) => answer.notes);
    const count = answers[0].results.length;
    say([`${count} of ${answers[0].videos} videos`, ...new Set(notes)].join("; "));
  } catch (error) {
    if (mine !== state.asked) return;
    $("answers").replaceChildren();
    say(error.message, true);
  }
}

/* The box shows what was asked: words, or a chip that names the example and no words. */
function showLike(name) {
  $("chip").hidden = name === null;
  $("like").textContent = name === null ? "" : `like ${name}`;
  $("like").title = $("like").textContent;
  $("forget").setAttribute("aria-label", name === null ? "" : `Forget ${name}`);
  if (name !== null) $("query").value = "";
}

function askText() {
  showLike(null);
  const query = $("query").value;
  const scorers = [$("rerank").value];
  if ($("beside").value) scorers.push($("beside").value);
  state.last = askText;
  ask(scorers.map((name) => [textAddress(query, name)]));
}

function askLike(name, again) {
  showLike(name);
  state.last = again;
  again();
}

/* Read before it is sent: the request then no longer hangs on the chosen file, which the page lets go of. */
function askClip(file) {
  const content = file.arrayBuffer();
  const headers = { "Content-Type": file.type || "video/mp4" };
  askLike(file.name, async () => {
    const mine = ++state.asked;
    try {
      const body = await content;
      if (mine === state.asked) ask([[`/api/search/video?${filters()}`, { method: "POST", body, headers }]]);
    } catch {
      if (mine === state.asked) say(`${file.name}: this browser cannot read the file`, true);
    }
  });
}

function askSimilar(result) {
  askLike(result.path, () => ask([[`/api/videos/${result.id}/similar?${filters()}`]]));
}

function forget() {
  state.asked++;
  state.last = null;
  showLike(null);
  $("answers").replaceChildren();
  say("");
  $("query").focus();
}

function drawAnswer(answer) {
  const section = document.createElement("section");
  const heading = document.createElement("h2");
  heading.textContent = answer.rerank === "none" ? "By the vectors alone" : `By ${answer.rerank}`;
  const list = document.createElement("ol");
  list.append(...answer.results.map(drawResult));
  section.append(heading, list);
  return section;
}

function drawResult(result) {
  const item = $("result").content.cloneNode(true).firstElementChild;
  const find = (selector) => item.querySelector(selector);
  const best = result.best[0];
  item.dataset.id = result.id;
  find("img").src = `/api/videos/${result.id}/picture?time=${best.time}`;
  find("h3").textContent = `${result.rank}. ${result.path}`;
  find(".play").setAttribute("aria-label", `Play ${result.path} at ${clock(best.time)}`);
  find(".time").textContent = clock(best.time);
  const facts = [`score ${result.score.toFixed(3)}`, `candidate ${result.first_rank}`, clock(result.duration)];
  if (result.sound !== null) facts.push(`sound ${result.sound >= 0 ? "+" : ""}${result.sound.toFixed(3)}`);
  if (result.bias !== null) facts.push(`bias ${result.bias >= 0 ? "+" : ""}${result.bias.toFixed(3)}`);
  find(".facts").textContent = facts.join(" · ");
  find(".said").textContent = [...new Set(result.captions)].join(" · ");
  find(".said").hidden = !result.captions.length;
  find(".play").addEventListener("click", () => play(item, result, best.time));
  find(".similar").setAttribute("aria-label", `More like ${result.path}`);
  find(".similar").addEventListener("click", () => askSimilar(result));
  drawStrip(find(".strip"), result, (time) => play(item, result, time));
  for (const moment of result.best) {
    const button = document.createElement("button");
    button.textContent = clock(moment.time);
    button.setAttribute("aria-label", `Play ${result.path} at ${clock(moment.time)}, similarity ${moment.similarity.toFixed(3)}`);
    button.addEventListener("click", () => play(item, result, moment.time));
    find(".moments").append(button);
  }
  return item;
}

/* One bar per indexed frame, at its time, as high as its similarity between the least and the greatest. */
function drawStrip(strip, result, seek) {
  const values = result.moments.map((moment) => moment.similarity);
  const least = Math.min(...values), span = Math.max(...values) - least || 1;
  const duration = result.duration || 1;
  const width = Math.min(12, 80 / result.moments.length);
  for (const moment of result.moments) {
    const bar = document.createElement("i");
    bar.style.left = `${Math.min(100 - width, (100 * moment.time) / duration)}%`;
    bar.style.width = `${width}%`;
    bar.style.height = `${10 + (90 * (moment.similarity - least)) / span}%`;
    bar.classList.toggle("best", result.best.some((best) => best.time === moment.time));
    bar.title = `${clock(moment.time)}: ${moment.similarity.toFixed(3)}`;
    strip.append(bar);
  }
  strip.setAttribute("aria-label", `Similarity over time, highest at ${clock(result.best[0].time)}`);
  strip.addEventListener("click", (event) => {
    const box = strip.getBoundingClientRect();
    seek(Math.max(0, ((event.clientX - box.left) / box.width) * duration));
  });
}

function stop() {
  for (const video of document.querySelectorAll(".screen video")) {
    video.pause();
    const still = video.still;
    video.replaceWith(still);
  }
}

function play(item, result, time) {
  const screen = item.querySelector(".screen");
  let video = screen.querySelector("video");
  if (!video) {
    stop();
    video = document.createElement("video");
    video.controls = true;
    video.playsInline = true;
    video.muted = true;
    video.still = screen.querySelector(".play");
    video.setAttribute("aria-label", result.path);
    video.addEventListener("loadedmetadata", () => { video.currentTime = video.wanted; }, { once: true });
    video.addEventListener("error", () => { stop(); say(`${result.path}: this browser cannot play the file`, true); });
    video.wanted = time;
    video.src = `/api/videos/${result.id}/file`;
    video.still.replaceWith(video);
  } else if (video.readyState > 0) video.currentTime = time;
  else video.wanted = time;
  video.focus();
  video.play().catch(() => {});
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea, video");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("query").focus();
    $("query").select();
  } else if (event.key === "Escape") {
    const item = document.activeElement.closest("li");
    stop();
    item?.querySelector(".play")?.focus();
  } else if (event.key.startsWith("Arrow") && !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey)) {
    const inQuery = event.target === $("query");
    if (typing && !(inQuery && event.key === "ArrowDown")) return;
    const next = neighbour(event.key);
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }
});

/* Where an arrow leads: left and right in the order of the ranks, up and down in the column, up from the top to the query. */
function neighbour(key) {
  const items = [...document.querySelectorAll("#answers li")];
  const target = (item) => item?.querySelector(".play, video");
  const here = items.findIndex((item) => item.contains(document.activeElement));
  if (here < 0) return key === "ArrowUp" ? null : target(items[0]);
  if (key === "ArrowRight" || key === "ArrowLeft") return target(items[here + (key === "ArrowRight" ? 1 : -1)]);
  const from = items[here].getBoundingClientRect();
  const down = key === "ArrowDown";
  const beyond = [...items[here].parentElement.children]
    .map((item) => ({ item, box: item.getBoundingClientRect() }))
    .filter(({ box }) => (down ? box.top >= from.bottom : box.bottom <= from.top));
  const far = ({ box }) => Math.abs(box.top - from.top) + Math.abs(box.left - from.left) / 1e4;
  beyond.sort((one, other) => far(one) - far(other));
  return beyond.length ? target(beyond[0].item) : down ? null : $("query");
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!$("chip").hidden && $("query").value === "") state.last();
  else askText();
});
$("forget").addEventListener("click", forget);
$("form").addEventListener("change", (event) => {
  if (event.target.closest(".options") && state.last) state.last();
});
$("example").addEventListener("change", () => {
  const file = $("example").files[0];
  if (file) askClip(file);
  $("example").value = "";
});

fetchJson("/api/index").then((index) => {
  $("state").textContent = `${index.videos} videos` + (index.skipped ? `, ${index.skipped} could not be read` : "");
  const option = (value, text = value) => new Option(text, value);
  const named = [...index.scorers.map((name) => option(name)), option("none", "vectors alone")];
  $("rerank").append(...named.map((each) => each.cloneNode(true)));
  $("beside").append(...named);
  $("captioned").hidden = !index.captioned;
  $("normalize").append(...index.normalize.map((name) => option(name)));
}).catch((error) => say(error.message, true));
