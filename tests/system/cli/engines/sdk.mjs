// Ask a door by OpenAI's SDK for JavaScript: node sdk.mjs BASE_URL MODEL; print what came as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 4 });
let parts = 0;
for await (const part of await client.chat.completions.create({ model, messages, max_tokens: 4, stream: true })) {
  parts += part.choices[0]?.delta?.content ? 1 : 0;
}
const refused = await client.chat.completions.create({ model: "nosuch", messages }).catch((error) => error.code);
const models = (await client.models.list()).data.map((each) => each.id);
console.log(JSON.stringify({ tokens: whole.usage.completion_tokens, parts, models, refused }));
