// Shows the parts of the page as the server sends them. What it cannot hear any more is dimmed and stays.
// A tab that nobody sees hears nothing: a browser has six connections to a host, for all of its tabs together.
"use strict";
const main = document.querySelector("main");
let source = null;

function show({order, parts}) {
  document.body.classList.remove("away");
  for (const part of [...main.children]) if (part.id && !order.includes(part.id)) part.remove();
  let before = main.querySelector(":scope > div:not([id])");
  for (const id of order) {
    let part = document.getElementById(id);
    if (!part) {
      part = document.createElement("div");
      part.id = id;
      if (before) before.after(part);
      else main.prepend(part);
    }
    before = part;
  }
  for (const [id, html] of Object.entries(parts)) document.getElementById(id).innerHTML = html;
}

function listen() {
  source = new EventSource("/live" + location.pathname + location.search);
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    document.body.classList.add("away");
    // after a refusal the browser does not try again by itself
    if (source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
  };
}

document.onvisibilitychange = () => {
  if (document.hidden) source?.close();
  else listen();
};
if (!document.hidden) listen();
