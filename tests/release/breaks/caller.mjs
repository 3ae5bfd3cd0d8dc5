// A bare caller with the defaults of nats.js: `node caller.mjs URL SUBJECT PATIENCE_MS`. It calls once for each line of
// its input, `NUMBER SECONDS`, and writes what came: {"number", "told", "at"}.
import { createInterface } from "node:readline";
import { connect } from "@nats-io/transport-node";

const [url, subject, patience] = process.argv.slice(2);
const say = (said) => process.stdout.write(`${JSON.stringify({ ...said, at: Date.now() / 1000 })}\n`);
const nc = await connect({ servers: url });
(async () => {
  for await (const each of nc.status()) if (each.type === "reconnect") say({ told: "back" });
})();
say({ told: "ready" });
for await (const line of createInterface({ input: process.stdin })) {
  const number = Number(line.split(" ")[0]);
  nc.request(subject, line, { timeout: Number(patience) }).then(
    (answer) => say({ number, told: answer.headers?.get("Nats-Service-Error") || answer.string() }),
    (error) => say({ number, told: `failed ${error.name}: ${error.message}` }),
  );
}
