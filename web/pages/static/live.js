// Keeps the page's live part up to date: one request at a time, at the pace that the server asks for, only while the page
// is seen. `data-live` marks the part; the rows of a `data-rows` list change in place, and new ones wait behind a button.

import { nodesOf, patch, patchChildren } from "./patch.js";
import { showTimes, noteServerTime } from "./times.js";

const FAILED_AT_FIRST_S = 2;
const FAILED_AT_MOST_S = 60;

let tag = null;
let timer = null;
let asking = false;
let paused = false;
let failures = 0;
let waiting = null; // the newest HTML, while rows of it wait behind the button

const part = () => document.querySelector("[data-live]");

export function startLive() {
  const button = document.getElementById("live-pause");
  if (!part() || !button) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.toggleAttribute("data-paused", paused);
    for (const name of ["aria-label", "title"]) button.setAttribute(name, paused ? "Resume updates" : "Pause updates");
    if (paused) {
      clearTimeout(timer);
      say("paused", "Paused");
    } else {
      ask();
    }
  });
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden && !paused) ask();
  });
  say("live", "Live");
  comeAgain(1);
}

function comeAgain(seconds) {
  clearTimeout(timer);
  if (!paused && !document.hidden) timer = setTimeout(ask, seconds * 1000);
}

async function ask() {
  if (asking || paused || document.hidden) return;
  asking = true;
  const live = part();
  const address = new URL(location.href);
  address.hash = "";
  address.searchParams.set("part", live.dataset.part);
  try {
    const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, signal: AbortSignal.timeout(20000) });
    noteServerTime(answer.headers.get("Date"));
    showNumbers(answer.headers.get("Menu-Numbers"));
    if (answer.status === 401) return location.reload();
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      const html = await answer.text();
      if (!paused) take(live, html);
    } else if (answer.status !== 304) {
      throw new Error(String(answer.status));
    }
    failures = 0;
    const seconds = Number(answer.headers.get("Refresh-In"));
    if (paused) return;
    if (seconds) {
      say("live", "Live");
      comeAgain(seconds);
    } else {
      say("done", "Ended");
    }
  } catch (error) {
    if (paused) return;
    failures += 1;
    const why = /^\d+$/.test(error.message) ? error.message : "no answer";
    say("failed", `As of ${lastSeen}: ${why}`);
    comeAgain(Math.min(FAILED_AT_MOST_S, FAILED_AT_FIRST_S * 2 ** (failures - 1)));
  } finally {
    asking = false;
  }
}

/** Show the numbers beside the subjects of the menu: a JSON object by address. */
function showNumbers(text) {
  if (!text) return;
  const numbers = JSON.parse(text);
  for (const place of document.querySelectorAll("[data-number]")) place.textContent = numbers[place.dataset.number] ?? "";
}

let lastSeen = new Date().toTimeString().slice(0, 8);

function say(state, text) {
  const where = document.getElementById("live-state");
  if (state === "live") lastSeen = new Date().toTimeString().slice(0, 8);
  if (where.dataset.state === state && where.textContent === text) return;
  where.dataset.state = state;
  where.textContent = text;
}

/** Show what has come: rows that are there change, what is new at the top of a list waits for the reader. */
function take(live, html) {
  const fresh = nodesOf(html);
  const rows = live.querySelector("[data-rows][data-hold]");
  const freshRows = fresh.querySelector("[data-rows]");
  if (rows && freshRows && (window.scrollY > 0 || rows.querySelector(":checked, :focus-within"))) {
    const known = new Set([...rows.children].map((row) => row.id));
    const newer = [];
    for (const row of freshRows.children) {
      if (known.has(row.id)) break;
      newer.push(row);
    }
    if (newer.length) {
      waiting = html;
      tellOfNewer(live, newer.length === freshRows.children.length ? `${newer.length} or more` : newer.length);
      newer.forEach((row) => row.remove());
      const there = new Map([...freshRows.children].map((row) => [row.id, row]));
      for (const row of rows.children) if (there.has(row.id)) patch(row, there.get(row.id));
      showTimes();
      return;
    }
  }
  waiting = null;
  document.getElementById("newer")?.remove();
  patchChildren(live, fresh);
  showTimes();
  document.dispatchEvent(new CustomEvent("dl:patched"));
}

function tellOfNewer(live, number) {
  let button = document.getElementById("newer");
  if (!button) {
    button = document.createElement("button");
    button.id = "newer";
    button.className = "newer";
    button.addEventListener("click", () => {
      button.remove();
      patchChildren(live, nodesOf(waiting));
      waiting = null;
      showTimes();
      document.dispatchEvent(new CustomEvent("dl:patched"));
    });
    live.before(button);
  }
  button.textContent = `${number} newer ↑`;
}
