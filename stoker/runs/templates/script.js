"use strict";
// Shared by all pages: copying commands, saving files, and following a run in progress.

const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

function button(name, label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = name;
  made.textContent = label;
  made.onclick = event => { event.stopPropagation(); act(made); };
  return made;
}

// Commands: <pre class="copy">.
for (const block of document.querySelectorAll("pre.copy")) {
  const text = block.textContent;
  block.append(button("copy", "copy", self => {
    copy(text);
    self.textContent = "copied";
    setTimeout(() => { self.textContent = "copy"; }, 1500);
  }));
}

function copy(text) { // this also works on pages served without HTTPS
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function download(name, text) {
  const link = document.createElement("a");
  link.download = name;
  link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(text)}`;
  link.click();
}

{ // A page that is redrawn during training: <main data-reload="seconds" data-drawn="time">.
const {reload, drawn} = document.querySelector("main").dataset;
const key = `scroll ${location.pathname}`;
try {
  const kept = JSON.parse(sessionStorage.getItem(key));
  sessionStorage.removeItem(key);
  if (kept) {
    document.querySelectorAll("details").forEach((part, i) => { part.open = kept.open[i]; });
    scrollTo(0, kept.y);
  }
} catch { /* without session storage, the page starts at the top */ }

function warn() {
  const minutes = Math.round((Date.now() / 1000 - drawn) / 60), late = document.querySelector(".late");
  if (late && minutes >= 3) late.textContent = `not updated for ${minutes} min: the run may have been killed`;
}

function follow() {
  warn();
  if (document.hidden || document.querySelector("dialog") || !getSelection().isCollapsed) return;
  const open = [...document.querySelectorAll("details")].map(part => part.open);
  try { sessionStorage.setItem(key, JSON.stringify({y: scrollY, open})); } catch { /* as above */ }
  location.reload();
}
if (reload) {
  warn(); // each reload removes the warning
  setInterval(follow, 1000 * reload);
}
}
