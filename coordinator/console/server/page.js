"use strict";
// What comes from a job becomes text, never markup.

const LOOK_MS = 1000, HIDDEN_MS = 10000, ORDER = ["holding", "gathering", "running", "submitted"];
const byId = (name) => document.getElementById(name);
const cards = new Map();

function say(text, isAway) {
  byId("summary").textContent = text;
  byId("summary").className = isAway ? "away" : "";
}

function put(card, selector, text) {
  const element = card.querySelector(selector);
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

function made(tag, text, kind) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

/* A curve over iterations; the scale is from 0 to 1, or wider if the rewards are. */
function draw(card, points) {
  const curve = points.reward || [], tests = points.eval_reward || [], all = [...curve, ...tests];
  card.querySelector("figure").hidden = !all.length;
  if (!all.length) return;
  const low = Math.min(0, ...all.map((p) => p[1])), high = Math.max(1, ...all.map((p) => p[1]));
  const first = Math.min(...all.map((p) => p[0])), last = Math.max(...all.map((p) => p[0]));
  const x = (p) => (last > first ? 4 + 312 * (p[0] - first) / (last - first) : 160).toFixed(1);
  const y = (p) => (88 - 80 * (p[1] - low) / (high - low)).toFixed(1);
  const dots = (some) => some.map((p) => `M${x(p)} ${y(p)}h0.01`).join("");
  const line = curve.map((p, i) => `${i ? "L" : "M"}${x(p)} ${y(p)}`).join("");
  card.querySelector(".line").setAttribute("d", curve.length > 1 ? line : dots(curve));
  card.querySelector(".evaluations").setAttribute("d", dots(tests));
  const newest = curve.length ? curve[curve.length - 1][1] : null;
  put(card, ".last", newest === null ? "–" : newest.toFixed(3));
  const what = card.querySelector(".what");
  what.replaceChildren(made("span", "reward"));
  if (tests.length) what.append(made("i", ` ● evaluated ${tests[tests.length - 1][1].toFixed(3)}`));
  put(card, ".from", `iteration ${first}`);
  put(card, ".range", `from ${low.toFixed(low ? 1 : 0)} to ${high.toFixed(high === 1 ? 0 : 1)}`);
  put(card, ".to", last > first ? String(last) : " ");
  card.querySelector("svg").setAttribute("aria-label", `reward from iteration ${first} to ${last}`);
}

function node(about) {
  const item = document.createElement("li"), counts = about.tasks_assigned ? ` ${about.tasks_done}/${about.tasks_assigned}` : "";
  item.className = about.state;
  const doing = about.state === "alive" ? about.phase.replaceAll("_", " ") + counts : about.state.replaceAll("_", " ");
  item.append(made("b", about.name), made("span", about.host, "host"), made("span", doing, "doing"));
  return item;
}

function links(job) {
  const to = `/jobs/${encodeURIComponent(job.name)}`;
  const found = job.num_nodes ? [["Report", "/report"], ["Status", ""]] : [];
  return [...found, ["Output", "/logs?lines=500"]].map(([text, path]) => {
    const link = made("a", text);
    link.href = to + path;
    link.target = "_blank";
    link.rel = "noopener";
    return link;
  });
}

function show(job) {
  if (!cards.has(job.name)) {
    cards.set(job.name, byId("job").content.firstElementChild.cloneNode(true));
  }
  const card = cards.get(job.name), isGoing = ORDER.includes(job.state), text = JSON.stringify(job);
  if (card.shown === text) return card;
  card.shown = text;
  card.className = job.state;
  put(card, "h2", job.name);
  put(card, ".badge", job.state);
  const of = job.iterations ? ` of ${job.iterations}` : "";
  const where = job.iteration ? [`iteration ${job.iteration}${of}`] : [];
  if (isGoing && job.iteration && job.phase) where.push(job.phase.replaceAll("_", " "));
  if (job.start > 1) where.push(`start ${job.start}`);
  if (job.state === "submitted") where.push("waits for its turn");
  put(card, ".where", where.join(" · "));
  put(card, ".when", new Date(job.at).toLocaleString([], {dateStyle: "medium", timeStyle: "short"}));
  put(card, ".waiting", job.waiting);
  put(card, ".error", job.error);
  draw(card, job.points);
  const nodes = (isGoing ? job.nodes : []).map((about) => node(about));
  if (isGoing && job.num_nodes > nodes.length) nodes.push(made("li", `and ${job.num_nodes - nodes.length} more`));
  card.querySelector(".nodes").replaceChildren(...nodes);
  card.querySelector(".nodes").hidden = !nodes.length;
  card.querySelector(".links").replaceChildren(...links(job));
  return card;
}

function arrange(jobs) {
  const place = (job) => (ORDER.includes(job.state) ? ORDER.indexOf(job.state) : ORDER.length);
  const sorted = [...jobs].sort((a, b) => place(a) - place(b) || ((a.at < b.at) === (a.state !== "submitted") ? 1 : -1));
  const wanted = sorted.map(show), main = byId("jobs");
  for (const name of cards.keys()) if (!jobs.some((job) => job.name === name)) cards.delete(name);
  if (wanted.length !== main.children.length || wanted.some((card, i) => card !== main.children[i])) {
    main.replaceChildren(...wanted);
  }
  byId("none").hidden = jobs.length > 0;
  const counts = new Map();
  for (const job of sorted) counts.set(job.state, (counts.get(job.state) || 0) + 1);
  say([...counts].map(([state, count]) => `${count} ${state}`).join(", "));
}

async function ask(path) {
  const answer = await fetch(path, {cache: "no-store"});
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

let timer = 0, isKnown = false, isAsking = false;

/* Shows the jobs, again and again; without a token, the form for one. */
async function look() {
  if (isAsking) return;
  clearTimeout(timer);
  isAsking = true;
  try {
    isKnown = isKnown || (await ask("/login")).known;
    byId("login").hidden = isKnown;
    if (isKnown) arrange((await ask("/jobs")).jobs);
    else say("");
  } catch (error) {
    isKnown = false;
    say("The server does not answer. The jobs go on; asking again.", true);
  }
  isAsking = false;
  if (isKnown || byId("login").hidden) timer = setTimeout(look, document.hidden ? HIDDEN_MS : LOOK_MS);
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = JSON.stringify({token: byId("token").value.trim()});
  const answer = await fetch("/login", {method: "POST", headers: {"Content-Type": "application/json"}, body});
  byId("token").value = "";
  byId("refused").textContent = answer.ok ? "" : (await answer.json()).error;
  if (answer.ok) look();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
look();
