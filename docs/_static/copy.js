// A button on each block of code that copies it, without the prompt of a shell.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div:not(.highlight-text) > div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = block.querySelector("pre").textContent.replace(/^\$ /gm, "");
      await navigator.clipboard.writeText(text.trimEnd());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
