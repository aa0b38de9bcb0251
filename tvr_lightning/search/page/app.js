"use strict";
const $ = (id) => document.getElementById(id);
const OPTIONS = ["folder", "rerank", "normalize", "top"];
const PAGE = 24;
const GOOD = 0.9;
const PARAMETERS = ["query", "like", "name", ...OPTIONS, "min_relevance", "video", "time"];
/* The current query: an example as {id, name}, and the number of the latest request. */
const state = { example: null, asked: 0, listed: 0, results: [] };

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

async function fetchJson(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch {
    throw new Error("The server does not answer. Is tvr serve running?");
  }
  const content = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  if (!response.ok) throw new Error(content.detail);
  return content;
}

function filters() {
  return new URLSearchParams($("folder").value ? { folder: $("folder").value } : {});
}

function searchAddress() {
  const values = filters();
  const query = $("query").value.trim();
  values.set("top", $("top").value || "12");
  values.set("query", query);
  if (state.example) values.set("like", state.example.id);
  if (query) {
    values.set("rerank", $("rerank").value);
    values.set("normalize", $("normalize").value);
    if ($("good").checked) values.set("min_relevance", $("good").value);
  }
  return `/api/search?${values}`;
}

/* The address of the page holds the query, the options and the open video, under the names of the API. */
function address() {
  const values = new URLSearchParams();
  if ($("query").value.trim()) values.set("query", $("query").value.trim());
  if (state.example) {
    values.set("like", state.example.id);
    values.set("name", state.example.name);
  }
  for (const name of OPTIONS) if ($(name).value && $(name).value !== $(name).initial) values.set(name, $(name).value);
  if ($("good").checked) values.set("min_relevance", $("good").value);
  return values;
}

function remember() {
  const wanted = `/?${address()}`.replace(/\?$/, "");
  if (wanted !== location.pathname + location.search) history.pushState(null, "", wanted);
  document.title = $("query").value.trim() ? `${$("query").value.trim()} – Search videos` : "Search videos";
}

function rememberOpen(video, time = 0) {
  const values = address();
  if (video) {
    values.set("video", video);
    values.set("time", time.toFixed(1));
  }
  history.replaceState(null, "", `/?${values}`.replace(/\?$/, ""));
}

/* Bring the page to what its address says. */
async function restore() {
  const values = new URLSearchParams(location.search);
  if ($("player").open) $("player").close();
  $("query").value = values.get("query") ?? "";
  for (const name of OPTIONS) $(name).value = values.get(name) ?? $(name).initial;
  $("good").checked = values.has("min_relevance");
  $("good").value = values.get("min_relevance") ?? GOOD;
  state.example = values.has("like") ? { id: values.get("like"), name: values.get("name") ?? values.get("like") } : null;
  const video = values.get("video"), time = Number(values.get("time")) || 0;
  drawChip();
  const unknown = [...values.keys()].find((name) => !PARAMETERS.includes(name));
  if (unknown) return refuse(`The address has the unknown parameter ${unknown}. Its parameters are ${PARAMETERS.join(", ")}.`);
  const wrong = OPTIONS.find((name) => values.has(name) && $(name).value !== values.get(name));
  if (wrong) return refuse(`${wrong} is ${values.get(wrong)}, which cannot be selected. Remove it from the address.`);
  await (isAsked() ? ask() : showStart());
  if (video) await openAgain(video, time);
}

function refuse(reason) {
  state.asked++;
  $("answers").replaceChildren();
  $("start").hidden = true;
  say(reason, true);
}

async function openAgain(video, time) {
  let place = state.results.findIndex((result) => result.id === video);
  try {
    if (place < 0) {
      state.results = [plain(await fetchJson(`/api/videos/${video}/about`))];
      place = 0;
    }
    openPlayer(state.results, place, time);
  } catch (error) {
    say(error.message, true);
  }
}

const isAsked = () => $("query").value.trim() !== "" || state.example !== null;

/* A video of the library as a result without moments. */
function plain(video) {
  return { ...video, start: 0, best: [], moments: [], relevance: null };
}

/* Search; an answer that was overtaken by a later query is dropped. */
async function ask() {
  const mine = ++state.asked;
  say("Searching …");
  $("start").hidden = true;
  try {
    const answer = await fetchJson(searchAddress());
    if (mine !== state.asked) return;
    state.results = answer.results;
    const heading = document.createElement("h2"), list = document.createElement("ol");
    heading.textContent = answer.weak ? "Nothing here matches well" : "Best matches";
    list.append(...answer.results.map((result) => drawCard(result, () => answer.results)));
    $("answers").replaceChildren(heading, list);
    say([`${answer.results.length} of ${answer.videos} videos`, ...answer.notes].join("; "));
  } catch (error) {
    if (mine !== state.asked) return;
    $("answers").replaceChildren();
    say(error.message, true);
  }
}

async function showStart() {
  state.asked++;
  state.listed = 0;
  $("answers").replaceChildren();
  $("library").replaceChildren();
  $("start").hidden = false;
  say("");
  await showMore();
}

async function showMore() {
  const mine = state.asked;
  const values = filters();
  values.set("top", String(PAGE));
  values.set("after", String(state.listed));
  try {
    const found = await fetchJson(`/api/videos?${values}`);
    if (mine !== state.asked) return;
    const videos = found.videos.map(plain);
    state.results = state.listed ? [...state.results, ...videos] : videos;
    $("library").append(...videos.map((video) => drawCard(video, () => state.results)));
    state.listed += videos.length;
    $("more").hidden = state.listed >= found.count;
    $("begin").textContent = `Library: ${found.count} videos`;
  } catch (error) {
    say(error.message, true);
  }
}

function drawChip() {
  $("chip").hidden = !state.example;
  if (!state.example) return;
  $("like").textContent = $("like").title = `like ${state.example.name}`;
  $("forget").setAttribute("aria-label", `Forget ${state.example.name}`);
}

function submit() {
  remember();
  return isAsked() ? ask() : showStart();
}

/* Search with a video of the index as the example, without text. */
function askLike(result) {
  state.example = { id: result.id, name: result.path };
  $("query").value = "";
  drawChip();
  submit();
}

/* The file is read before it is sent, so that the request does not depend on it. */
async function askFile(files) {
  if (files.length > 1) return say("Use one image or clip at a time.", true);
  const mine = ++state.asked, file = files[0];
  say("Sending …");
  try {
    const body = await file.arrayBuffer().catch(() => { throw new Error(`${file.name}: this browser cannot read the file`); });
    const kind = file.type.startsWith("image/") ? "image" : "clip";
    const values = new URLSearchParams({ kind, name: (file.name || kind).slice(0, 200) });
    const headers = { "Content-Type": file.type || "video/mp4" };
    const kept = await fetchJson(`/api/examples?${values}`, { method: "POST", body, headers });
    if (mine !== state.asked) return;
    state.example = kept;
    drawChip();
    submit();
  } catch (error) {
    if (mine === state.asked) say(error.message, true);
  }
}

function drawCard(result, list) {
  const item = $("card").content.cloneNode(true).firstElementChild;
  const find = (selector) => item.querySelector(selector);
  const play = (time) => openPlayer(list(), list().indexOf(result), time);
  const image = find("img");
  item.dataset.id = result.id;
  image.src = `/api/videos/${result.id}/image?time=${result.start}`;
  if (result.width) image.style.aspectRatio = `${result.width} / ${result.height}`;
  find("h3").textContent = result.rank ? `${result.rank}. ${result.path}` : result.path;
  const time = result.rank ? `${clock(result.start)} of ${clock(result.duration)}` : clock(result.duration);
  find(".time").textContent = time;
  find(".play").setAttribute("aria-label", `${time}: play ${result.path}`);
  const facts = [];
  if (result.relevance !== null) facts.push(result.relevance >= GOOD ? "good match" : "weak match");
  find(".facts").textContent = facts.join(" · ");
  if (result.rank) find(".facts").title = `score ${result.score.toFixed(3)}` + (result.relevance === null ? "" : `, better than ${Math.floor(100 * result.relevance)} % of unrelated queries`);
  find(".facts").hidden = !facts.length;
  find(".said").textContent = [...new Set(result.captions)].slice(0, 2).join(" · ");
  find(".said").hidden = !result.captions.length;
  find(".play").addEventListener("click", () => play(begin(result)));
  find(".similar").setAttribute("aria-label", `More like this: ${result.path}`);
  find(".similar").addEventListener("click", () => askLike(result));
  find(".chart").hidden = !result.moments.length;
  find(".duration").textContent = clock(result.duration);
  drawBars(find(".strip"), result);
  drawMoments(find(".moments"), result, play);
  return item;
}

document.addEventListener("keydown", (event) => {
  if ($("player").open) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("query").focus();
    $("query").select();
  } else if (event.key.startsWith("Arrow") && !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey)) {
    const inQuery = event.target === $("query");
    if (typing && !(inQuery && event.key === "ArrowDown")) return;
    const next = neighbor(event.key);
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }
});

/* Where an arrow leads: left and right in the order of the list, up and down in the column, up from the top to the query. */
function neighbor(key) {
  const items = [...document.querySelectorAll("#answers li, #start:not([hidden]) li")];
  const target = (item) => item?.querySelector(".play");
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
  submit();
});
$("form").addEventListener("change", (event) => {
  if (event.target.closest(".options") && event.target !== $("example")) submit();
});
$("example").addEventListener("change", () => {
  const files = [...$("example").files];
  if (files.length) askFile(files);
  $("example").value = "";
});
$("forget").addEventListener("click", () => {
  state.example = null;
  drawChip();
  $("query").focus();
  submit();
});
$("home").addEventListener("click", (event) => {
  event.preventDefault();
  history.pushState(null, "", "/");
  restore();
});
$("more").addEventListener("click", showMore);
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  if (files.length) askFile(files);
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  askFile(files);
});
window.addEventListener("popstate", restore);
setUpPlayer($("player"), askLike);
document.querySelector("details").open = matchMedia("(min-width: 46rem)").matches;

function option(value, text = value) {
  return new Option(text, value);
}

function drawOptions(index) {
  $("state").textContent = `${index.videos} videos` + (index.skipped ? `, ${index.skipped} could not be read` : "");
  $("rerank").append(...index.scorers.map((name) => option(name)), option("none", "vectors only"));
  $("normalize").append(...index.normalize.map((name) => option(name)));
  $("folder").append(...index.folders.map((each) => option(each.folder, `${each.folder === "." ? "(top)" : each.folder} (${each.count})`)));
}

fetchJson("/api/index").then((index) => {
  drawOptions(index);
  for (const name of OPTIONS) $(name).initial = $(name).value;
  return restore();
}).catch((error) => say(error.message, true));
