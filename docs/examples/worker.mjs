// A worker in JavaScript, with nats.js and nothing of moorage: the recipe of docs/how-to/write-a-worker.md once more.
//
//	npm install @nats-io/transport-node@3 && node worker.mjs
import { spawn } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";
import { connect } from "@nats-io/transport-node";

const NAME = "plain";
const GPU = { index: 0, vendor: "nvidia", name: "Example 24GB", uuid: "EXAMPLE-0000-0000-0002", memory_mib: 24000 };
const HELLO = { kind: "hello", worker: NAME, boot: `boot-${Date.now()}`, drivers: ["process"], gpu_pool: [GPU] };
const facts = []; // what is not acknowledged yet
const seen = new Set(); // every placement that came
const jobs = new Map(); // what runs, by the name of the attempt
const fenced = new Set(); // what was ended because the lease was over
let session = "";
let reign = 0;
let news = () => {};

const { NATS_URL = "nats://127.0.0.1:4222" } = process.env;
const { username: user, password: pass, host } = new URL(NATS_URL); // this library takes no password in the address
const nc = await connect(user ? { servers: host, user, pass } : { servers: host });

async function ask(verb, frame) {
  try {
    return (await nc.request(`moorage.worker.${NAME}.${verb}`, JSON.stringify(frame), { timeout: 2000 })).json();
  } catch {
    return { kind: "error", code: "no-answer", message: "no answer", retry_after_s: 1 };
  }
}

function tell(kind, name, code = 0, detail = "") {
  facts.push([kind, ...name, code, detail]);
  news();
}

function run(name, asked) {
  tell("claimed", name);
  const ours = { CUDA_VISIBLE_DEVICES: GPU.uuid, MOORAGE_TENANT: name[0], MOORAGE_JOB: name[1] };
  const env = { PATH: process.env.PATH, ...asked.env, ...ours };
  const [program, ...words] = asked.argv;
  const child = spawn(program, words, { env, detached: true, stdio: ["ignore", "inherit", "inherit"] });
  const over = new Promise((resolve) => {
    child.once("spawn", () => tell("started", name));
    child.once("error", (error) => {
      tell("exited", name, 127, `start-failed: ${error.message}`);
      resolve();
    });
    child.once("exit", (code, signal) => {
      tell("exited", name, code ?? -(signal === "SIGKILL" ? 9 : 15), fenced.has(String(name)) ? "fence" : "exit");
      resolve();
    });
  }).then(() => {
    jobs.delete(String(name));
    tell("freed", name); // only this gives the GPU to another job
  });
  jobs.set(String(name), { name, over, kill: (signal) => child.pid && process.kill(-child.pid, signal) });
}

function onWanted(frame) {
  if (frame.session !== session || frame.reign < reign) return; // of an earlier session, or of a leader before
  for (const [tenant, job, replica, attempt, fence, slots, mode, hold, body] of frame.place ?? []) {
    const name = [tenant, job, replica, attempt, fence];
    if (seen.has(String(name))) continue; // it is sent until it is done
    seen.add(String(name));
    const text = Buffer.from(body, "base64").toString();
    const asked = text.startsWith("{") ? JSON.parse(text).run : {};
    const secrets = Object.values(asked.env ?? {}).some((value) => typeof value === "object");
    if (hold || secrets || asked.items || !asked.argv) {
      tell("refused", name, 0, "not-here: no gangs, no secrets and no items here, and requests in JSON alone");
    } else run(name, asked);
  }
  for (const [tenant, job, replica, attempt, fence] of frame.end ?? []) {
    const name = [tenant, job, replica, attempt, fence];
    if (jobs.has(String(name))) jobs.get(String(name)).kill("SIGTERM"); // a real worker sends SIGKILL after grace_s
    else if (!seen.has(String(name))) {
      seen.add(String(name)); // a late placement of it is not taken up
      tell("withdrawn", name);
    }
  }
}

// One session: renew and report until the lease is over, or until the leader says that the session is.
async function live(joined, until) {
  let renewAt = 0;
  let n = 0;
  let no = 0;
  let flight = [];
  for (let now; (now = performance.now()) < until; ) {
    let answer;
    if (now >= renewAt) {
      n += 1;
      renewAt = now + joined.renew_s * 1000;
      const held = [...jobs.values()].map(({ name }) => [...name, "running"]);
      answer = await ask("renew", { kind: "renew", session, n, no, held, reign });
      if (answer.kind === "renewed") {
        until = now + joined.lease_s * 1000; // from when it was sent
        reign = Math.max(reign, answer.reign);
      }
    } else if (flight.length || facts.length) {
      if (!flight.length) flight = [...facts]; // one frame at a time, the same again until it is answered
      answer = await ask("fact", { kind: "facts", session, no: no + 1, facts: flight });
      if (answer.kind === "recorded") {
        no += 1;
        facts.splice(0, flight.length);
        flight = [];
      }
    } else {
      await Promise.race([new Promise((resolve) => (news = resolve)), sleep(renewAt - now)]);
      continue;
    }
    if (["session-over", "gap"].includes(answer.code)) return;
    if (answer.kind === "error") await sleep(joined.renew_s * 250); // half a second; then the same again
  }
}

nc.subscribe(`moorage.worker.${NAME}.wanted`, { callback: (error, message) => error || onWanted(message.json()) });
for (let n = Math.floor(Date.now() / 1000); ; ) {
  n += 1;
  const sent = performance.now();
  const told = [...facts];
  const join = { kind: "join", machine: `machine-of-${NAME}`, boot: HELLO.boot, n, hello: HELLO, facts: told };
  const joined = await ask("join", join);
  if (joined.kind === "error") {
    console.log("not joined:", joined.code, joined.message);
    await sleep((joined.retry_after_s ?? 5) * 1000);
    continue;
  }
  session = joined.session;
  reign = Math.max(reign, joined.reign);
  facts.splice(0, told.length); // the join has reported them
  console.log("joined");
  await live(joined, sent + joined.lease_s * 1000);
  session = "";
  const left = [...jobs.values()];
  for (const { name, kill } of left) {
    fenced.add(String(name));
    kill("SIGKILL");
  }
  await Promise.all(left.map(({ over }) => over)); // a new session begins when nothing of the last one runs
}
