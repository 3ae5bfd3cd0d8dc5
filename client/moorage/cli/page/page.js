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
  for (const [id, html] of Object.entries(parts)) replace(document.getElementById(id), html);
  drawGrids();
  tellTab();
}

// The title and the icon of the tab say whether something is wrong in the fleet.
const title = document.title;

function tellTab() {
  const told = document.querySelector("#head [data-wrong]");
  if (!told) return;
  const wrong = Number(told.dataset.wrong), grave = Number(told.dataset.grave);
  document.title = wrong ? `${wrong} wrong · ${title}` : title;
  const colour = grave ? "#c3312a" : wrong ? "#c98a00" : "#2c8f57";
  const shape = grave ? '<path d="M8 1 15 15H1z"' : wrong ? '<path d="M8 1 15 8 8 15 1 8z"' : '<circle cx="8" cy="8" r="7"';
  const icon = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">${shape} fill="${colour}"/></svg>`;
  document.querySelector("link[rel=icon]").href = `data:image/svg+xml,${encodeURIComponent(icon)}`;
}

// What a person has folded or opened stays so.
function replace(part, html) {
  const open = new Map([...part.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
  part.innerHTML = html;
  for (const each of part.querySelectorAll("details[id]")) if (open.has(each.id)) each.open = open.get(each.id);
}

// A grid has a cell a replica, coloured by its state, with the letter of the state where there is room for it.
const COLOURS = {"F": "--bad", "L": "--odd", "X": "--odd", "Z": "--frozen", "?": "--idle", "r": "--link", "s": "--frozen",
  "q": "--wait", ".": "--leased"};
let chosen = "";

function drawGrids() {
  for (const button of document.querySelectorAll("button[data-letter]")) {
    button.setAttribute("aria-pressed", button.dataset.letter === chosen);
  }
  for (const grid of document.querySelectorAll("canvas.grid")) drawGrid(grid);
}

function shape(grid) {
  const wide = grid.clientWidth || 600;
  const size = Math.max(4, Math.min(18, Math.floor(Math.sqrt(wide * 240 / grid.dataset.letters.length))));
  return {wide, size, inRow: Math.max(1, Math.floor(wide / size))};
}

function drawGrid(grid) {
  const letters = grid.dataset.letters, {wide, size, inRow} = shape(grid);
  const scale = window.devicePixelRatio || 1, high = Math.ceil(letters.length / inRow) * size;
  grid.width = wide * scale;
  grid.height = high * scale;
  grid.style.height = `${high}px`;
  const style = getComputedStyle(document.documentElement), on = grid.getContext("2d");
  const colour = Object.fromEntries(Object.entries(COLOURS).map(([letter, name]) => [letter, style.getPropertyValue(name)]));
  on.scale(scale, scale);
  on.font = `${size - 6}px system-ui, sans-serif`;
  on.textAlign = "center";
  on.textBaseline = "middle";
  for (let at = 0; at < letters.length; at++) {
    const letter = letters[at], x = at % inRow * size, y = Math.floor(at / inRow) * size;
    on.globalAlpha = chosen && letter !== chosen ? 0.15 : 1;
    on.fillStyle = colour[letter];
    on.fillRect(x, y, size - 1, size - 1);
    if (size >= 12 && letter !== ".") {
      on.fillStyle = letter === "F" || letter === "r" ? style.getPropertyValue("--card") : style.getPropertyValue("--text");
      on.fillText(letter, x + (size - 1) / 2, y + size / 2);
    }
  }
}

function numberAt(grid, at) {
  for (const pair of grid.dataset.numbers.split(",")) {
    const [first, last] = pair.split("-").map(Number);
    if (at <= last - first) return first + at;
    at -= last - first + 1;
  }
  return null;
}

function tellCell(grid, at) {
  const letter = grid.dataset.letters[at];
  if (letter === undefined) return;
  const each = Number(grid.dataset.each), first = numberAt(grid, at * each), last = numberAt(grid, at * each + each - 1);
  const word = document.querySelector(`button[data-letter="${letter}"]`)?.textContent.slice(2) ?? letter;
  const which = each === 1 ? `replica ${first}` : `replicas ${first} to ${last ?? "the last"}`;
  const said = each === 1 ? saidOf(grid, String(first)) : [];
  grid.parentElement.querySelector(".grid-words").textContent = [`${which}: ${word}`, ...said].join(", ");
}

// What the table of failures says of a replica, if it has it: item, code, last line, host.
function saidOf(grid, replica) {
  const rows = [...grid.parentElement.querySelectorAll("tbody tr")];
  const cells = rows.find((row) => row.cells[0].textContent === replica)?.cells ?? [];
  const [, item, code, said, host] = [...cells].map((cell) => cell.textContent.trim());
  return [item === "-" ? "" : item, code && `code ${code}`, said, host].filter(Boolean);
}

main.addEventListener("mousemove", (event) => {
  if (!event.target.matches("canvas.grid")) return;
  const grid = event.target, {size, inRow} = shape(grid), column = Math.floor(event.offsetX / size);
  if (column < inRow) tellCell(grid, Math.floor(event.offsetY / size) * inRow + column);
});

main.addEventListener("keydown", (event) => {
  if (!event.target.matches("canvas.grid")) return;
  const grid = event.target, step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: shape(grid).inRow, ArrowUp: -shape(grid).inRow};
  if (!(event.key in step)) return;
  event.preventDefault();
  const at = Math.max(0, Math.min(grid.dataset.letters.length - 1, Number(grid.dataset.at ?? -1) + step[event.key]));
  grid.dataset.at = at;
  tellCell(grid, at);
});

main.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-letter], button[data-copy]");
  if (!button) return;
  if (button.dataset.copy) {
    navigator.clipboard?.writeText(button.dataset.copy).then(() => { button.textContent = "copied"; });
    return;
  }
  chosen = chosen === button.dataset.letter ? "" : button.dataset.letter;
  drawGrids();
});

// / goes to the filter, j and k to the next and the last link of a row or a host, ? says so.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const filter = document.querySelector("input[name=filter]"), help = document.querySelector("dialog");
  if (event.key === "/" && filter) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "?") {
    if (help.open) help.close();
    else help.showModal();
  } else if (event.key === "j" || event.key === "k") {
    const links = [...main.querySelectorAll("tbody td:first-child a, td a, .host, #verdict a")].filter((each) => each.offsetParent);
    const at = links.indexOf(document.activeElement);
    links[at < 0 ? 0 : Math.max(0, Math.min(links.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus();
  }
});

function print() {
  for (const each of document.querySelectorAll("details")) each.open = true;
  window.print();
}

if (new URLSearchParams(location.search).has("print")) window.addEventListener("load", print);
window.addEventListener("resize", drawGrids);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawGrids);
drawGrids();
tellTab();

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
