"use strict";
// The one script of all pages. base.html allows it by its hash, so nothing else on a page can run.

const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

// Copy buttons: <pre class="copy">.
for (const block of document.querySelectorAll("pre.copy")) {
  const text = block.textContent;
  block.append(button("copy", "copy", self => {
    copy(text);
    self.textContent = "copied";
    setTimeout(() => { self.textContent = "copy"; }, 1500);
  }));
}

function button(name, label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = name;
  made.textContent = label;
  made.onclick = event => { event.stopPropagation(); act(made); };
  return made;
}

function copy(text) { // also where navigator.clipboard is missing: a page served by plain http
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
