// Shows the parts of the page as the server sends them. What it cannot hear any more is dimmed and stays.
"use strict";
const source = new EventSource("/live" + location.pathname + location.search);
source.onmessage = (event) => {
  document.body.classList.remove("away");
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    let part = document.getElementById(id);
    if (!part) {
      part = document.querySelector("main").appendChild(document.createElement("div"));
      part.id = id;
    }
    part.innerHTML = html;
  }
};
source.onerror = () => {
  document.body.classList.add("away");
  // after a refusal the browser does not try again by itself
  if (source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
};
