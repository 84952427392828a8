// Requests to the server, and the chunks of its streams.

let apiKey = ""; // kept in memory only

export function setKey(key) {
  apiKey = key;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = apiKey ? { ...options.headers, authorization: `Bearer ${apiKey}` } : options.headers;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // without JSON the error shows the status
  throw new Refused(response.status, body?.error?.message ?? `the server answered ${response.status}`);
}

export const getJson = async (path, options) => (await request(path, options)).json();

const OPTIONS = { include_usage: true, include_draft: true };

export const streamAnswer = (body, signal) => streamed("v1/chat/completions", { ...body, stream_options: OPTIONS }, signal);
export const streamRace = (body, signal) => streamed("race", body, signal);

// Yields the chunks of a stream.
async function* streamed(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(200, chunk.error.message);
    yield chunk;
  }
  throw new Refused(200, "the stream ended early");
}

async function* eventData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (held + decoder.decode(value, { stream: true })).split("\n");
      held = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
