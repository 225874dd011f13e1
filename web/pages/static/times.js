// Shows timestamps as "3 s ago" and "in 3 s", by the server's clock, and keeps them current.

let ahead = 0; // milliseconds by which the server's clock is ahead of ours

export function noteServerTime(date) {
  if (!date) return;
  const seen = Date.parse(date) - Date.now();
  // The header has whole seconds: only a clock that is really another one matters.
  if (Math.abs(seen) > 2000) ahead = seen;
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function inWords(seconds) {
  for (const [unit, name] of UNITS) {
    if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name}`;
  }
  return "0 s";
}

export function showTimes() {
  const now = Date.now() + ahead;
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const seconds = (now - Date.parse(time.dateTime)) / 1000;
    const text = seconds >= 0 ? `${inWords(seconds)} ago` : `in ${inWords(-seconds)}`;
    if (time.textContent !== text) time.textContent = text;
  }
}

export function keepTimes() {
  noteServerTime(document.querySelector("meta[name=server-time]")?.content);
  showTimes();
  setInterval(() => document.hidden || showTimes(), 1000);
}
