"use strict";
/* The large player: one video with sound, its moments, and the way to its neighbors in the list it came from. */
const player = { list: [], place: -1, video: null, returnTo: null };

/* 2:03.4, or 1:02:03.4 from an hour on. */
function clock(seconds) {
  const tenths = Math.round(seconds * 10);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  const minutes = Math.floor(tenths / 600), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/* One bar per moment, at its time, as high as its similarity between the least and the greatest. */
function drawBars(strip, result) {
  const values = result.moments.map((moment) => moment.similarity);
  const least = Math.min(...values), span = Math.max(...values) - least || 1;
  const duration = result.duration || 1;
  const width = Math.min(12, 80 / Math.max(result.moments.length, 1));
  strip.replaceChildren();
  for (const moment of result.moments) {
    const bar = document.createElement("i");
    bar.style.left = `${Math.min(100 - width, (100 * moment.time) / duration)}%`;
    bar.style.width = `${width}%`;
    bar.style.height = `${10 + (90 * (moment.similarity - least)) / span}%`;
    bar.classList.toggle("best", result.best.some((best) => best.time === moment.time));
    bar.title = `${clock(moment.time)}: similarity ${moment.similarity.toFixed(3)}`;
    strip.append(bar);
  }
}

/* Where a result starts to play: shortly before its best moment, with at least ten seconds to see. */
function begin(result) {
  return Math.max(0, Math.min(result.start - 2, result.duration - 10));
}

function seek(time) {
  const video = player.video;
  if (!video) return;
  if (video.readyState > 0) video.currentTime = time;
  else video.wanted = time;
  showTime(time);
}

function showTime(time) {
  const strip = document.getElementById("strip");
  strip.setAttribute("aria-valuenow", String(Math.round(time)));
  strip.setAttribute("aria-valuetext", clock(time));
}

/* Open one of a list of results at a time; the list is where next and previous lead. */
function openPlayer(list, place, time) {
  const dialog = document.getElementById("player"), result = list[place];
  closeVideo();
  if (!dialog.open) {
    player.returnTo = document.activeElement;
    dialog.showModal();
  }
  Object.assign(player, { list, place });
  const video = document.createElement("video");
  Object.assign(video, { controls: true, playsInline: true, wanted: time });
  video.setAttribute("aria-label", result.path);
  video.poster = `/api/videos/${result.id}/image?time=${time}`;
  video.addEventListener("loadedmetadata", () => { video.currentTime = video.wanted; }, { once: true });
  video.addEventListener("timeupdate", () => showTime(video.currentTime));
  video.addEventListener("error", () => sayCopied("This browser cannot play the file."));
  video.src = `/api/videos/${result.id}/file`;
  document.getElementById("stage").replaceChildren(video);
  player.video = video;
  document.getElementById("playing").textContent = result.path;
  const strip = document.getElementById("strip");
  strip.setAttribute("aria-valuemax", String(Math.ceil(result.duration)));
  strip.hidden = strip.nextElementSibling.hidden = !result.moments.length;
  document.getElementById("duration").textContent = clock(result.duration);
  drawBars(strip, result);
  showTime(time);
  drawMoments(document.getElementById("moments"), result, seek);
  const said = document.getElementById("said");
  said.textContent = [...new Set(result.captions)].join(" · ");
  said.hidden = !result.captions.length;
  document.getElementById("previous").disabled = place === 0;
  document.getElementById("next").disabled = place === list.length - 1;
  sayCopied("");
  video.play().catch(() => {});
  video.focus();
  rememberOpen(result.id, time);
}

function drawMoments(place, result, go) {
  place.replaceChildren(...result.best.map((moment) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = clock(moment.time);
    button.setAttribute("aria-label", `Play ${result.path} at ${clock(moment.time)}`);
    button.addEventListener("click", () => go(moment.time));
    return button;
  }));
}

function closeVideo() {
  player.video?.pause();
  player.video?.removeAttribute("src");
  player.video?.load();
  player.video?.remove();
  player.video = null;
}

function step(by) {
  const place = player.place + by;
  const result = player.list[place];
  if (result) openPlayer(player.list, place, begin(result));
}

function sayCopied(text) {
  document.getElementById("copied").textContent = text;
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    sayCopied(`Copied the ${what}.`);
  } catch {
    sayCopied(`${text}`);
  }
}

function setUpPlayer(dialog, ask) {
  const on = (id, work) => document.getElementById(id).addEventListener("click", work);
  const result = () => player.list[player.place];
  on("close", () => dialog.close());
  on("previous", () => step(-1));
  on("next", () => step(1));
  on("full", () => (document.fullscreenElement ? document.exitFullscreen() : player.video?.requestFullscreen()));
  on("similar", () => { const it = result(); dialog.close(); ask(it); });
  on("copy-path", () => copy(result().path, "path"));
  on("copy-time", () => copy(clock(player.video.currentTime), "time"));
  on("copy-link", () => { rememberOpen(result().id, player.video.currentTime); copy(location.href, "link"); });
  dialog.addEventListener("close", () => {
    closeVideo();
    rememberOpen(null);
    player.returnTo?.focus();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const key = event.key.toLowerCase();
    if (key === "n") step(1);
    else if (key === "p") step(-1);
    else if (key === "f") document.getElementById("full").click();
  });
  const strip = document.getElementById("strip");
  strip.addEventListener("click", (event) => {
    const box = strip.getBoundingClientRect();
    seek(Math.max(0, ((event.clientX - box.left) / box.width) * result().duration));
  });
  /* Arrows lead from moment to moment. */
  strip.addEventListener("keydown", (event) => {
    const times = result().moments.map((moment) => moment.time), now = player.video.currentTime;
    const later = times.find((time) => time > now + 0.3), earlier = times.filter((time) => time < now - 0.3).pop();
    const wanted = { ArrowRight: later, ArrowUp: later, ArrowLeft: earlier, ArrowDown: earlier, Home: times[0], End: times.at(-1) }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    seek(wanted);
  });
}
